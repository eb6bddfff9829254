"""Runs what a tape recorded: a decoder by one call into C, for any number of tokens.

The same functions with the same numbers as one by one: not a bit differs. What is saved is Python between them, which
comes to its code and objects when the weights have just gone through all caches.
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

from ..batch import Batch
from . import library
from .attention import Layers, StepOf, show
from .memory import LINE
from .placing import Marks, end, places
from .tape import PRODUCT, Operation, Slot, Tape, Use

_NONE = -1


class _Program(ctypes.Structure):
    """`Program` of tape.c."""

    _fields_ = [
        ("operations", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("token_bytes", "place_bytes")),
        ("turns", ctypes.c_void_p),
    ]


class _Scene(ctypes.Structure):
    """`Scene` of tape.c."""

    _fields_ = [
        ("step", StepOf),
        ("known", ctypes.c_void_p),
        ("longest", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("entering", "places")),
        *((name, ctypes.c_int64) for name in ("chosen", "until", "kinds")),
        *((name, ctypes.c_void_p) for name in ("manners", "kind_of", "caches", "seconds", "memory")),
        ("bytes", ctypes.c_int64),
    ]


class Hidden(NamedTuple):
    """The residual stream and what is still to be added to it, both [N, hidden]."""

    stream: Tensor
    rest: Tensor


class Timed(NamedTuple):
    """What one run took, by operation: kinds (tape.py has their numbers), whether of the chosen places alone, and
    seconds."""

    tokens: int
    kinds: NDArray[np.int64]
    chosen: NDArray[np.bool_]
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
    """A tape with memory for its slots; for one thread. What it returns is good until the next call."""

    def __init__(self, tape: Tape, marks: Marks, turns: Sequence[Tensor]) -> None:
        """`turns`: by angles, cosines and sines of every position, float32 [positions, 2, head_dim / 2]."""
        self.marks, self._turns, self.places = marks, turns, places(tape, marks)
        for use in tape.uses:
            self._locate(use)
        operations = [use.operation for use in tape.uses]
        _chain(operations)
        self._operations = (Operation * len(operations))(*operations)
        self._angles = np.array([each.data_ptr() for each in turns], np.int64)
        self._token_bytes, place_bytes = (end(self.places, chosen) for chosen in (False, True))
        sizes = self._token_bytes, place_bytes
        self._program = _Program(ctypes.addressof(self._operations), *sizes, self._angles.ctypes.data)
        self._scene = _Scene()
        self._asked = ctypes.addressof(self._program), ctypes.addressof(self._scene)
        self._memory, self._run = torch.empty(0, dtype=torch.uint8), library.bind("charonia_run")

    def logits(self, batch: Batch, layers: Layers, entering: Tensor | None, chosen: Tensor) -> Tensor:
        """Logits [S, vocabulary] of the packed places `chosen`, int64 [S]. `entering` [N, hidden]: what a program
        begins with that does not embed."""
        slot, scene = self.marks.logits, self._scene
        assert slot is not None, "the program ends before the logits"
        scene.until, scene.chosen, scene.places = len(self._operations), len(chosen), chosen.data_ptr()
        self._compute(batch, layers, entering)
        return self._tensor(slot, batch.size * self._token_bytes, len(chosen))

    def hidden(self, batch: Batch, layers: Layers, entering: Tensor | None) -> Hidden:
        """What the layers make of the batch."""
        self._scene.until, self._scene.chosen = self.marks.layers, 0
        self._compute(batch, layers, entering)
        return Hidden(*(self._tensor(slot, 0, batch.size) for slot in (self.marks.stream, self.marks.rest)))

    def _compute(self, batch: Batch, layers: Layers, entering: Tensor | None) -> None:
        scene = self._scene
        show(batch, scene.step)
        scene.known, scene.longest = batch.known.data_ptr(), batch.known.stride(0)
        scene.entering = None if entering is None else entering.data_ptr()
        scene.kinds, scene.manners, scene.kind_of, scene.caches = layers.addresses
        seconds = np.zeros(scene.until) if _listeners else None
        scene.seconds = None if seconds is None else seconds.ctypes.data
        while (taken := self._run(*self._asked)) > scene.bytes:
            self._grow(taken)
        if seconds is not None:
            self._tell(batch.size, seconds)

    def _grow(self, size: int) -> None:
        """Some more than is asked for: what attention takes grows with every few tokens."""
        self._memory = torch.empty(size + size // 4 + LINE, dtype=torch.uint8)
        self._memory = self._memory[-self._memory.data_ptr() % LINE :]
        self._scene.memory, self._scene.bytes = self._memory.data_ptr(), len(self._memory)

    def _tell(self, tokens: int, seconds: NDArray[np.float64]) -> None:
        done = self._operations[: len(seconds)]
        kinds, chosen = (np.array([getattr(each, name) for each in done]) for name in ("kind", "chosen"))
        for listener in _listeners:
            listener(Timed(tokens, kinds, chosen.astype(bool), seconds))

    def _tensor(self, slot: Slot, begin: int, rows: int) -> Tensor:
        at = begin + self.places[slot] * rows
        raw = self._memory[at : at + rows * slot.width * slot.dtype.itemsize]
        return raw.view(slot.dtype).view(rows, slot.width)

    def _locate(self, use: Use) -> None:
        to = use.operation
        to.x, to.delta, to.out = (_NONE if slot is None else self.places[slot] for slot in (use.x, use.delta, use.out))
        to.dtype, to.chosen = library.DTYPES[(use.x or use.out).dtype], use.out.chosen


def _chain(operations: list[Operation]) -> None:
    """Tell each product which matrix is read after its own."""
    products = [each for each in operations if each.kind == PRODUCT]
    for product, following in pairwise(products):
        product.next = following.what
