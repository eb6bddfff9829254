"""Where slots lie: any program, and no two that are needed at the same time on the same bytes."""

from itertools import combinations

import torch
from hypothesis import given
from hypothesis import strategies as st

from charonia.engine.kernels.program import Ends, Program
from charonia.engine.kernels.tape import NORM, Operation, Slot, Tape


@given(st.data())
def test_slots_that_are_needed_together_lie_apart(data: st.DataObject) -> None:
    tape = Tape(torch.float32)
    stream, zeros = Slot(tape, 24), Slot(tape, 24)
    slots = [stream, zeros]
    for _ in range(data.draw(st.integers(1, 12))):
        x, delta = (data.draw(st.sampled_from(slots)) for _ in range(2))
        width = data.draw(st.integers(1, 80))
        slots.append(tape.add(Operation(kind=NORM), x, width, data.draw(st.sampled_from([None, delta]))))
    rest = data.draw(st.sampled_from(slots))
    program = Program(tape, Ends(stream, zeros, rest))
    spans = _spans(tape, Ends(stream, zeros, rest))
    for a, b in combinations(spans, 2):
        together = max(spans[a].start, spans[b].start) < min(spans[a].stop, spans[b].stop)
        places = [(program.places[each], program.places[each] + 4 * each.width) for each in (a, b)]
        (from_a, to_a), (from_b, to_b) = places
        assert not together or to_a <= from_b or to_b <= from_a
        assert from_a % 64 == from_b % 64 == 0


def _spans(tape: Tape, ends: Ends) -> dict[Slot, range]:
    """From the operation that makes a slot to past the last that needs it, found the slow way."""
    spans = {}
    for slot in {*ends, *(slot for use in tape.uses for slot in use.slots)}:
        met = [number for number, use in enumerate(tape.uses) if any(slot is each for each in use.slots)]
        begun = -1 if slot in ends[:2] else min(met)
        over = len(tape.uses) + 1 if slot in (ends.stream, ends.rest) else max(met, default=-1) + 1
        spans[slot] = range(begun, over)
    return spans
