"""The Triton backend on the interpreter: beside attention by its formula, where the kernels have borders of their own.
All of test_backends.py runs with it among the proofs."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from charonia.core.errors import InvalidArgument
from charonia.engine.attention.backend import CacheSpec
from charonia.engine.attention.selector import capable_backends, create_backend
from charonia.engine.attention.torch_attention import ReferenceAttention
from charonia.engine.attention.triton_attention import TritonAttention
from charonia.engine.checkpoint.model_spec import LayerAttention, RopeSpec
from charonia.engine.layers.rotary import TorchRotary
from charonia.engine.step_batch import DeviceBatch, StepBatch, upload_columns

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")
FREE, BLOCKS = 7, 90
"""Blocks of the cache that no row has: what lies there is NaN."""


PLAIN = LayerAttention()


def spec(attention: LayerAttention = PLAIN, **changes: object) -> CacheSpec:
    return CacheSpec((attention,), 6, 2, 16, 16, torch.float32, CPU)._replace(**changes)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Pair:
    """The backend and the reference, with the same tokens in their caches, and rows of such lengths and counts."""

    def __init__(self, shape: CacheSpec, rows: list[tuple[int, int]]) -> None:
        self.shape, self.rows = shape, rows
        self.backends = TritonAttention(shape), ReferenceAttention(shape)
        order = (torch.randperm(BLOCKS - FREE, generator=torch.Generator().manual_seed(1)) + FREE).tolist()
        width = max(-(-sum(row) // shape.block_size) for row in rows)
        blocks = [[order.pop() for _ in range(-(-sum(row) // shape.block_size))] for row in rows]
        self.tables = torch.tensor([[*mine, *[0] * (width - len(mine))] for mine in blocks])
        for backend in self.backends:
            backend.allocate(BLOCKS)
        mine, reference = (backend._cache for backend in self.backends)
        mine.fill_(torch.nan)
        for line, (start, _) in enumerate(rows):
            known = random(2, start, 2, 16).to(shape.dtype)
            token = torch.arange(start)
            blocks, offsets = self.tables[line, token // shape.block_size], token % shape.block_size
            mine[0, :, blocks, :, offsets] = known.transpose(0, 1)
            reference[0, :, blocks * shape.block_size + offsets] = known

    def batch(self, rows: list[tuple[int, int]], lines: list[int]) -> StepBatch:
        starts, counts = zip(*rows, strict=True)
        return StepBatch(lines, starts, counts, torch.zeros(len(self.tables), 1), self.tables, self.shape.block_size)

    def step(self, rows: list[tuple[int, int]], lines: list[int], seed: int) -> list[Tensor]:
        batch, shape = self.batch(rows, lines), self.shape
        q, k, v = (random(batch.size, heads, 16 + seed)[..., :16] for heads in (6, 2, 2))
        q, k, v = (each.to(shape.dtype).contiguous() for each in (q, k, v))
        sinks = random(6) if shape.attention[0].sinks else None
        return [backend.begin_step(batch)(0, q, k, v, sinks) for backend in self.backends]

    def check(self) -> None:
        found, right = self.step(self.rows, [*range(len(self.rows))], 2)
        torch.testing.assert_close(found, right, atol=2e-5 if found.dtype == torch.float32 else 4e-3, rtol=1e-3)


@pytest.mark.parametrize("attention", [PLAIN, LayerAttention(20, 0.3, 1.5, sinks=True)], ids=str)
def test_decoding_rows_drafts_and_chunks_in_one_step(attention: LayerAttention) -> None:
    Pair(spec(attention), [(40, 1), (0, 1), (15, 5), (16, 8), (0, 30), (31, 50)]).check()


def test_a_long_context_is_cut_into_parts() -> None:
    Pair(spec(dtype=torch.float16), [(600, 1), (255, 1), (256, 1), (3, 1)]).check()


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from((0, 1, 15, 16, 70)), st.sampled_from((1, 2, 7, 9, 40))), min_size=1, max_size=3),
    st.sampled_from((None, 1, 16, 17)),
    st.sampled_from((4, 16)),
)
def test_rows_of_any_shape(interpreted: None, rows: list[tuple[int, int]], window: int | None, block: int) -> None:
    Pair(spec(LayerAttention(window), block_size=block * 4), rows).check()


def test_a_row_says_the_same_whatever_is_beside_it() -> None:
    pair = Pair(spec(), [(300, 1), (40, 3), (0, 20)])
    q, k, v = (random(24, heads, 16) for heads in (6, 2, 2))
    together = pair.backends[0].begin_step(pair.batch(pair.rows, [0, 1, 2]))(0, q, k, v)
    alone = pair.backends[0].begin_step(pair.batch([(300, 1)], [0]))(0, q[:1], k[:1], v[:1])
    assert torch.equal(together[0], alone[0])


def test_rotation_and_write_are_those_of_torch() -> None:
    shape = spec()
    pair = Pair(shape, [(5, 3), (40, 1), (0, 20)])
    rotary = TorchRotary(RopeSpec(partial_rotary_factor=0.5), 16, 64, torch.float32, CPU)
    batch = pair.batch(pair.rows, [0, 1, 2])
    packed = random(batch.size, 10, 16)
    angles = rotary(batch.positions)
    found, right = (each.begin_step(batch).apply_rope_and_attend(0, packed, angles) for each in pair.backends)
    torch.testing.assert_close(found, right, atol=2e-5, rtol=1e-3)


def test_padded_rows_and_places_touch_nothing() -> None:
    """As a recorded step has them: eight rows and places, of which three count."""
    pair = Pair(spec(), [(40, 1), (3, 1), (64, 1)])
    three = [[0, 1, 2], [40, 3, 64], [1, 1, 1], [0, 1, 2]]
    columns = np.array([[*own, *[padding] * 5] for own, padding in zip(three, (0, 0, 0, 3), strict=True)])
    numbers = upload_columns(list(columns), CPU)
    there = DeviceBatch(*numbers, pair.tables, 8)
    ones = np.ones(8, np.int32)
    tokens = torch.zeros(3, 1)
    padded = StepBatch(columns[0], columns[1], ones, tokens, pair.tables, 16, there)
    q, k, v = (random(8, heads, 16) for heads in (6, 2, 2))
    before = pair.backends[0]._cache.clone()
    found = pair.backends[0].begin_step(padded)(0, q, k, v)[:3]
    right = pair.backends[1].begin_step(pair.batch(pair.rows, [0, 1, 2]))(0, q[:3], k[:3], v[:3])
    torch.testing.assert_close(found, right, atol=2e-5, rtol=1e-3)
    changed = (pair.backends[0]._cache != before) & ~(pair.backends[0]._cache.isnan() & before.isnan())
    assert changed.any((3, 5)).sum() == 2 * 3  # a key and a value of each row that counts


def test_it_is_for_gpus_and_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(create_backend("auto", spec()), TritonAttention)
    monkeypatch.delenv("CHARONIA_KERNELS")
    assert "triton" not in capable_backends("auto", CPU, torch.float32, 16, "auto")
    with pytest.raises(InvalidArgument, match="'triton' needs a GPU"):
        create_backend("triton", spec())
    assert capable_backends("auto", torch.device("cuda"), torch.bfloat16, 16, "auto")[0] == "triton"
