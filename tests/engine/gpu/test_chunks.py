"""Recurrences by chunks of prompts, on the interpreter: beside those by tokens, and to the same bits wherever a prompt
is cut at multiples of a chunk, whatever shares its steps."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from charonia.engine.cpu.recurrent import LayerStates, RecurrenceShape, ScanSteps
from charonia.engine.gpu.state_rows import StateMoves, place_states
from charonia.engine.layers.recurrent_state import LayerSlots, StepSlotStates
from charonia.engine.step_batch import DeviceBatch, StepBatch
from charonia.engine.step_states import StepStates

from .test_states import DELTA, HEADS, KEYS, ROWS, SCAN, VALUES, Step, compute, random, recurrences

LAUNCHED, CHUNK, SNAPSHOTS = 16, 32, 8
FORMS = "delta", "scan", "skipping"


@pytest.fixture(autouse=True)
def chunk(request: pytest.FixtureRequest, kernels: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> int:
    """Its tokens: two triangles of a tile, unless a test says otherwise."""
    assert kernels["chunked_recurrence"].CHUNK == LAUNCHED
    tokens: int = getattr(request, "param", CHUNK)
    for name in ("recurrence", "chunked_recurrence"):
        monkeypatch.setattr(kernels[name], "CHUNK", tokens)
    return tokens


class Layer:
    """A recurrence by a kernel, by chunks where prompts have some, or by tokens. `rate`: the decay of a step is
    exp(-rate dt)."""

    def __init__(self, kernels: dict[str, ModuleType], form: str, chunked: bool, rate: float = 1.0) -> None:
        module: Any = kernels["recurrence"]
        rates, bias = -rate * random(HEADS).abs(), random(HEADS)
        self.shape: RecurrenceShape = DELTA if form == "delta" else SCAN
        columns = (1, 6) if form == "delta" else (2, None)
        steps = ScanSteps(rates, bias, random(HEADS), 0.01, 0.9) if form == "skipping" else ScanSteps(rates, bias, None)
        self._kernel = module.TritonRecurrence(self.shape, *columns, steps, chunked)

    def __call__(self, x: Tensor, kept: LayerSlots, states: StepSlotStates) -> Tensor:
        out: Tensor = self._kernel(x, x[:, 100:], kept.matrices, states.on_device)
        return out


def slots() -> LayerSlots:
    return LayerSlots(torch.zeros(ROWS + SNAPSHOTS, 3, 1), random(ROWS + SNAPSHOTS, HEADS, KEYS, VALUES))


# Fresh and exactly two chunks; a decoding row; one that begins and ends within chunks, with states kept in every part
# of it; from a snapshot between chunks; too short for any.
SAVES = [(2, 2, 6), (2, 3, 7), (2, 20, 8), (2, 35, 9), (2, 40, 10), (2, 70, 11), (0, 64, 12)]
MIXED = Step([3, 0, 4, 1, 2], [0, 70, 29, 32, 2], [64, 1, 70, 33, 5], [-1, 0, 4, 5, 2], SAVES)


@pytest.mark.parametrize(
    ("form", "chunk"), [("delta", CHUNK), *((form, LAUNCHED) for form in FORMS)], indirect=["chunk"]
)
def test_chunks_come_to_what_tokens_do_in_torch(kernels: dict[str, ModuleType], form: str, chunk: int) -> None:
    """Of those that are launched two begin in a tile. Results to their own rounding, states to three parts in a hundred
    thousand of the largest number."""
    x = random(sum(MIXED.counts), 210).bfloat16()
    right, found = slots(), slots()
    expected = compute(recurrences(kernels, form)[0], right, MIXED, x)
    out = compute(Layer(kernels, form, True), found, MIXED, x)
    bound = 1e-2
    torch.testing.assert_close(out, expected, atol=bound * float(expected.abs().max()), rtol=bound)
    largest = float(right.matrices.abs().max())
    torch.testing.assert_close(found.matrices, right.matrices, atol=3e-5 * largest, rtol=1e-4)
    short = Step([0, 2], [70, 2], [1, 5], [0, 2])  # the rows without chunks
    alone = compute(Layer(kernels, form, False), slots(), short, torch.cat((x[64:65], x[168:])))
    assert torch.equal(torch.cat((out[64:65], out[168:])), alone)


def test_keys_that_repeat_are_solved(kernels: dict[str, ModuleType]) -> None:
    """One key for all tokens, which is learnt at once and hardly decays: the triangle is as far from the unit matrix as
    it can be."""
    x = (0.1 * random(2 * CHUNK, 210)).bfloat16()
    shape = DELTA
    for first in (shape.queries, shape.keys):
        x[:, first : first + HEADS * KEYS] = random(HEADS * KEYS).bfloat16()
    x[:, 106 : 106 + HEADS] = 9.0  # betas near 1
    step = Step([0], [0], [2 * CHUNK], [-1])
    right, found = slots(), slots()
    expected = compute(Layer(kernels, "delta", False, 1e-4), right, step, x)
    out = compute(Layer(kernels, "delta", True, 1e-4), found, step, x)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)  # a rounding of bfloat16
    torch.testing.assert_close(found.matrices[0], right.matrices[0], atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("sums_of_a_gpu")
@pytest.mark.parametrize("cuts", [(32,), (64, 96), pytest.param((32, 64, 96), marks=pytest.mark.proof)], ids=str)
@pytest.mark.parametrize("form", ["delta", pytest.param("skipping", marks=pytest.mark.proof)])
def test_no_bit_depends_on_cuts_between_chunks_and_company(
    kernels: dict[str, ModuleType], form: str, cuts: tuple[int, ...]
) -> None:
    """Nor does a state that is kept in the middle of a chunk, nor what goes on from one at a chunk's end."""
    layer, length = Layer(kernels, form, True), 110
    x = random(length, 210).bfloat16()
    whole, kept, found = slots(), slots(), []
    right = compute(layer, whole, Step([2], [0], [length], [-1], [(0, 75, 6)]), x)
    at, source = 0, -1
    for end in (*cuts, length):
        count, company = end - at, 3 if at else 40
        saves = [(1, 75 - at, 6)] if at < 75 <= end else []
        saves += [(1, count, 7)] if end == cuts[0] else []
        packed = torch.cat((random(company, 210, seed=at).bfloat16(), x[at:end]))
        step = Step([0, 2], [0, at], [company, count], [-1, source], saves)
        found.append(compute(layer, kept, step, packed)[company:])
        at, source = end, ROWS + 2 if end == cuts[0] else 2  # slot 7 is the third snapshot
    assert torch.equal(torch.cat(found), right)
    assert torch.equal(kept.matrices[2], whole.matrices[2])
    assert torch.equal(kept.matrices[6], whole.matrices[6])


