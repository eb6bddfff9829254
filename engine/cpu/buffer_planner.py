"""Where the slots of a tape lie in memory: those that are needed at the same time do not overlap."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .memory import LINE
from .op_trace import Slot, Tape


class Marks(NamedTuple):
    """Where a tape can be entered and left. `stream`: the residual stream, changed in place; `rest`: what is still to
    be added to it after the first so many operations, `layers`. `embeds`: whether it begins with token ids; else with
    hidden states. `logits`: those of chosen places, if it goes on so far."""

    stream: Slot
    rest: Slot
    layers: int
    embeds: bool
    logits: Slot | None = None


def places(tape: Tape, marks: Marks) -> dict[Slot, int]:
    """Where each slot begins, in bytes for each token; those of chosen places by themselves, in bytes for each."""
    spans = _spans(tape, marks)
    found: dict[Slot, int] = {}
    for slot, span in sorted(spans.items(), key=lambda each: each[1].start):
        taken = sorted(
            (at, at + _bytes(other))
            for other, at in found.items()
            if spans[other].stop > span.start and other.chosen == slot.chosen
        )
        found[slot] = _gap(taken, _bytes(slot))
    return found


def end(found: Mapping[Slot, int], chosen: bool) -> int:
    """Bytes that the slots take for each token, or each of the `chosen` places."""
    return max((at + _bytes(slot) for slot, at in found.items() if slot.chosen == chosen), default=0)


def _bytes(slot: Slot) -> int:
    """Of one token, filled up so that every slot begins with a line for any number of tokens."""
    return -(-slot.width * slot.dtype.itemsize // LINE) * LINE


def _gap(taken: list[tuple[int, int]], size: int) -> int:
    """The first place where `size` fits between the ranges `taken`, sorted."""
    at = 0
    for begin, stop in taken:
        if begin - at >= size:
            return at
        at = max(at, stop)
    return at


def _spans(tape: Tape, marks: Marks) -> dict[Slot, range]:
    """From which operation to which each slot is needed; what is read from outside is kept to the last."""
    spans: dict[Slot, range] = {}
    for number, slot in _uses(tape):
        begun = spans[slot].start if slot in spans else number
        spans[slot] = range(begun, number + 1)
    for read in (marks.stream, marks.rest, marks.logits):
        if read is not None:
            spans[read] = range(spans[read].start, len(tape.uses) + 1)
    return spans


def _uses(tape: Tape) -> Iterator[tuple[int, Slot]]:
    return ((number, slot) for number, use in enumerate(tape.uses) for slot in use.slots)
