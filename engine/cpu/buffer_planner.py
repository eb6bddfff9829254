"""Where the slots of a tape lie in memory: those that are needed at the same time do not overlap."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .memory import CACHE_LINE_BYTES
from .op_trace import OpTrace, SymbolicTensor


class TraceIO(NamedTuple):
    """Where a tape can be entered and left. `stream`: the residual stream, changed in place; `rest`: what is still to
    be added to it after the first so many operations, `layers`. `embeds`: whether it begins with token ids; else with
    hidden states. `logits`: those of chosen places, if it goes on so far."""

    residual: SymbolicTensor
    delta: SymbolicTensor
    layer_ops: int
    embeds_tokens: bool
    logits: SymbolicTensor | None = None


def plan_buffers(tape: OpTrace, marks: TraceIO) -> dict[SymbolicTensor, int]:
    """Where each slot begins, in bytes for each token; those of chosen places by themselves, in bytes for each."""
    spans = _lifetimes(tape, marks)
    found: dict[SymbolicTensor, int] = {}
    for slot, span in sorted(spans.items(), key=lambda each: each[1].start):
        taken = sorted(
            (at, at + _tensor_bytes(other))
            for other, at in found.items()
            if spans[other].stop > span.start and other.selected == slot.selected
        )
        found[slot] = _first_fit(taken, _tensor_bytes(slot))
    return found


def buffer_bytes(found: Mapping[SymbolicTensor, int], chosen: bool) -> int:
    """Bytes that the slots take for each token, or each of the `chosen` places."""
    return max((at + _tensor_bytes(slot) for slot, at in found.items() if slot.selected == chosen), default=0)


def _tensor_bytes(slot: SymbolicTensor) -> int:
    """Of one token, filled up so that every slot begins with a line for any number of tokens."""
    return -(-slot.width * slot.dtype.itemsize // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


def _first_fit(taken: list[tuple[int, int]], size: int) -> int:
    """The first place where `size` fits between the ranges `taken`, sorted."""
    at = 0
    for begin, stop in taken:
        if begin - at >= size:
            return at
        at = max(at, stop)
    return at


def _lifetimes(tape: OpTrace, marks: TraceIO) -> dict[SymbolicTensor, range]:
    """From which operation to which each slot is needed; what is read from outside is kept to the last."""
    spans: dict[SymbolicTensor, range] = {}
    for number, slot in _uses(tape):
        begun = spans[slot].start if slot in spans else number
        spans[slot] = range(begun, number + 1)
    for read in (marks.residual, marks.delta, marks.logits):
        if read is not None:
            spans[read] = range(spans[read].start, len(tape.ops) + 1)
    return spans


def _uses(tape: OpTrace) -> Iterator[tuple[int, SymbolicTensor]]:
    return ((number, slot) for number, use in enumerate(tape.ops) for slot in use.tensors)