def test_a_recorded_step_has_the_same_chunks(kernels: dict[str, ModuleType]) -> None:
    """Whose rows the device alone knows; padded ones touch nothing."""
    step = Step([3, 1], [4, 2], [70, 1], [3, 7], [(0, 40, 8)])
    x = random(90, 210).bfloat16()
    layer, right, kept = Layer(kernels, "delta", True), slots(), slots()
    expected = compute(layer, right, step, x[:71])
    numbers = torch.zeros(4, 4, dtype=torch.int32)
    numbers[:, :2] = torch.tensor([step.rows, step.starts, step.counts, [0, 70]])
    numbers[3, 2:] = 71
    tables = torch.zeros(ROWS, 1, dtype=torch.int64)
    there = DeviceBatch(*numbers, tables, 90, prompts=True)
    bounds = torch.zeros(4).numpy(), torch.full((4,), 50).numpy(), torch.ones(4, dtype=torch.int64).numpy()
    batch = StepBatch(*bounds, torch.zeros(ROWS, 1, dtype=torch.int32), tables, 16, there)
    moves = StateMoves(*torch.from_numpy(StepStates(step.sources, step.saves).pack(4)))
    recorded = StepSlotStates([kept], batch, StepStates([]), LayerStates([], []))
    recorded.__dict__["on_device"] = place_states(batch, StepStates([]), moves)
    out = layer(x, kept, recorded)
    assert torch.equal(out[:71], expected[:71])
    assert torch.equal(kept.matrices, right.matrices)
