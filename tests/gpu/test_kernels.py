"""Kernels on the device beside float64: attention, also over a cache in eight bits, norms, gates and quantised
products, in shapes of published models.

CHARONIA_KERNELS=triton runs them on the interpreter, without bf16.
"""

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from charonia.engine.attention.backend import CacheSpec
from charonia.engine.attention.selector import create_backend
from charonia.engine.attention.triton_attention import TritonAttention
from charonia.engine.checkpoint.model_spec import LayerAttention
from charonia.engine.cpu.matmul import GroupedFormat
from charonia.engine.gpu import runtime
from charonia.engine.layers.int4 import dequantize_int4, quantize_int4
from charonia.engine.step_adapters import LoraPart, RankAdapter, StepAdapters
from charonia.engine.step_batch import StepBatch

if TYPE_CHECKING:
    from charonia.engine.gpu.scaled_matmul import QuantisedRows

INTERPRETED = os.environ.get("CHARONIA_KERNELS") == "triton"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no CUDA device"),
]
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
PLAIN = LayerAttention()
CAPPED = LayerAttention(100, 0.1, 20.0)
SUNK = LayerAttention(None, None, None, sinks=True)
BLOCK = 16


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def near(found: Tensor, right: Tensor, roundings: float = 8) -> bool:
    """Within a few roundings of the largest number in the row."""
    bound = roundings * torch.finfo(found.dtype).eps * right.abs().amax(-1, keepdim=True).clamp(min=1e-2)
    return bool(((found.double() - right).abs() <= bound).all())


