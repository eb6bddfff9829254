"""Records the operations of a decoder, which `program.py` then runs again by one call into C, and plans their memory.

The layers are called once with `SymbolicTensor`s: the faces of the C kernels in this folder take these too, and record
themselves. A part that does anything else with a tensor declares it (`Traceable`), and is never called with one.
"""

import ctypes
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .library import struct_fields
from .memory import CACHE_LINE_BYTES

NORM, GATE, PRODUCT, ATTENTION, EMBED, INPUT, SELECT, SAMPLE, LORA_SHRINK, LORA_EXPAND, KEEP, JOIN = range(12)
CONVOLVE, RECUR, GATE_HEADS, SCALE, ADD, SOFT_CAP, EXPERTS, GATE_ROWS, WIDEN, FILL, HEADS, STACK = range(12, 24)
POSITIONS, CROSS, SCAN = range(24, 27)
"""Kinds of operations, as in program.h."""


class Traceable(Protocol):
    """A part of a decoder that says whether its computation can be recorded."""

    @property
    def untraceable(self) -> str | None:
        """Why it can't, as a clause for the log; None: called with symbolic tensors, it records its operations."""


def untraceable_reason(parts: Iterable[Traceable | None]) -> str | None:
    """Why a whole of these parts, of which some may be absent, can't be recorded; None: it can."""
    return next((part.untraceable for part in parts if part is not None and part.untraceable), None)


class OpStruct(ctypes.Structure):
    """`Operation` of program.h. Offsets of its tensors are filled in when buffers are planned."""

    _fields_ = struct_fields(
        "l kind x delta out aside",
        "p what",
        "l heads stride weights size layer angles",
        "p next",
        "f number",
        "i dtype activation selected",
    )


class SymbolicTensor:
    """Stands for a tensor with a line of `width` numbers for each token of a step, or, if it is `selected`, for each
    packed place whose logits are wanted."""

    def __init__(self, trace: "OpTrace", width: int, dtype: torch.dtype, selected: bool = False) -> None:
        self.trace = trace
        self.width = width
        self.dtype = dtype
        self.selected = selected

    def view(self, *_: int) -> "SymbolicTensor":
        """The tensor itself: its numbers stay where they are."""
        return self

    def to(self, dtype: torch.dtype) -> "SymbolicTensor":
        """The tensor itself, or a wider one in float32."""
        if dtype == self.dtype:
            return self
        assert dtype == torch.float32, "numbers are widened alone"
        return self.trace.add_op(OpStruct(kind=WIDEN, size=self.width), self, self.width, dtype=dtype)

    def mul_(self, factor: float) -> "SymbolicTensor":
        self.trace.add_in_place(OpStruct(kind=SCALE, size=self.width, number=factor), self)
        return self

    def add_(self, delta: "SymbolicTensor") -> "SymbolicTensor":
        if delta is not self.trace.no_delta:
            self.trace.add_in_place(OpStruct(kind=ADD, size=self.width), self, delta)
        return self

    def clone(self) -> "SymbolicTensor":
        return self.trace.add_op(OpStruct(kind=KEEP, size=self.width), self, self.width)

    def copy_(self, other: "SymbolicTensor") -> "SymbolicTensor":
        self.trace.ops.append(TracedOp(OpStruct(kind=KEEP, size=self.width), other, None, self))
        return self

    def select(self) -> "SymbolicTensor":
        out = SymbolicTensor(self.trace, self.width, self.dtype, selected=True)
        self.trace.ops.append(TracedOp(OpStruct(kind=SELECT, size=self.width), self, None, out))
        return out


TensorOrSymbol = TypeVar("TensorOrSymbol", Tensor, SymbolicTensor)
"""An argument of a kernel's face; the result is of the same kind."""


class TracedOp(NamedTuple):
    """An operation with the tensors that it reads and changes."""

    operation: OpStruct
    x: SymbolicTensor | None
    delta: SymbolicTensor | None
    out: SymbolicTensor
    aside: SymbolicTensor | None = None

    @property
    def tensors(self) -> list[SymbolicTensor]:
        return [tensor for tensor in (self.x, self.delta, self.out, self.aside) if tensor is not None]


class OpTrace:
    """The operations of a decoder in order, with sources of `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.ops: list[TracedOp] = []
        self.no_delta = SymbolicTensor(self, 0, dtype)
        """The first layer's `delta`: nothing is to be added to the residual stream yet."""

    def add_op(
        self,
        operation: OpStruct,
        x: SymbolicTensor | None,
        width: int,
        *,
        delta: SymbolicTensor | None = None,
        aside: SymbolicTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> SymbolicTensor:
        """Record an operation that reads `x`, and `delta` and what is `aside` if it takes them, or without x the step
        itself; returns its result, of x's dtype unless `dtype` says otherwise."""
        out = SymbolicTensor(self, width, dtype or (x or self.no_delta).dtype, x is not None and x.selected)
        self.ops.append(TracedOp(operation, x, None if delta is self.no_delta else delta, out, aside))
        return out

    def keep_after(self, number: int, x: SymbolicTensor) -> SymbolicTensor:
        """A copy of `x` as it is after operation `number`, which is recorded."""
        out = SymbolicTensor(self, x.width, x.dtype)
        self.ops.insert(number + 1, TracedOp(OpStruct(kind=KEEP, size=x.width), x, None, out))
        return out

    def add_in_place(self, operation: OpStruct, x: SymbolicTensor, delta: SymbolicTensor | None = None) -> None:
        self.ops.append(TracedOp(operation, x, delta, x))


class TraceIO(NamedTuple):
    """The tensors of a trace that are read from outside."""

    residual: SymbolicTensor
    """The residual stream."""
    delta: SymbolicTensor
    """What is still to be added to it after the first `layer_ops` operations."""
    layer_ops: int
    embeds_tokens: bool
    """Whether the source is token ids, not hidden states."""
    logits: SymbolicTensor | None = None
    """The logits of selected places; None if the trace ends before them."""
    kept: tuple[SymbolicTensor, ...] = ()
    """Other tensors that are read from outside."""


def plan_buffers(trace: OpTrace, io: TraceIO) -> dict[SymbolicTensor, int]:
    """Memory in which tensors that are needed at the same time do not overlap: the offset of each tensor in bytes for
    each token; tensors of selected places have a memory of their own, with offsets in bytes for each place."""
    lifetimes: dict[SymbolicTensor, range] = {}  # operations from the first to the last that uses it
    for number, op in enumerate(trace.ops):
        for tensor in op.tensors:
            lifetimes[tensor] = range(lifetimes[tensor].start if tensor in lifetimes else number, number + 1)
    for read in (io.residual, io.delta, io.logits, *io.kept):
        if read is not None:  # from outside, at the end
            lifetimes[read] = range(lifetimes[read].start, len(trace.ops) + 1)
    offsets: dict[SymbolicTensor, int] = {}
    for tensor, lifetime in sorted(lifetimes.items(), key=lambda item: item[1].start):
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
    ends = (offset + _line_bytes(tensor) for tensor, offset in offsets.items() if tensor.selected == selected)
    return max(ends, default=0)


def _line_bytes(tensor: SymbolicTensor) -> int:
    """Bytes of one token, rounded up so that every tensor begins at a cache line for any number of tokens."""
    return -(-tensor.width * tensor.dtype.itemsize // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
