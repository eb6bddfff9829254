"""Plans the memory of a trace: tensors that are needed at the same time do not overlap."""

from collections.abc import Mapping
from typing import NamedTuple

from .memory import CACHE_LINE_BYTES
from .op_trace import OpTrace, SymbolicTensor


class TraceIO(NamedTuple):
    """The tensors of a trace that are read from outside. `residual` is the residual stream, and `delta` what is still
    to be added to it after the first `layer_ops` operations. The source is token ids if it `embeds_tokens`, else hidden
    states. `logits` are those of selected places; None if the trace ends before them."""

    residual: SymbolicTensor
    delta: SymbolicTensor
    layer_ops: int
    embeds_tokens: bool
    logits: SymbolicTensor | None = None


def plan_buffers(trace: OpTrace, io: TraceIO) -> dict[SymbolicTensor, int]:
    """The offset of each tensor in bytes for each token; tensors of selected places have a memory of their own, with
    offsets in bytes for each place."""
    lifetimes = _lifetimes(trace, io)
    offsets: dict[SymbolicTensor, int] = {}
    for tensor, lifetime in sorted(lifetimes.items(), key=lambda each: each[1].start):
        taken = sorted(
            (offset, offset + _line_bytes(other))
            for other, offset in offsets.items()
            if lifetimes[other].stop > lifetime.start and other.selected == tensor.selected
        )
        offset = 0
        for begin, end in taken:
            if begin - offset >= _line_bytes(tensor):
                break
            offset = max(offset, end)
        offsets[tensor] = offset
    return offsets


def buffer_bytes(offsets: Mapping[SymbolicTensor, int], selected: bool) -> int:
    """Bytes that the tensors take for each token, or those of `selected` places for each place."""
    ends = (offset + _line_bytes(each) for each, offset in offsets.items() if each.selected == selected)
    return max(ends, default=0)


def _line_bytes(tensor: SymbolicTensor) -> int:
    """Bytes of one token, rounded up so that every tensor begins at a cache line for any number of tokens."""
    return -(-tensor.width * tensor.dtype.itemsize // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


def _lifetimes(trace: OpTrace, io: TraceIO) -> dict[SymbolicTensor, range]:
    """The operations from the first to the last that uses each tensor; one that is read from outside lives to the
    end."""
    lifetimes: dict[SymbolicTensor, range] = {}
    for number, op in enumerate(trace.ops):
        for tensor in op.tensors:
            lifetimes[tensor] = range(lifetimes[tensor].start if tensor in lifetimes else number, number + 1)
    for read in (io.residual, io.delta, io.logits):
        if read is not None:
            lifetimes[read] = range(lifetimes[read].start, len(trace.ops) + 1)
    return lifetimes
