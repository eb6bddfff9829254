"""Records what a decoder does to a step's tensors, so that `program.py` can do it again by one call into C.

It is recorded by calling its parts with `SymbolicTensor`s, which stand for tensors and which our kernels alone take:
whatever else meets one fails, and then there is nothing to run again. Nothing is computed here.
"""

import ctypes
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

NORM, GATE, PRODUCT, ATTENTION, EMBED, ENTER, CHOOSE, PICK = range(8)
"""Kinds of operations, as in tape.h."""


class OpStruct(ctypes.Structure):
    """`OpStruct` of tape.h; its slots are filled in when they have places."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "x", "delta", "out")),
        ("what", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("heads", "stride", "weights", "size", "layer", "angles")),
        ("next", ctypes.c_void_p),
        ("number", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("dtype", "activation", "chosen")),
    ]


class SymbolicTensor:
    """Stands for a tensor [tokens, width], or for heads [tokens, heads, head_dim] side by side; or for one of the
    `chosen` places alone."""

    def __init__(self, tape: "OpTrace", width: int, dtype: torch.dtype, chosen: bool = False) -> None:
        self.trace, self.width, self.dtype, self.selected = tape, width, dtype, chosen

    def __len__(self) -> int:
        """As if of one token; what is recorded runs for any number of them."""
        return 1

    def __getitem__(self, places: "SymbolicIndices") -> "SymbolicTensor":
        """What stands at the places that are chosen."""
        if not isinstance(places, SymbolicIndices):
            raise TypeError("a slot has no elements")
        out = SymbolicTensor(self.trace, self.width, self.dtype, chosen=True)
        self.trace.ops.append(TracedOp(OpStruct(kind=CHOOSE, size=self.width), self, None, out))
        return out

    def view(self, *_: int) -> "SymbolicTensor":
        """However it is looked at, it lies the same."""
        return self


TensorOrSymbol = TypeVar("TensorOrSymbol", Tensor, SymbolicTensor)
"""What our kernels compute from, and as what it comes out."""


class SymbolicTokenIds(NamedTuple):
    """Stands for the token ids of a step."""

    trace: "OpTrace"


class SymbolicIndices(NamedTuple):
    """Stands for the packed places that are chosen."""

    def __len__(self) -> int:
        """Never as many as there are tokens."""
        return 0


class TracedOp(NamedTuple):
    """An operation, and the slots that it reads and changes."""

    operation: OpStruct
    x: SymbolicTensor | None
    delta: SymbolicTensor | None
    out: SymbolicTensor

    @property
    def tensors(self) -> list[SymbolicTensor]:
        return [slot for slot in (self.x, self.delta, self.out) if slot is not None]


class OpTrace:
    """What was done to slots, in order. Those that it begins with hold `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.ops: list[TracedOp] = []
        self.no_delta = SymbolicTensor(self, 0, dtype)
        """Stands for what nothing is added by; only a delta may be it."""

    def add_source(self, operation: OpStruct, width: int) -> SymbolicTensor:
        """What `operation` makes of the step itself."""
        out = SymbolicTensor(self, width, self.dtype)
        self.ops.append(TracedOp(operation, None, None, out))
        return out

    def add_op(
        self,
        operation: OpStruct,
        x: SymbolicTensor,
        width: int,
        *,
        delta: SymbolicTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> SymbolicTensor:
        """`operation` from `x`, and what it does to `delta`, into a new slot; of x's dtype if of no other."""
        out = SymbolicTensor(self, width, dtype or x.dtype, x.selected)
        self.ops.append(TracedOp(operation, self._checked(x), None if delta is self.no_delta else delta, out))
        return out

    def add_in_place(self, operation: OpStruct, x: SymbolicTensor) -> None:
        """`operation` on `x` in place."""
        self.ops.append(TracedOp(operation, self._checked(x), None, x))

    def _checked(self, x: SymbolicTensor) -> SymbolicTensor:
        if x is self.no_delta:
            raise TypeError("nothing can be computed from nothing")
        return x
