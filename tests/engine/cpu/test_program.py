"""Where slots lie: any program, and no two that are needed at the same time on the same bytes."""

from itertools import combinations

import torch
from hypothesis import given
from hypothesis import strategies as st

from charonia.engine.cpu.op_trace import INPUT, NORM, OpStruct, OpTrace, SymbolicTensor, TraceIO, plan_buffers

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@given(st.data())
def test_slots_that_are_needed_together_lie_apart(data: st.DataObject) -> None:
    tape = OpTrace(torch.float32)
    slots = [tape.add_op(OpStruct(kind=INPUT), None, 24)]
    for _ in range(data.draw(st.integers(1, 12))):
        x, delta = (data.draw(st.sampled_from(slots)) for _ in range(2))
        if not x.selected and data.draw(st.booleans()):
            slots.append(x.select())
        else:
            added = None if delta.selected != x.selected else delta
            width, dtype = data.draw(st.integers(1, 80)), data.draw(DTYPES)
            slots.append(tape.add_op(OpStruct(kind=NORM), x, width, delta=added, dtype=dtype))
    rest, logits = data.draw(st.sampled_from(slots)), data.draw(st.sampled_from([None, slots[-1]]))
    marks = TraceIO(slots[0], rest, len(tape.ops), True, logits)
    found, spans = plan_buffers(tape, marks), _spans(tape, marks)
    for a, b in combinations(spans, 2):
        together = max(spans[a].start, spans[b].start) < min(spans[a].stop, spans[b].stop)
        (from_a, to_a), (from_b, to_b) = ((found[one], found[one] + one.dtype.itemsize * one.width) for one in (a, b))
        assert not together or a.selected != b.selected or to_a <= from_b or to_b <= from_a
        assert from_a % 64 == from_b % 64 == 0


def _spans(tape: OpTrace, marks: TraceIO) -> dict[SymbolicTensor, range]:
    """From the operation that makes a slot to past the last that needs it, found the slow way."""
    spans = {}
    for slot in {slot for use in tape.ops for slot in use.tensors}:
        met = [number for number, use in enumerate(tape.ops) if any(slot is tensor for tensor in use.tensors)]
        read = any(slot is each for each in (marks.residual, marks.delta, marks.logits))
        spans[slot] = range(min(met), len(tape.ops) + 1 if read else max(met) + 1)
    return spans
