"""Runs what a tape recorded: a decoder's layers by one call into C, for any number of tokens.

The same functions with the same numbers as one by one: not a bit differs. What is saved is Python between them.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import library
from .memory import LINE
from .tape import PRODUCT, Operation, Slot, Tape

_NONE = -1


class _Scene(ctypes.Structure):
    """`Scene` of tape.c."""

    _fields_ = [
        ("tokens", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in ("step", "turns", "manners", "plans", "scratches", "caches", "memory", "seconds")
        ),
    ]


class Scene(NamedTuple):
    """What attention prepared for a step: one address, and addresses by layer."""

    step: int
    manners: NDArray[np.int64]
    plans: NDArray[np.int64]
    scratches: NDArray[np.int64]
    caches: NDArray[np.int64]


class Ends(NamedTuple):
    """The slots through which a program is entered and left: the residual stream, changed in place; zeros, to begin
    with; and what is still to be added in the end."""

    stream: Slot
    zeros: Slot
    rest: Slot


class Timed(NamedTuple):
    """What one run took, by operation: kinds (tape.py has their numbers) and seconds."""

    tokens: int
    kinds: NDArray[np.int64]
    seconds: NDArray[np.float64]


_listeners: list[Callable[[Timed], None]] = []


@contextmanager
def timed(listener: Callable[[Timed], None]) -> Iterator[None]:
    """Tell `listener` of every run: for measurements."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Program:
    """A tape with memory for its slots."""

    def __init__(self, tape: Tape, ends: Ends) -> None:
        self._dtype, kind = tape.dtype, library.DTYPES[tape.dtype]
        self.places = places = _places(tape, ends)
        self._ends = [(places[slot], slot.width) for slot in ends]
        self._token_bytes = max(at + _bytes(slot, tape.dtype) for slot, at in places.items())
        for use in tape.uses:
            to, delta = use.operation, _NONE if use.delta is None else places[use.delta]
            to.x, to.delta, to.out, to.dtype = places[use.x], delta, places[use.out], kind
        _chain([use.operation for use in tape.uses])
        self._operations = (Operation * len(tape.uses))(*(use.operation for use in tape.uses))
        self._memory, self._run = torch.empty(0, dtype=torch.uint8), library.bind("charonia_run")

    def __call__(self, x: Tensor, turns: Sequence[Tensor], scene: Scene) -> tuple[Tensor, Tensor]:
        """x [N, width] through all layers, tokens turned by `turns` (see elementwise.turn).

        Returns the residual stream and what is still to be added to it [N, width], both good until the next call.

        Raises:
            MemoryError: there is none for a matrix product.
        """
        memory, tokens = self._room(len(x)), len(x)
        stream, zeros, rest = (self._tensor(memory, tokens, *end) for end in self._ends)
        stream.copy_(x)
        zeros.zero_()
        angles = np.array([each.data_ptr() for each in turns], np.int64)
        columns = (each.ctypes.data for each in (angles, *scene[1:]))
        seconds = np.zeros(len(self._operations)) if _listeners else None
        clock = None if seconds is None else seconds.ctypes.data
        asked = _Scene(tokens, scene.step, *columns, memory.data_ptr(), clock)
        if self._run(self._operations, len(self._operations), ctypes.byref(asked)):
            raise MemoryError("no memory for a matrix product")
        if seconds is not None:
            self._tell(Timed(tokens, np.array([each.kind for each in self._operations]), seconds))
        return stream, rest

    def _tell(self, timed: Timed) -> None:
        for listener in _listeners:
            listener(timed)

    def _room(self, tokens: int) -> Tensor:
        size = tokens * self._token_bytes
        if len(self._memory) < size:
            self._memory = torch.empty(size + LINE, dtype=torch.uint8)
            self._memory = self._memory[-self._memory.data_ptr() % LINE :]
        return self._memory

    def _tensor(self, memory: Tensor, tokens: int, place: int, width: int) -> Tensor:
        size = tokens * width * self._dtype.itemsize
        return memory[place * tokens : place * tokens + size].view(self._dtype).view(tokens, width)


def _chain(operations: list[Operation]) -> None:
    """Tell each product which matrix is read after its own."""
    products = [each for each in operations if each.kind == PRODUCT]
    for product, following in pairwise(products):
        product.next = following.what


def _bytes(slot: Slot, dtype: torch.dtype) -> int:
    """Of one token, filled up so that every slot begins with a line for any number of tokens."""
    return -(-slot.width * dtype.itemsize // LINE) * LINE


def _places(tape: Tape, ends: Ends) -> dict[Slot, int]:
    """Where each slot begins, in bytes a token: two that are needed at the same time do not overlap."""
    spans = _spans(tape, ends)
    places: dict[Slot, int] = {}
    for slot, span in sorted(spans.items(), key=lambda each: each[1].start):
        taken = sorted(
            (at, at + _bytes(other, tape.dtype)) for other, at in places.items() if spans[other].stop > span.start
        )
        places[slot] = _gap(taken, _bytes(slot, tape.dtype))
    return places


def _gap(taken: list[tuple[int, int]], size: int) -> int:
    """The first place where `size` fits between the ranges `taken`, sorted."""
    at = 0
    for begin, end in taken:
        if begin - at >= size:
            return at
        at = max(at, end)
    return at


def _spans(tape: Tape, ends: Ends) -> dict[Slot, range]:
    """From which operation to which each slot is needed; ends are given before the first, and read after the last."""
    last = len(tape.uses) + 1
    spans = {ends.stream: range(-1, last), ends.zeros: range(-1, 0)}
    for number, slot in _uses(tape):
        begun = spans[slot].start if slot in spans else number
        spans[slot] = range(begun, max(number + 1, spans[slot].stop if slot in spans else 0))
    spans[ends.rest] = range(spans[ends.rest].start, last)
    return spans


def _uses(tape: Tape) -> Iterator[tuple[int, Slot]]:
    return ((number, slot) for number, use in enumerate(tape.uses) for slot in use.slots)
