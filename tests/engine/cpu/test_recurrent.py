"""Layers with a state at every level: against a reference in float64, and the same bits whatever shares the step, on
any number of threads, and wherever a sequence is cut, saved and taken up again."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from charonia.engine.cpu.attention import LayerCaches
from charonia.engine.cpu.op_trace import INPUT, OpStruct, OpTrace, TensorOrSymbol, TraceIO
from charonia.engine.cpu.program import DecoderProgram, ProgramInputs, ThreadPool
from charonia.engine.cpu.recurrent import (
    CausalConvolution,
    ChannelScan,
    ConvolutionColumns,
    HeadGate,
    HeadNorm,
    LayerStates,
    RecurrenceShape,
    ScanSteps,
    StepSlots,
    gated_delta_rule,
    selective_scan,
)
from charonia.engine.step_batch import StepBatch
from charonia.engine.step_states import StepStates
from tests.engine.cpu.conftest import ByThreads

DTYPES = (torch.float32, torch.bfloat16)
SLOTS, ROWS = 12, 4
"""Slots of every layer here; the first are rows, the others snapshots."""

KERNELS = (3, 4, 7)
NO_BLOCKS = torch.zeros(ROWS, 1, dtype=torch.int64)
SHAPES = {
    "one head": RecurrenceShape(1, 1, 8, 8, 0, 8, 16),
    "odd": RecurrenceShape(6, 2, 20, 37, 0, 40, 80),
    "wide": RecurrenceShape(4, 2, 128, 128, 0, 256, 512),
    "long keys": RecurrenceShape(2, 2, 256, 72, 0, 512, 1024),
    "mamba": RecurrenceShape(8, 1, 128, 64, 640, 512, 0),
}


class Part(NamedTuple):
    """Tokens [start, end) of a sequence in the row `row`, read from `source`, with saves after so many tokens of the
    sequence into slots."""

    row: int
    start: int
    end: int
    source: int
    saves: dict[int, int] = {}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(*shape, generator=generator).to(dtype)


class Layer(Protocol):
    """A layer with a state: lines of its `inputs` of one sequence are computed in parts."""

    inputs: Tensor
    state: Tensor

    def compute(self, x: Tensor, slots: StepSlots) -> Tensor: ...

    def exact(self, x: Tensor) -> tuple[Tensor, Tensor]: ...


def step(layer: Layer, parts: Sequence[Part], sequences: Sequence[Tensor]) -> list[Tensor]:
    """Compute parts of sequences together; what comes out of each."""
    starts, counts = [part.start for part in parts], [part.end - part.start for part in parts]
    token_ids = torch.zeros(ROWS, max(part.end for part in parts), dtype=torch.int32)
    batch = StepBatch(
        [part.row for part in parts], starts, counts, token_ids, torch.zeros(ROWS, 1, dtype=torch.int64), 16
    )
    saves = [(i, at - part.start, slot) for i, part in enumerate(parts) for at, slot in part.saves.items()]
    states = StepStates([part.source for part in parts], saves)
    slots = StepSlots(batch, states, LayerStates([layer.state], [layer.state]))
    x = torch.cat([sequence[part.start : part.end] for part, sequence in zip(parts, sequences, strict=True)])
    return list(layer.compute(x, slots).split(counts))


class Convolved:
    """A convolution whose inputs stand between other numbers."""

    def __init__(self, kernel: int, dtype: torch.dtype, gated: bool, channels: int = 300) -> None:
        self.weight, self.gated, self.kernel, self.channels = random(channels, kernel), gated, kernel, channels
        self.bias = None if gated else random(channels)
        self.state = torch.full((SLOTS, kernel - 1, channels), float("nan"), dtype=dtype)
        columns = ConvolutionColumns(2 * channels, 0, channels) if gated else ConvolutionColumns(5)
        self._layer = CausalConvolution(self.weight, self.bias, not gated, columns, dtype)
        self.inputs = random(150, 3 * channels + 7, dtype=dtype)

    def compute(self, x: Tensor, slots: StepSlots) -> Tensor:
        return self._layer(x, 0, slots)

    def exact(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n = self.channels
        wide = x.double()
        inputs = wide[:, 5 : 5 + n]
        if self.gated:
            inputs = (x[:, :n].float() * x[:, 2 * n : 3 * n].float()).to(x.dtype).double()
        padded = F.pad(inputs, (0, 0, self.kernel - 1, 0))
        out = F.conv1d(padded.T[None], self.weight.double()[:, None], groups=n)[0].T
        if self.bias is not None:
            out = F.silu(out + self.bias.double())
        return out * wide[:, n : 2 * n] if self.gated else out, padded[len(padded) - self.kernel + 1 :]


class Recurrent:
    """A recurrence, token by token in float64 beside it."""

    def __init__(self, shape: RecurrenceShape, dtype: torch.dtype, scans: bool) -> None:
        self.shape, self.scans = shape, scans
        self.rates, self.bias, self.skip = -random(shape.heads).exp(), random(shape.heads), random(shape.heads, seed=1)
        if scans:
            steps = ScanSteps(self.rates, self.bias, self.skip, 0.01, 2.0)
            self._layer = selective_scan(shape, self.width, steps, dtype)
        else:
            self._layer = gated_delta_rule(shape, self.width, self.width + shape.heads, self.rates, self.bias, dtype)
        self.state = torch.full((SLOTS, shape.heads, shape.key_size, shape.value_size), float("nan"))
        self.inputs = random(150, self.width + 2 * shape.heads, dtype=dtype)

    @property
    def width(self) -> int:
        return 2 * self.shape.key_heads * self.shape.key_size + self.shape.heads * self.shape.value_size

    def compute(self, x: Tensor, slots: StepSlots) -> Tensor:
        return self._layer(x, self.gates(x), 0, slots)

    def gates(self, x: Tensor) -> Tensor:
        """In float32, as some products return theirs, or between the other inputs."""
        return x.float() if self.scans else x

    def exact(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape, wide, group = self.shape, x.double(), self.shape.heads // self.shape.key_heads
        keyed = shape.key_heads * shape.key_size
        q, k = (
            wide[:, at : at + keyed].reshape(len(x), shape.key_heads, -1).repeat_interleave(group, 1)
            for at in (shape.queries, shape.keys)
        )
        v = wide[:, shape.values : shape.values + shape.heads * shape.value_size].reshape(len(x), shape.heads, -1)
        gate, beta = wide[:, self.width :].split(shape.heads, 1)
        dt = F.softplus(gate + self.bias.double())
        state = torch.zeros(shape.heads, shape.key_size, shape.value_size, dtype=torch.float64)
        out = []
        if self.scans:
            dt = dt.clamp(0.01, 2.0)
        else:
            q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
            q = q * shape.key_size**-0.5
        for t in range(len(x)):
            state = state * (self.rates.double() * dt[t]).exp().view(-1, 1, 1)
            if self.scans:
                change = dt[t, :, None] * v[t]
            else:
                change = beta[t, :, None].sigmoid() * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t, :, :, None] * change[:, None]
            out.append(
                torch.einsum("hk,hkv->hv", q[t], state) + (self.skip.double()[:, None] * v[t] if self.scans else 0)
            )
        return torch.stack(out).flatten(1), state


class ChannelScanned:
    """A scan of channels, token by token in float64 beside it."""

    def __init__(self, channels: int, size: int, dtype: torch.dtype) -> None:
        self.channels = channels
        self.rates, self.bias, self.skip = -random(size, channels).exp(), random(channels), random(channels, seed=1)
        self._layer = ChannelScan(ScanSteps(self.rates, self.bias, self.skip), dtype)
        self.state = torch.full((SLOTS, 1, size, channels), float("nan"))
        self.inputs = random(150, 2 * channels + 2 * size, dtype=dtype)

    def compute(self, x: Tensor, slots: StepSlots) -> Tensor:
        values, steps = x[:, : self.channels].contiguous(), (10 * x[:, self.channels : 2 * self.channels]).contiguous()
        return self._layer(values, x[:, 2 * self.channels :], steps, 0, slots)

    def exact(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.double()
        values, pairs = wide[:, : self.channels], wide[:, 2 * self.channels :]
        steps = (10 * x[:, self.channels : 2 * self.channels]).double()
        dt = F.softplus(steps + self.bias.double())
        state = torch.zeros(self.rates.shape, dtype=torch.float64)
        out = []
        for t in range(len(x)):
            b, c = pairs[t].unsqueeze(-1).chunk(2)
            state = state * (self.rates.double() * dt[t]).exp() + b * dt[t] * values[t]
            out.append((c * state).sum(0) + self.skip.double() * values[t])
        return torch.stack(out), state[None]


LAYERS: dict[str, Callable[[torch.dtype], Layer]] = {
    **{f"convolution of {kernel}": lambda dtype, kernel=kernel: Convolved(kernel, dtype, False) for kernel in KERNELS},
    "gated convolution": lambda dtype: Convolved(3, dtype, True),
    **{f"delta rule, {name}": lambda dtype, of=of: Recurrent(of, dtype, False) for name, of in SHAPES.items()},
    **{f"scan, {name}": lambda dtype, of=of: Recurrent(of, dtype, True) for name, of in SHAPES.items()},
    "channel scan": lambda dtype: ChannelScanned(128, 16, dtype),
    "channel scan, odd": lambda dtype: ChannelScanned(203, 5, dtype),
}

every_layer = pytest.mark.parametrize("layer", LAYERS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def close(found: Tensor, right: Tensor, dtype: torch.dtype) -> bool:
    bound = {torch.float32: 3e-5, torch.bfloat16: 6e-3}[dtype] * right.abs().max().clamp(min=1.0)
    return bool((found.double() - right).abs().max() <= bound)


@every_layer
@every_dtype
def test_results_and_states_are_right(level: str, layer: str, dtype: torch.dtype) -> None:
    built = LAYERS[layer](dtype)
    x = built.inputs[:70]
    [found] = step(built, [Part(2, 0, 70, -1)], [x])
    right, state = built.exact(x)
    assert close(found, right, dtype)
    assert close(built.state[2], state, torch.float32 if built.state.dtype == torch.float32 else dtype)


@every_layer
@every_dtype
def test_the_same_bits_wherever_a_sequence_is_cut(level: str, layer: str, dtype: torch.dtype) -> None:
    """At 1, 2, 63, 64, 65, with company that changes."""
    built = LAYERS[layer](dtype)
    x, other = built.inputs[:80], built.inputs.flip(0)
    [whole] = step(built, [Part(2, 0, 80, -1)], [x])
    state = built.state[2].clone()
    built.state.fill_(float("nan"))
    cuts, found = (0, 1, 2, 63, 64, 65, 80), []
    for start, end in itertools.pairwise(cuts):
        parts = [Part(3, 0, 1 + end // 2, -1), Part(2, start, end, 2 if start else -1), Part(0, 0, 3, -1)]
        found.append(step(built, parts, [other, x, other])[1])
    assert torch.equal(torch.cat(found), whole)
    assert torch.equal(built.state[2], state)


@every_layer
@every_dtype
def test_a_saved_state_is_taken_up_by_others(level: str, layer: str, dtype: torch.dtype) -> None:
    """Saved in the middle of a chunk, at its end, and at two tokens in a row; two rows begin with the same snapshot."""
    built = LAYERS[layer](dtype)
    x = built.inputs[:80]
    [whole] = step(built, [Part(1, 0, 80, -1, {1: 5, 2: 6, 40: 7, 64: 8, 80: 9})], [x])
    assert torch.equal(built.state[9], built.state[1])
    for at, slot in ((1, 5), (2, 6), (40, 7), (64, 8)):
        built.state[:3] = float("nan")
        kept = built.state[slot].clone()
        first, second = step(built, [Part(0, at, 80, slot), Part(2, at, at + 7, slot)], [x, x])
        assert torch.equal(first, whole[at:])
        assert torch.equal(second, whole[at : at + 7])
        assert torch.equal(built.state[0], built.state[9])
        assert torch.equal(built.state[slot], kept)


@every_layer
def test_the_same_bits_on_any_number_of_threads(layer: str, by_threads: ByThreads) -> None:
    built = LAYERS[layer](torch.bfloat16)
    x = built.inputs

    def compute() -> Tensor:
        parts = [Part(0, 0, 90, -1), Part(1, 0, 1, -1), Part(3, 0, 150, -1, {70: 8})]
        results = torch.cat(step(built, parts, [x, x, x])).float()
        return torch.cat((results.flatten(), built.state[[0, 1, 3, 8]].float().flatten()))

    first, *others = by_threads(compute)
    assert all(torch.equal(first, other) for other in others)


def test_saves_are_sorted() -> None:
    states = StepStates([0, -1, 2], [(2, 5, 9), (0, 3, 7), (2, 1, 8)])
    assert states.saves.tolist() == [[0, 3, 7], [2, 1, 8], [2, 5, 9]]
    assert StepStates([0]).saves.shape == (0, 3)


@pytest.mark.parametrize("size", [1, 17, 64, 128])
@every_dtype
def test_gated_norms(level: str, size: int, dtype: torch.dtype) -> None:
    """A norm and then a gate, or the other way round, or a gate alone."""
    x, gates, weight = random(6, 3 * size, dtype=dtype), random(6, 5 * size + 3, dtype=dtype), random(3, size)
    wide, gate = (each.double().view(6, 3, size) for each in (x, gates[:, 3 : 3 + 3 * size].contiguous()))

    def normalised(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    norm_first = HeadGate(3, size, 3, dtype, HeadNorm(weight, 1e-5))
    gate_first = HeadGate(3, size, 3, dtype, HeadNorm(weight, 1e-5, gates_first=True))
    shared = HeadGate(3, size, 3, dtype, HeadNorm(weight[1], 1e-5, sigmoid=True))
    assert close(norm_first(x, gates), (normalised(wide) * F.silu(gate)).flatten(1), dtype)
    assert close(gate_first(x, gates), normalised(wide * F.silu(gate)).flatten(1), dtype)
    right = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight[1].double() * gate.sigmoid()
    assert close(shared(x, gates), right.flatten(1), dtype)
    assert close(HeadGate(3, size, 3, dtype)(x, gates), (wide * gate.sigmoid()).flatten(1), dtype)


def test_no_rows(level: str) -> None:
    built = LAYERS["delta rule, odd"](torch.float32)
    batch = StepBatch([], [], [], torch.zeros(1, 1, dtype=torch.int32), NO_BLOCKS, 16)
    slots = StepSlots(batch, StepStates([]), LayerStates([None], [built.state]))
    assert built.compute(built.inputs[:0], slots).shape == (0, 222)


@every_dtype
def test_a_program_computes_what_its_layers_do(level: str, dtype: torch.dtype) -> None:
    """A convolution, a delta rule and gated heads, recorded: a prompt in two steps and a token, beside another row."""
    shape, (channels, values) = SHAPES["wide"], (1024, 512)
    convolution = CausalConvolution(random(channels, 4), None, True, ConvolutionColumns(values), dtype)
    rule = gated_delta_rule(shape, values + channels, values + channels + 4, -random(4).exp(), random(4), dtype)
    gate = HeadGate(4, 128, 0, dtype, HeadNorm(random(128), 1e-6))

    def compute(x: TensorOrSymbol, slots: StepSlots | None) -> TensorOrSymbol:
        return gate(rule(convolution(x, 1, slots), x, 0, slots), x)

    def states() -> LayerStates:
        windows, matrices = torch.full((SLOTS, 3, channels), nan, dtype=dtype), torch.full((SLOTS, 4, 128, 128), nan)
        return LayerStates([None, windows], [matrices, None])

    nan = float("nan")
    trace = OpTrace(dtype)
    source = trace.add_op(OpStruct(kind=INPUT, size=values + channels + 8), None, values + channels + 8)
    result = compute(source, None)
    io = TraceIO(source, result, len(trace.ops), embeds_tokens=False, kept=(result,))
    program, recorded, called = DecoderProgram(trace, io, [], ThreadPool()), states(), states()
    x = random(100, values + channels + 8, dtype=dtype)
    for start, end, source_of in ((0, 40, -1), (40, 99, 3), (99, 100, 3)):
        batch = StepBatch([3, 1], [start, 0], [end - start, 5], torch.zeros(4, 100, dtype=torch.int32), NO_BLOCKS, 16)
        inputs = torch.cat((x[start:end], x[:5]))
        moves = StepStates([source_of, -1], [(1, 2, 9)])
        slots = StepSlots(batch, moves, recorded)
        run = program.begin(ProgramInputs(batch, LayerCaches([], [], [], []), inputs, states=slots))
        run.finish()
        assert torch.equal(run.kept[0], compute(inputs, StepSlots(batch, moves, called)))
    program.threads.close()
