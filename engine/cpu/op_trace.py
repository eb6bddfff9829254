"""Records what a decoder does to a step's tensors, so that `program.py` can do it again by one call into C.

It is recorded by calling its parts with `Slot`s, which stand for tensors and which our kernels alone take: whatever
else meets one fails, and then there is nothing to run again. Nothing is computed here.
"""

import ctypes
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

NORM, GATE, PRODUCT, ATTENTION, EMBED, ENTER, CHOOSE, PICK = range(8)
"""Kinds of operations, as in tape.h."""


class Operation(ctypes.Structure):
    """`Operation` of tape.h; its slots are filled in when they have places."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "x", "delta", "out")),
        ("what", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("heads", "stride", "weights", "size", "layer", "angles")),
        ("next", ctypes.c_void_p),
        ("number", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("dtype", "activation", "chosen")),
    ]


class Slot:
    """Stands for a tensor [tokens, width], or for heads [tokens, heads, head_dim] side by side; or for one of the
    `chosen` places alone."""

    def __init__(self, tape: "Tape", width: int, dtype: torch.dtype, chosen: bool = False) -> None:
        self.tape, self.width, self.dtype, self.chosen = tape, width, dtype, chosen

    def __len__(self) -> int:
        """As if of one token; what is recorded runs for any number of them."""
        return 1

    def __getitem__(self, places: "Places") -> "Slot":
        """What stands at the places that are chosen."""
        if not isinstance(places, Places):
            raise TypeError("a slot has no elements")
        out = Slot(self.tape, self.width, self.dtype, chosen=True)
        self.tape.uses.append(Use(Operation(kind=CHOOSE, size=self.width), self, None, out))
        return out

    def view(self, *_: int) -> "Slot":
        """However it is looked at, it lies the same."""
        return self


Rows = TypeVar("Rows", Tensor, Slot)
"""What our kernels compute from, and as what it comes out."""


class Ids(NamedTuple):
    """Stands for the token ids of a step."""

    tape: "Tape"


class Places(NamedTuple):
    """Stands for the packed places that are chosen."""

    def __len__(self) -> int:
        """Never as many as there are tokens."""
        return 0


class Use(NamedTuple):
    """An operation, and the slots that it reads and changes."""

    operation: Operation
    x: Slot | None
    delta: Slot | None
    out: Slot

    @property
    def slots(self) -> list[Slot]:
        return [slot for slot in (self.x, self.delta, self.out) if slot is not None]


class Tape:
    """What was done to slots, in order. Those that it begins with hold `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.uses: list[Use] = []
        self.nothing = Slot(self, 0, dtype)
        """Stands for what nothing is added by; only a delta may be it."""

    def begin(self, operation: Operation, width: int) -> Slot:
        """What `operation` makes of the step itself."""
        out = Slot(self, width, self.dtype)
        self.uses.append(Use(operation, None, None, out))
        return out

    def add(
        self,
        operation: Operation,
        x: Slot,
        width: int,
        *,
        delta: Slot | None = None,
        dtype: torch.dtype | None = None,
    ) -> Slot:
        """`operation` from `x`, and what it does to `delta`, into a new slot; of x's dtype if of no other."""
        out = Slot(self, width, dtype or x.dtype, x.chosen)
        self.uses.append(Use(operation, self._something(x), None if delta is self.nothing else delta, out))
        return out

    def change(self, operation: Operation, x: Slot) -> None:
        """`operation` on `x` in place."""
        self.uses.append(Use(operation, self._something(x), None, x))

    def _something(self, x: Slot) -> Slot:
        if x is self.nothing:
            raise TypeError("nothing can be computed from nothing")
        return x
