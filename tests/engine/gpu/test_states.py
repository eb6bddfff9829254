"""Convolutions and recurrences over states, on the interpreter: beside torch's, and to the bit however sequences are
cut and whatever shares their steps."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from charonia.engine.cpu.recurrent import ConvolutionColumns, LayerStates, RecurrenceShape, ScanSteps
from charonia.engine.gpu.state_rows import FEW_TOKENS, StateMoves, place_states
from charonia.engine.layers.recurrence import DeltaRuleGates, TorchRecurrence, TorchScanSteps
from charonia.engine.layers.recurrent_state import LayerSlots, StepSlotStates
from charonia.engine.layers.state_convolution import TorchConvolution
from charonia.engine.step_batch import DeviceBatch, StepBatch
from charonia.engine.step_states import StepStates

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16)
ROWS, SNAPSHOTS = 5, 6
CHANNELS, HEADS, KEYS, VALUES = 70, 2, 12, 20
DELTA = RecurrenceShape(HEADS, 2, KEYS, VALUES, 3, 3 + 2 * KEYS, 3 + 4 * KEYS)
SCAN = RecurrenceShape(HEADS, 1, KEYS, VALUES, 5 + KEYS, 5, 5 + 2 * KEYS)
Computation = Callable[[Tensor, LayerSlots, StepSlotStates], Tensor]


class Step(NamedTuple):
    """A step: of each row its number, tokens before it, and tokens; `sources` and `saves` of `StepStates`."""

    rows: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]
    sources: Sequence[int]
    saves: Sequence[tuple[int, int, int]] = ()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def slots(dtype: torch.dtype) -> LayerSlots:
    """Of all rows and snapshots, with anything in them."""
    windows = random(ROWS + SNAPSHOTS, 3, CHANNELS).to(dtype)
    return LayerSlots(windows, random(ROWS + SNAPSHOTS, HEADS, KEYS, VALUES))


def compute(layer: Computation, kept: LayerSlots, step: Step, x: Tensor) -> Tensor:
    tables = torch.zeros(ROWS, 1, dtype=torch.int32), torch.zeros(ROWS, 1, dtype=torch.int64)
    batch = StepBatch(step.rows, step.starts, step.counts, *tables, 16)
    return layer(x, kept, StepSlotStates([kept], batch, StepStates(step.sources, step.saves), LayerStates([], [])))


def convolutions(kernels: dict[str, ModuleType], form: str) -> tuple[Computation, Computation]:
    """Torch's, and that of the kernel. "short": LFM2's, "biased": Mamba-2's."""
    taps = 3 if form == "short" else 4
    columns = ConvolutionColumns(2 * CHANNELS, 0, CHANNELS) if form == "short" else ConvolutionColumns(5)
    bias = random(CHANNELS) if form == "biased" else None
    own = random(CHANNELS, taps), bias, form != "short", columns
    reference, kernel = TorchConvolution(*own), kernels["convolution"].TritonConvolution(*own)

    def by_torch(x: Tensor, kept: LayerSlots, states: StepSlotStates) -> Tensor:
        return reference(x, kept.windows[:, : taps - 1], states)

    def by_kernel(x: Tensor, kept: LayerSlots, states: StepSlotStates) -> Tensor:
        own = kept.windows[:, : taps - 1].contiguous()
        out: Tensor = kernel(x, own, states.on_device)
        kept.windows[:, : taps - 1] = own
        return out

    return by_torch, by_kernel


def recurrences(kernels: dict[str, ModuleType], form: str) -> tuple[Computation, Computation]:
    """In the same way; gates lie in x, too. "skipping": with Mamba-2's D, and bounds of its steps."""
    module: Any = kernels["recurrence"]
    rates, bias = -random(HEADS).abs(), random(HEADS)
    if form == "delta":
        reference = TorchRecurrence(DELTA, DeltaRuleGates(rates, bias, 1, 6))
        kernel = module.TritonRecurrence(DELTA, 1, 6, ScanSteps(rates, bias, None))
    else:
        steps = ScanSteps(rates, bias, random(HEADS), 0.01, 0.9) if form == "skipping" else ScanSteps(rates, bias, None)
        reference = TorchRecurrence(SCAN, TorchScanSteps(steps, 2))
        kernel = module.TritonRecurrence(SCAN, 2, None, steps)

    def by_torch(x: Tensor, kept: LayerSlots, states: StepSlotStates) -> Tensor:
        return reference(x, x[:, 100:], kept.matrices, states)

    def by_kernel(x: Tensor, kept: LayerSlots, states: StepSlotStates) -> Tensor:
        out: Tensor = kernel(x, x[:, 100:], kept.matrices, states.on_device)
        return out

    return by_torch, by_kernel


