"""Layers of a model by themselves, in shapes that the model which is measured has not: experts, those that keep states,
and attention over latents."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any, cast

import numpy as np
import torch

from ..engine.attention.backend import CacheSpec
from ..engine.attention.selector import create_backend
from ..engine.checkpoint.build_context import BuildContext
from ..engine.checkpoint.model_spec import KeyValueShape, LayerAttention
from ..engine.checkpoint.recurrence import LayerState
from ..engine.checkpoint.weights import WeightLoader
from ..engine.cpu.recurrent import ConvolutionColumns, RecurrenceShape, ScanSteps
from ..engine.gpu import runtime
from ..engine.gpu.attention_plan import CacheShape, LayerCache
from ..engine.layers.mlp import GatedMLPSpec, build_experts
from ..engine.layers.recurrence import DeltaRuleGates, StateRecurrence, build_delta_rule, build_selective_scan
from ..engine.layers.recurrent_state import StateSlots
from ..engine.layers.state_convolution import StateConvolution
from ..engine.layers.step_context import StepContext
from ..engine.step_batch import StepBatch
from .gpu_engine import BLOCK, GpuWork, RandomWeights
from .gpu_report import Figure

LAYERS = 4
"""Layers whose states or caches are read in turn."""
NOTHING = cast(Any, None)


class LayerBench:
    """Measures layers of `work` on `device`. `seconds`: of the kernels that a call launches."""

    def __init__(self, work: GpuWork, device: torch.device, seconds: Callable[[Callable[[], object]], float]) -> None:
        self.work = work
        self.device = device
        self.seconds = seconds
        self.dtype: torch.dtype = getattr(torch, work.dtype)

    def _loader(self, rows: int, quantization: str = "none", chunks: bool = False) -> WeightLoader:
        built = BuildContext(self.dtype, self.device, rows, quantization=quantization, recurrence_chunks=chunks)
        return WeightLoader(RandomWeights(self.dtype, self.device), built)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def experts(self, read: float) -> Iterator[Figure]:
        """The experts of a layer, as floats and in the codes that the device multiplies; `read`: bytes a second."""
        (count, per_token, hidden, inner), rows = self.work.experts, self.work.attended[0]
        chosen = torch.rand(rows, count, device=self.device).topk(per_token, -1).indices
        weights = torch.full(chosen.shape, 1 / per_token, device=self.device)
        x = self._random(rows, hidden)
        context = StepContext(NOTHING, NOTHING)
        specs = [GatedMLPSpec(f"experts.{number}", hidden, inner) for number in range(count)]
        for kind in ("none", "int8", "fp8") if runtime.serves_fp8(self.dtype, self.device) else ("none",):
            layer = build_experts(self._loader(rows, kind), specs, range(count))
            seconds = self.seconds(partial(layer, x, chosen, weights, context))
            width = self.dtype.itemsize if kind == "none" else 1
            share = int(chosen.flatten().bincount().count_nonzero()) * 3 * hidden * inner * width / seconds / read
            name = f"{rows} tokens by {count} experts, {self.work.dtype if kind == 'none' else kind}"
            yield Figure(name, 1e6 * seconds, "us", share, "bandwidth")

    def few_rows(self, read: float) -> Iterator[Figure]:
        """Products of few rows by cuBLAS, and by the kernel in each of its tiles, of several layers' weights in turn;
        gate and up with the gate behind them."""
        kernel: Any = import_module("charonia.engine.gpu.few_rows_kernel")
        gate: Any = import_module("charonia.engine.gpu.gate")
        config = self.work.config
        hidden, inner, size = (config[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        shapes = {
            "queries, keys and values": ((heads + 2 * kv_heads) * size, hidden, ""),
            "attention's output": (hidden, heads * size, ""),
            "gate and up": (2 * inner, hidden, "silu"),
            "down": (hidden, inner, ""),
        }
        for what, (outputs, inputs, activation) in shapes.items():
            weights = [self._random(outputs, inputs) for _ in range(2 * LAYERS)]
            behind = gate.TritonGate(activation) if activation else torch.nn.Identity()
            for rows in (1, runtime.FEW_ROWS):
                x = self._random(rows, inputs)
                ways: dict[str, Callable[[torch.Tensor], object]] = {"cuBLAS": partial(_by_cublas, x, behind)}
                for tile in kernel.TILES:
                    name = f"kernel, {tile.outputs} x {tile.inputs}, {tile.stages} stages"
                    ways[name] = partial(_by_kernel, kernel.multiply_few_rows, x, activation, tile)
                for way, multiply in ways.items():
                    seconds = self.seconds(partial(_each, multiply, weights)) / len(weights)
                    share = weights[0].nbytes / seconds / read
                    yield Figure(f"{what}, {rows} rows, {way}", 1e6 * seconds, "us", share, "bandwidth")

    def head_norms(self) -> Iterator[Figure]:
        """Norms of heads, rotation and the cache's write, of rows that decode, by one launch and by two."""
        for rows in self.work.batches:
            for way, seconds in self._head_norms(rows).items():
                yield Figure(f"norms, rotation and write of {rows} rows, {way}", 1e6 * seconds, "us")

    def _head_norms(self, rows: int) -> dict[str, float]:
        """Seconds of a layer, out of several caches in turn."""
        write: Any = import_module("charonia.engine.gpu.cache_write")
        norms: Any = import_module("charonia.engine.gpu.norm")
        heads, kv_heads, size = self.work.normed
        shape, normed = CacheShape(heads, kv_heads, size, BLOCK), heads + kv_heads
        norm = norms.TritonNorm(self._random(normed, size), 1e-6)
        tables = torch.arange(rows, device=self.device).view(rows, 1)
        batch = StepBatch(np.arange(rows), np.zeros(rows), np.ones(rows), tables.int(), tables, BLOCK)
        caches = [LayerCache(*self._random(2, rows, kv_heads * BLOCK * size)) for _ in range(LAYERS)]
        packed, angles = self._random(rows, normed + kv_heads, size), (self._random(rows, 1, size),) * 2
        qkv = torch.split(packed, [heads, kv_heads, kv_heads], 1)

        def together(cache: LayerCache) -> None:
            write.write_cache(shape, cache, batch.on_device, batch.owners, qkv, angles, (norm, normed))

        def apart(cache: LayerCache) -> None:
            norm.norm_heads(packed, normed)
            write.write_cache(shape, cache, batch.on_device, batch.owners, qkv, angles)

        ways = {"one launch": together, "two launches": apart}
        return {name: self._turns([partial(way, cache) for cache in caches]) for name, way in ways.items()}

    def states(self, read: float) -> Iterator[Figure]:
        """Convolutions, and both recurrences, of rows that decode, of which each matrix is read and written, and of a
        prompt."""
        rows, prompt = self.work.attended[0], self.work.prompt
        prefill = f"prefill of {prompt:,}"
        for count, told, chunks in (
            (1, f"decode of {rows}", False),
            (prompt, prefill, False),
            (prompt, f"{prefill} by chunks", True),
        ):
            own = rows if count == 1 else 1
            for shape, scans in ((self.work.delta_rule, False), (self.work.scan, True)):
                name = "selective scan" if scans else "gated delta rule"
                state = LayerState(shape.channels, 3, shape.heads, shape.key_size, shape.value_size)
                context, x, gates = self._context(state, own, count)
                recurrences = [self._recurrence(layer, shape, scans, chunks) for layer in range(LAYERS)]
                seconds = self._turns(recurrences, x, gates, context)
                moved = 2 * own * 4 * shape.heads * shape.key_size * shape.value_size
                share = moved / seconds / read if count == 1 else None
                yield Figure(f"{name} of {shape.heads} heads, {told}", 1e6 * seconds, "us", share, "bandwidth")
            if chunks:
                continue
            loader, channels = self._loader(own), shape.channels
            sizes, parts = (channels, 4), [slice(0, channels)]
            convolutions = [
                StateConvolution(loader, "c", layer, ConvolutionColumns(0), sizes, parts, bias=False, activated=True)
                for layer in range(LAYERS)
            ]
            seconds = self._turns(convolutions, x, context)
            moved = (2 * own * count + 2 * own * 3) * channels * self.dtype.itemsize
            share = moved / seconds / read
            yield Figure(f"convolution of {channels:,} channels, {told}", 1e6 * seconds, "us", share, "bandwidth")

    def _turns(self, layers: Sequence[Callable[..., object]], *arguments: object) -> float:
        """Seconds of one of the layers."""
        return self.seconds(lambda: [layer(*arguments) for layer in layers]) / len(layers)

    def _context(self, state: LayerState, rows: int, count: int) -> tuple[StepContext, torch.Tensor, torch.Tensor]:
        """The context of rows of so many tokens that have one before them, their inputs and gates."""
        slots = StateSlots([state] * LAYERS, rows, self.dtype, self.device)
        slots.allocate(0)
        columns = np.arange(rows), np.ones(rows), np.full(rows, count)
        known = torch.zeros(rows, 1, dtype=torch.int32, device=self.device)
        batch = StepBatch(*columns, known, known.long(), BLOCK)
        context = StepContext(batch, NOTHING, states=slots.begin_step(batch))
        return context, self._random(rows * count, state.channels), self._random(rows * count, 2 * state.heads)

    def _recurrence(self, layer: int, shape: RecurrenceShape, scans: bool, chunks: bool) -> StateRecurrence:
        heads, loader = torch.ones(shape.heads, device=self.device), self._loader(1, chunks=chunks)
        if scans:
            return build_selective_scan(loader, layer, shape, 0, ScanSteps(-heads, heads, heads))
        return build_delta_rule(loader, layer, shape, DeltaRuleGates(-heads, heads, 0, shape.heads))

    def latents(self, read: float, operations: float) -> Iterator[Figure]:
        """Attention over latents, of rows that decode and of a prompt; `operations`: a second, at most."""
        heads, latent, rotated = self.work.latents
        kept = KeyValueShape(1, latent + rotated, latent, values_in_keys=True)
        sizes = heads, 1, kept.key_size, BLOCK
        spec = CacheSpec((LayerAttention(kept=kept),) * LAYERS, *sizes, self.dtype, self.device)
        rows, context = self.work.attended
        seconds, token_bytes = self.attention(spec, rows, context - 1, 1)
        share = rows * context * token_bytes / seconds / read
        name = f"latent attention of {heads} heads"
        yield Figure(f"{name}, decode of {rows} at {context:,}", 1e6 * seconds, "us", share, "bandwidth")
        tokens = self.work.prompt
        seconds, _ = self.attention(spec, 1, 0, tokens)
        share = tokens**2 * heads * (kept.key_size + latent) / seconds / operations
        yield Figure(f"{name}, prefill of {tokens:,}", 1e6 * seconds, "us", share, "peak")

    def attention(self, spec: CacheSpec, rows: int, start: int, count: int) -> tuple[float, float]:
        """Seconds of one layer's attention, which stores the tokens first, out of the layers' caches in turn, and the
        bytes of a token in one of them."""
        backend, blocks = create_backend("auto", spec), -(-(start + count) // BLOCK)
        backend.allocate(rows * blocks)
        tables = torch.randperm(rows * blocks, device=self.device).view(rows, blocks)
        known = torch.zeros(rows, blocks * BLOCK, dtype=torch.int32, device=self.device)
        columns = np.arange(rows), np.full(rows, start), np.full(rows, count)
        step = backend.begin_step(StepBatch(*columns, known, tables, BLOCK))
        kept = spec.shapes[0]
        q, k = (self._random(rows * count, heads, kept.key_size) for heads in (spec.heads, kept.heads))
        v = None if kept.values_in_keys else self._random(rows * count, kept.heads, kept.value_size)
        seconds = self.seconds(lambda: [step(layer, q, k, v) for layer in range(spec.layers)])
        return seconds / spec.layers, backend.block_bytes / BLOCK / spec.layers


def _by_cublas(x: torch.Tensor, behind: Callable[[torch.Tensor], object], weight: torch.Tensor) -> object:
    return behind(torch.nn.functional.linear(x, weight))


def _by_kernel(
    multiply: Callable[..., torch.Tensor], x: torch.Tensor, activation: str, tile: object, weight: torch.Tensor
) -> torch.Tensor:
    return multiply(x, weight, None, activation, tile)


def _each(multiply: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor]) -> None:
    for weight in weights:
        multiply(weight)