def exact_attention(q: Tensor, k: Tensor, v: Tensor, attention: LayerAttention, sinks: Tensor | None) -> Tensor:
    """In float64: q [n, heads, d], the last n of k and v [T, kv_heads, d]; [n, heads * d]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (k, v))
    scores = torch.einsum("nhd,thd->hnt", q.double(), keys) * (attention.scale or q.shape[2] ** -0.5)
    if attention.softcap is not None:
        scores = attention.softcap * torch.tanh(scores / attention.softcap)
    back = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
    scores = scores.masked_fill((back < 0) | (back >= (attention.window or math.inf)), -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)), -1)
    return torch.einsum("hnt,thd->nhd", scores.softmax(-1)[..., : len(k)], values).flatten(1)


class AttentionCase:
    """Rows that decode, near and far, rows with drafts, and chunks, in one step over blocks in any order. `history`:
    the keys and values of each row."""

    def __init__(self, spec: CacheSpec) -> None:
        rows = [(0, 1), (40, 1), (15, 5), (31, 20)]
        if not INTERPRETED:
            rows = [(0, 1), (4097, 1), (1023, 1), (15, 5), (700, 8), (0, 300), (512, 513)]
        self.spec, self.rows = spec, rows
        needed = [-(-sum(row) // BLOCK) for row in rows]
        order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0))
        self.tables = torch.zeros(len(rows), max(needed), dtype=torch.int64)
        for line, blocks in enumerate(order.split(needed)):
            self.tables[line, : len(blocks)] = blocks
        self.backend = create_backend("triton", spec)
        self.backend.allocate(sum(needed))
        self.sinks = random(spec.heads) if spec.attention[0].sinks else None
        size, dtype = spec.head_dim, spec.dtype
        self.history = [[random(sum(row), spec.kv_heads, size + which, dtype=dtype)[..., :size] for which in range(2)]
                        for row in rows]  # fmt: skip

    def outputs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What attention says of the last tokens of each row, and their queries; those before are written first."""
        if not INTERPRETED:
            self._compute([0] * len(self.rows), [max(start, 1) for start, _ in self.rows])
        else:
            for first in range(0, 40, 20):
                counts = [min(max(start - first, 0), 20) for start, _ in self.rows]
                self._compute([first] * len(self.rows), counts)
        starts, counts = map(list, zip(*self.rows, strict=True))
        found = self._compute(starts, counts).split(counts)
        return zip(found, self._queries(sum(counts)).split(counts), strict=True)

    def _queries(self, tokens: int) -> Tensor:
        return random(tokens, self.spec.heads, self.spec.head_dim, dtype=self.spec.dtype)

    def _compute(self, starts: list[int], counts: list[int]) -> Tensor:
        known = torch.zeros(len(self.rows), 1, dtype=torch.int32, device=DEVICE)
        batch = StepBatch(np.arange(len(self.rows)), starts, counts, known, self.tables.to(DEVICE), BLOCK)
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        k, v = (
            torch.cat([each[which][start:end] for each, start, end in zip(self.history, starts, ends, strict=True)])
            for which in range(2)
        )
        return self.backend.begin_step(batch)(0, self._queries(len(k)), k, v, self.sinks)

    def kept(self) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of each row in float64, as they are read out of a cache of codes."""
        assert isinstance(self.backend, TritonAttention)
        keys, values, scales = self.backend._layers[0]
        assert scales is not None
        largest = 127.0 if self.spec.kv_cache_dtype == "int8" else 448.0
        lines = len(keys), -1, BLOCK, self.spec.head_dim
        codes = torch.stack((keys, values)).double().view(2, *lines)
        factors = scales.double().movedim(-1, 0).reshape(2, len(keys), -1, BLOCK, 1) / largest
        numbers = (codes * factors).transpose(2, 3).flatten(1, 2)
        found = []
        for table, row in zip(self.tables, self.rows, strict=True):
            place = torch.arange(sum(row))
            slots = (table[place // BLOCK] * BLOCK + place % BLOCK).to(DEVICE)
            found.append((numbers[0][slots], numbers[1][slots]))
        return found


SHAPES = [(32, 8, 128, PLAIN), (14, 2, 64, PLAIN), (16, 8, 256, CAPPED), (32, 32, 96, PLAIN), (64, 8, 64, SUNK)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "attention"), SHAPES)
def test_attention(heads: int, kv_heads: int, size: int, attention: LayerAttention, dtype: torch.dtype) -> None:
    case = AttentionCase(CacheSpec((attention,), heads, kv_heads, size, BLOCK, dtype, DEVICE))
    for (mine, q), (k, v) in zip(case.outputs(), case.history, strict=True):
        assert near(mine, exact_attention(q, k, v, attention, case.sinks), 16)


@pytest.mark.parametrize("dtype", DTYPES[:1], ids=str)
@pytest.mark.parametrize(("kept", "step"), [("int8", 1 / 254), ("fp8", 1 / 28)])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "attention"), SHAPES[::2])
def test_attention_over_codes(
    heads: int, kv_heads: int, size: int, attention: LayerAttention, kept: str, step: float, dtype: torch.dtype
) -> None:
    """As exact as without codes, of what the cache holds; and that is what it was given, but for half a step of the
    largest codes."""
    if kept == "fp8" and not runtime.serves_fp8(dtype, DEVICE):
        pytest.skip("this device does not convert fp8")
    case = AttentionCase(CacheSpec((attention,), heads, kv_heads, size, BLOCK, dtype, DEVICE, kept))
    outputs = list(case.outputs())
    for (mine, q), read, given in zip(outputs, case.kept(), case.history, strict=True):
        assert near(mine, exact_attention(q, *read, attention, case.sinks), 16)
        for found, right in zip(read, given, strict=True):
            exact = right.double()
            assert ((found - exact).abs() <= 1.0001 * step * exact.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [128, 896, 4096, 8192])
def test_norm_after_a_sum(size: int, dtype: torch.dtype) -> None:
    from charonia.engine.gpu.norm import TritonNorm

    x, delta, weight = (random(rows, size, dtype=dtype) for rows in (5, 5, 1))
    wide = (x + delta).double()
    right = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight[0].double()
    assert near(TritonNorm(weight[0], 1e-5).add_and_norm(x, delta), right)
    assert torch.equal(x, wide.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_norms_of_heads_with_rotation_and_write(size: int, dtype: torch.dtype) -> None:
    """Of each token to the same bits alone and among others."""
    from charonia.engine.gpu.attention_plan import CacheShape, LayerCache
    from charonia.engine.gpu.cache_write import write_cache
    from charonia.engine.gpu.norm import TritonNorm

    rows, heads, kv_heads = 7, 16, 4
    normed, half = heads + kv_heads, size // 2
    packed, weight = random(rows, normed + kv_heads, size, dtype=dtype), random(normed, size, dtype=dtype)
    turns = random(rows, 1, half).double()
    cos, sin = (torch.cat((part, part), -1).to(dtype) for part in (turns.cos(), turns.sin()))
    sin[..., :half] *= -1
    shape, norm = CacheShape(heads, kv_heads, size, BLOCK), (TritonNorm(weight, 1e-6), normed)

    def computed(chosen: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and keys and values of the cache, of these tokens, each the first one of a row."""
        own, count = torch.tensor(chosen, device=DEVICE), len(chosen)
        cache = LayerCache(*torch.zeros(2, rows, kv_heads * BLOCK * size, dtype=dtype, device=DEVICE))
        known = torch.zeros(rows, 1, dtype=torch.int32, device=DEVICE)
        blocks = torch.arange(rows, device=DEVICE).view(rows, 1)
        batch = StepBatch(np.array(chosen), np.zeros(count), np.ones(count), known, blocks, BLOCK)
        qkv = torch.split(packed[own], [heads, kv_heads, kv_heads], 1)
        q = write_cache(shape, cache, batch.on_device, batch.owners, qkv, (cos[own], sin[own]), norm)
        stored = (part.view(rows, kv_heads, BLOCK, size)[own, :, 0] for part in (cache.keys, cache.values))
        return q, *stored

    q, k, v = computed([*range(rows)])
    wide = packed[:, :normed].double()
    right = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    right = right * cos.double() + right.roll(half, -1) * sin.double()
    assert near(torch.cat((q, k), 1), right)
    assert torch.equal(v, packed[:, normed:])
    for row in range(rows):
        assert all(torch.equal(alone[0], one[row]) for alone, one in zip(computed([row]), (q, k, v), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate(dtype: torch.dtype) -> None:
    from charonia.engine.gpu.gate import TritonGate

    packed = random(7, 2 * 1000, dtype=dtype)
    gate, up = packed.double().chunk(2, -1)
    assert near(TritonGate("silu")(packed), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rows", [1, 20, 300])
def test_scaled_products(rows: int, kind: torch.dtype, dtype: torch.dtype) -> None:
    """The product of codes is exact but for its last rounding."""
    from charonia.engine.gpu.scaled_matmul import TritonScaledMatmul, quantise_rows

    if kind == torch.float8_e4m3fn and not runtime.serves_fp8(dtype, DEVICE):
        pytest.skip("this device does not multiply fp8")
    x, weight = random(rows, 256, dtype=dtype), quantise_rows(random(96, 256, dtype=dtype), kind)
    codes = quantise_rows(x, kind)
    right = (codes.codes.double() @ weight.codes.double().T) * codes.scales.double()[:, None] * weight.scales.double()
    assert near(TritonScaledMatmul(weight, None)(x), right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [3, 70])
def test_adapters(rows: int, dtype: torch.dtype) -> None:
    """Two of them, of different ranks, on all rows but the last; the second changes the last matrix alone."""
    from charonia.engine.gpu.lora import AdapterRecords, TritonLora

    inputs, outputs = (70, (64, 32)) if INTERPRETED else (5000, (4096, 1024))
    adapters, wide = [], list[Tensor]()
    for seed, ranks in enumerate([(16, 64), (0, 5)]):
        parts, added = [], torch.zeros(inputs, sum(outputs), dtype=torch.float64, device=DEVICE)
        for first, size, rank in zip((0, outputs[0]), outputs, ranks, strict=True):
            if rank:
                a, b = (
                    random(rank, inputs + seed, dtype=dtype)[:, :inputs].contiguous(),
                    random(rank, size, dtype=dtype),
                )
                parts.append(LoraPart(first, size, a, b, 0.01))
                added[:, first : first + size] = 0.01 * a.double().T @ b.double()
        adapters.append(RankAdapter(str(seed), max(ranks), [parts], AdapterRecords([parts], DEVICE)))
        wide.append(added)
    cut = rows // 3
    step = StepAdapters(adapters, np.array([0, cut, rows - 1], np.int64), np.arange(rows - 1))
    x, out = random(rows, inputs, dtype=dtype), random(rows, sum(outputs), dtype=dtype)
    right = out.double()
    right[:cut] += x[:cut].double() @ wide[0]
    right[cut : rows - 1] += x[cut : rows - 1].double() @ wide[1]
    TritonLora(0, outputs, 64).add(x, out, step)
    assert near(out, right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_products_of_groups_in_fp8(rows: int, group: int, dtype: torch.dtype) -> None:
    """Their sums are scaled in float32, and the weights are in blocks of `group` x `group`."""
    from charonia.engine.gpu.scaled_matmul import QuantisedRows, TritonScaledMatmul, quantise_rows

    if not runtime.serves_fp8(dtype, DEVICE):
        pytest.skip("this device does not multiply fp8")
    weight = random(192, 1152).to(torch.float8_e4m3fn)
    scales = random(-(-192 // group), 1152 // group).abs().repeat_interleave(group, 0)[:192].contiguous()
    x = random(rows, 1152, dtype=dtype)
    codes = wide_rows(quantise_rows(x, torch.float8_e4m3fn, group))
    right = codes @ wide_rows(QuantisedRows(weight, scales)).T
    assert near(TritonScaledMatmul(QuantisedRows(weight, scales), None)(x), right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "group"),
    [("floats", 0), ("int4", 32), (torch.int8, 0), (torch.float8_e4m3fn, 0), (torch.float8_e4m3fn, 128)],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 30, 600])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows of experts elsewhere hold anything
def test_experts(tokens: int, kind: torch.dtype | str, group: int, dtype: torch.dtype) -> None:
    """Six of eight are here, one of which nobody chooses. A code between the products may be the next one: of it
    there are three bits."""
    from charonia.engine.gpu.experts import TritonExperts
    from charonia.engine.gpu.scaled_matmul import quantise_rows

    if kind == torch.float8_e4m3fn and not runtime.serves_fp8(dtype, DEVICE):
        pytest.skip("this device does not multiply fp8")
    if INTERPRETED and tokens > 30:
        pytest.skip("the interpreter is slow")
    hidden, inner, first, count = 256, 384, 2, 6
    chosen = torch.rand(tokens, 7, generator=torch.Generator().manual_seed(tokens)).topk(2).indices.to(DEVICE)
    routing, x = random(tokens, 2).abs(), random(tokens, hidden, dtype=dtype)
    stacks = [random(count * 2 * inner, hidden, dtype=dtype) / 16, random(count * hidden, inner, dtype=dtype) / 16]
    codes, wide = zip(*(coded(stack, kind, group) for stack in stacks), strict=True)
    found = TritonExperts(*codes, "silu", range(first, first + count))(x, chosen, routing, None)

    def through(rows: Tensor) -> Tensor:
        return rows.double() if isinstance(kind, str) else wide_rows(quantise_rows(rows.to(dtype), kind, group))

    halves, downs = (each.view(count, -1, each.shape[1]) for each in wide)
    right, given = torch.zeros(tokens, hidden, dtype=torch.float64, device=DEVICE), through(x)
    for expert in range(count):
        token, choice = (chosen == first + expert).nonzero(as_tuple=True)
        if len(token):
            gate, up = (given[token] @ halves[expert].T).chunk(2, -1)
            between = through((F.silu(gate) * up).to(dtype))
            right.index_add_(0, token, between @ downs[expert].T * routing[token, choice, None].double())
    assert near(found, right, 16 if isinstance(kind, str) else 64)


def coded(weight: Tensor, kind: torch.dtype | str, group: int) -> tuple[Any, Tensor]:
    """What kernels are given of weights, and its values in float64."""
    from charonia.engine.gpu.grouped_matmul import GroupedWeights
    from charonia.engine.gpu.scaled_matmul import quantise_rows

    if kind == "floats":
        return weight, weight.double()
    if isinstance(kind, str):
        packed = GroupedWeights(GroupedFormat(*weight.shape, group, False, weight.dtype, weight.dtype), DEVICE)
        packed.pack(0, rows := quantize_int4(weight))
        return packed, dequantize_int4(rows).double()
    codes = quantise_rows(weight, kind, group)
    return codes, wide_rows(codes)


def wide_rows(rows: "QuantisedRows") -> Tensor:
    scales = rows.scales.double().view(len(rows.scales), -1, 1)
    return (rows.codes.double().unflatten(1, (-1, rows.group or rows.codes.shape[1])) * scales).flatten(1)