FORMS = dict.fromkeys(("plain", "biased", "short"), convolutions)
FORMS |= dict.fromkeys(("delta", "scan", "skipping"), recurrences)
# A fresh row, one that goes on, one from a snapshot with drafts that are kept, one whose prompt is kept twice at once.
MIXED = Step([3, 0, 4, 1], [0, 9, 7, 2], [1, 1, 3, 40], [-1, 0, 6, 1], [(2, 1, 7), (2, 2, 8), (3, 7, 9), (3, 7, 10)])
SHORTER = MIXED._replace(counts=[1, 1, 3, 9])
FEW = MIXED._replace(counts=[1, 1, 5, 2], saves=MIXED.saves[:2])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_results_and_states_are_those_of_torch(
    kernels: dict[str, ModuleType], form: str, chunked: bool, dtype: torch.dtype
) -> None:
    step = FEW if not chunked else MIXED if FORMS[form] is convolutions else SHORTER
    by_torch, by_kernel = FORMS[form](kernels, form)
    x = random(sum(step.counts), 3 * CHANNELS).to(dtype)
    right, found = slots(dtype), slots(dtype)
    expected, out = compute(by_torch, right, step, x), compute(by_kernel, found, step, x)
    bound = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 2e-3}
    torch.testing.assert_close(out, expected, **bound)
    torch.testing.assert_close(found.windows, right.windows, **bound)
    torch.testing.assert_close(found.matrices, right.matrices, atol=1e-4, rtol=1e-4)


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(FORMS)), st.lists(st.integers(1, 40), max_size=3), st.integers(0, 2), st.data())
def test_no_bit_depends_on_cuts_and_company(
    kernels: dict[str, ModuleType], form: str, cuts: list[int], company: int, data: st.DataObject
) -> None:
    """Nor on whether the sequence goes on from a snapshot that it left before."""
    _, layer = FORMS[form](kernels, form)
    length, dtype = 44 if FORMS[form] is convolutions else 12, torch.float16
    x = random(length, 3 * CHANNELS).to(dtype)
    whole = slots(dtype)
    right = compute(layer, whole, Step([2], [0], [length], [-1]), x)
    kept, found, at, source = slots(dtype), [], 0, -1
    for end in [*sorted({cut for cut in cuts if cut < length}), length]:
        count, left = end - at, data.draw(st.booleans())
        others = [data.draw(st.integers(1, 3)) for _ in range(company)]
        place = data.draw(st.integers(0, company))
        numbers = [0, 1][:company]
        rows, counts, sources = [*numbers], [*others], [-1] * company
        for column, own in ((rows, 2), (counts, count), (sources, source)):
            column.insert(place, own)
        saves = [(place, count, ROWS)] if left else []
        first = sum(counts[:place])
        packed = random(sum(counts), 3 * CHANNELS, seed=at).to(dtype)
        packed[first : first + count] = x[at:end]
        step = Step(rows, [max(known, 0) for known in sources], counts, sources, saves)
        found.append(compute(layer, kept, step, packed)[first : first + count])
        at, source = end, ROWS if left else 2
    assert torch.equal(torch.cat(found), right)
    for mine, theirs in zip(kept, whole, strict=True):
        assert torch.equal(mine[2], theirs[2])


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_padded_rows_and_places_touch_nothing(kernels: dict[str, ModuleType], form: str, prompts: bool) -> None:
    """As a recorded step has them, which may have parts of prompts: of four rows and eight places two and six count."""
    _, layer = FORMS[form](kernels, form)
    step = Step([3, 1], [4, 2], [1, 5], [3, 7], [(1, 2, 8)])
    x = random(8, 3 * CHANNELS)
    right, kept = slots(torch.float32), slots(torch.float32)
    expected = compute(layer, right, step, x[:6])
    numbers = torch.zeros(4, 4, dtype=torch.int32)
    numbers[:, :2] = torch.tensor([step.rows, step.starts, step.counts, [0, 1]])
    numbers[3, 2:] = 6
    tables = torch.zeros(ROWS, 1, dtype=torch.int64)
    there = DeviceBatch(*numbers, tables, 8, prompts=prompts)
    bounds = np.zeros(4), np.full(4, 50), np.full(4, 1 if prompts else FEW_TOKENS)
    batch = StepBatch(*bounds, torch.zeros(ROWS, 1, dtype=torch.int32), tables, 16, there)
    moves = StateMoves(*torch.from_numpy(StepStates(step.sources, step.saves).pack(4)))
    recorded = StepSlotStates([kept], batch, StepStates([]), LayerStates([], []))
    recorded.__dict__["on_device"] = place_states(batch, StepStates([]), moves)
    out = layer(x, kept, recorded)
    assert torch.equal(out[:6], expected)
    for mine, theirs in zip(kept, right, strict=True):
        assert torch.equal(mine, theirs)
