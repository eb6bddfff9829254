"""Records what layers do to a step's tensors, so that `program.py` can do it again by one call into C.

Layers are recorded by calling them with `Slot`s, which stand for tensors and which our kernels alone take: whatever
else meets one fails, and then there is nothing to run again. Nothing is computed here.
"""

import ctypes
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

NORM, GATE, PRODUCT, ATTENTION = range(4)
"""Kinds of operations, as in tape.c."""


class Operation(ctypes.Structure):
    """`Operation` of tape.c; its slots are filled in when they have places."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "x", "delta", "out")),
        ("what", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("heads", "stride", "weights", "size", "layer", "angles")),
        ("next", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("dtype", "activation")),
    ]


class Slot:
    """Stands for a tensor [tokens, width], or for heads [tokens, heads, head_dim] side by side."""

    def __init__(self, tape: "Tape", width: int) -> None:
        self.tape, self.width = tape, width

    def __len__(self) -> int:
        """As if of one token; what is recorded runs for any number of them."""
        return 1

    def view(self, *_: int) -> "Slot":
        """However it is looked at, it lies the same."""
        return self


Rows = TypeVar("Rows", Tensor, Slot)
"""What our kernels compute from, and as what it comes out."""


class Use(NamedTuple):
    """An operation, and the slots that it reads and changes."""

    operation: Operation
    x: Slot
    delta: Slot | None
    out: Slot

    @property
    def slots(self) -> list[Slot]:
        return [slot for slot in (self.x, self.delta, self.out) if slot is not None]


class Tape:
    """What was done to slots, in order. All hold `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.uses: list[Use] = []

    def add(self, operation: Operation, x: Slot, width: int, delta: Slot | None = None) -> Slot:
        """`operation` from `x`, and what it does to `delta`, into a new slot."""
        out = Slot(self, width)
        self.uses.append(Use(operation, x, delta, out))
        return out

    def change(self, operation: Operation, x: Slot) -> None:
        """`operation` on `x` in place."""
        self.uses.append(Use(operation, x, None, x))
