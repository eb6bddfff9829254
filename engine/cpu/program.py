"""Runs what a tape recorded: a decoder by one call into C, for any number of tokens, begun before the caller has time.

The same functions with the same numbers as one by one: not a bit differs. What is saved is Python between them, which
comes to its code and objects when the weights have just gone through all caches.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..step_batch import StepBatch
from ..worker.sampler import SampledTokens
from . import library
from .attention import LayerCaches, StepStruct, fill_step_struct
from .buffer_planner import TraceIO, buffer_bytes, plan_buffers
from .memory import aligned_empty
from .op_trace import PRODUCT, OpStruct, OpTrace, SymbolicTensor, TracedOp
from .thread_pool import start_thread_pool

_NONE = -1


class _ProgramStruct(ctypes.Structure):
    """`DecoderProgram` of tape.h."""

    _fields_ = [
        ("operations", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("token_bytes", "place_bytes")),
        ("turns", ctypes.c_void_p),
    ]


class _StepArguments(ctypes.Structure):
    """`Scene` of tape.h."""

    _fields_ = [
        ("step", StepStruct),
        ("known", ctypes.c_void_p),
        ("longest", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("entering", "places")),
        ("chosen", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("picked", "choices")),
        *((name, ctypes.c_int64) for name in ("until", "kinds")),
        *((name, ctypes.c_void_p) for name in ("manners", "kind_of", "caches", "seconds", "memory")),
        ("bytes", ctypes.c_int64),
        ("desk", ctypes.c_void_p),
        ("desk_bytes", ctypes.c_int64),
    ]


class HiddenStates(NamedTuple):
    """The residual stream and what is still to be added to it, both [N, hidden]."""

    stream: Tensor
    rest: Tensor


class ProgramTimings(NamedTuple):
    """What one run took, by operation: kinds (tape.py has their numbers), whether of the chosen places alone, and
    seconds."""

    tokens: int
    kinds: NDArray[np.int64]
    chosen: NDArray[np.bool_]
    seconds: NDArray[np.float64]


_listeners: list[Callable[[ProgramTimings], None]] = []


@contextmanager
def listen_to_timings(listener: Callable[[ProgramTimings], None]) -> Iterator[None]:
    """Tell `listener` of every run: for measurements."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class ProgramInputs(NamedTuple):
    """What is to be computed of a batch. `layers`: where its attention is; `entering` [N, hidden]: what a program
    begins with that does not embed. Logits are for the packed `places`, int64 [S]; with `picks` tokens are chosen from
    them, and go into the batch's `known`, too, behind the last tokens of rows: `places` then are no others, and there
    is room. Without places the layers are all."""

    layers: LayerCaches
    entering: Tensor | None
    places: Tensor | None = None
    picks: SampledTokens | None = None


class _StepWorkspace:
    """What C reads of one step while it is computed, and memory for what it makes of it."""

    def __init__(self) -> None:
        self.scene = _StepArguments()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def grow(self, size: int) -> None:
        self._memory = aligned_empty(size)
        self.scene.desk, self.scene.desk_bytes = self._memory.data_ptr(), len(self._memory)


class StepRun:
    """A step on its way; its results are good until the next one begins."""

    def __init__(self, program: "DecoderProgram", desk: _StepWorkspace, batch: StepBatch, asked: ProgramInputs) -> None:
        self._program, self.desk, self.batch, self.asked = program, desk, batch, asked
        self.seconds = np.zeros(desk.scene.until) if _listeners else None
        desk.scene.seconds = None if self.seconds is None else self.seconds.ctypes.data
        self.number = -1
        self.memory = program.memory

    def finish(self) -> None:
        """Help, until it is computed."""
        self._program.finish(self)

    @property
    def logits(self) -> Tensor:
        """[S, vocabulary], of one that is finished."""
        slot, places = self._program.marks.logits, self.asked.places
        if slot is None or places is None:
            raise RuntimeError("nobody asked for logits")
        return self._tensor(slot, self.batch.size * self._program.token_bytes, len(places))

    @property
    def hidden(self) -> HiddenStates:
        """Of one that is finished."""
        marks = self._program.marks
        return HiddenStates(*(self._tensor(slot, 0, self.batch.size) for slot in (marks.stream, marks.rest)))

    def _tensor(self, slot: SymbolicTensor, begin: int, rows: int) -> Tensor:
        at = begin + self._program.places[slot] * rows
        raw = self.memory[at : at + rows * slot.width * slot.dtype.itemsize]
        return raw.view(slot.dtype).view(rows, slot.width)


class DecoderProgram:
    """A tape with memory for its slots, and threads that run it beside the caller's: as many as torch has now."""

    def __init__(self, tape: OpTrace, marks: TraceIO, turns: Sequence[Tensor]) -> None:
        """`turns`: by angles, cosines and sines of every position, float32 [positions, 2, rotary_dim / 2]."""
        self.marks, self._turns, self.places = marks, turns, plan_buffers(tape, marks)
        for use in tape.uses:
            self._locate(use)
        operations = [use.operation for use in tape.uses]
        _link_prefetches(operations)
        self._operations = (OpStruct * len(operations))(*operations)
        self._angles = np.array([each.data_ptr() for each in turns], np.int64)
        self.token_bytes, place_bytes = (buffer_bytes(self.places, chosen) for chosen in (False, True))
        sizes = self.token_bytes, place_bytes
        self._program = _ProgramStruct(ctypes.addressof(self._operations), *sizes, self._angles.ctypes.data)
        self._start, self._join = library.bind_function("charonia_start"), library.bind_function("charonia_join")
        self._crew, self.close = start_thread_pool(self)
        self.memory = aligned_empty(0)
        self._running: deque[StepRun] = deque()
        self._desks: list[_StepWorkspace] = []

    def begin(self, batch: StepBatch, asked: ProgramInputs) -> StepRun:
        """Have it computed after those begun before it, beside the caller."""
        desk = self._desks.pop() if self._desks else _StepWorkspace()
        scene = desk.scene
        fill_step_struct(batch, scene.step)
        scene.known, scene.longest = batch.known.data_ptr(), batch.known.stride(0)
        scene.kinds, scene.manners, scene.kind_of, scene.caches = asked.layers.addresses
        scene.entering = None if asked.entering is None else asked.entering.data_ptr()
        self._ask(scene, asked)
        run = StepRun(self, desk, batch, asked)
        while (number := self._give(desk)) < 0:
            self._grow(run)
        run.number = number
        self._running.append(run)
        return run

    def finish(self, run: StepRun) -> None:
        """Help with it, and before with those begun before it."""
        while run in self._running:
            first = self._running[0]
            self._join(self._crew, first.number)
            self._running.popleft()  # not before: who is interrupted comes back for it
            self._desks.append(first.desk)
            if first.seconds is not None:
                self._tell(first.batch.size, first.seconds)

    def _ask(self, scene: _StepArguments, asked: ProgramInputs) -> None:
        """How far it goes."""
        if asked.places is None:
            scene.until, scene.chosen = self.marks.layers, 0
            return
        scene.chosen, scene.places = len(asked.places), asked.places.data_ptr()
        if asked.picks is None:
            scene.until = len(self._operations) - 1
            return
        scene.until, (tokens, choices) = len(self._operations), asked.picks
        scene.picked, scene.choices = tokens.ctypes.data, None if choices is None else choices.ctypes.data

    def _give(self, desk: _StepWorkspace) -> int:
        scene = desk.scene
        scene.memory, scene.bytes = self.memory.data_ptr(), len(self.memory)
        number: int = self._start(self._crew, ctypes.addressof(self._program), ctypes.addressof(scene))
        return number

    def _grow(self, run: StepRun) -> None:
        """Some more than is asked for: what attention takes grows with every few tokens. Others' memory is not taken
        away while they are computed."""
        scene = run.desk.scene
        if scene.bytes > len(self.memory):
            if self._running:
                self.finish(self._running[-1])
            self.memory = run.memory = aligned_empty(scene.bytes * 5 // 4)
        run.desk.grow(scene.desk_bytes * 5 // 4)

    def _tell(self, tokens: int, seconds: NDArray[np.float64]) -> None:
        done = self._operations[: len(seconds)]
        kinds, chosen = (np.array([getattr(each, name) for each in done]) for name in ("kind", "chosen"))
        for listener in _listeners:
            listener(ProgramTimings(tokens, kinds, chosen.astype(bool), seconds))

    def _locate(self, use: TracedOp) -> None:
        to = use.operation
        to.x, to.delta, to.out = (_NONE if slot is None else self.places[slot] for slot in (use.x, use.delta, use.out))
        to.dtype, to.chosen = library.DTYPE_CODES[(use.x or use.out).dtype], use.out.chosen


def _link_prefetches(operations: list[OpStruct]) -> None:
    """Tell each product which matrix is read after its own."""
    products = [each for each in operations if each.kind == PRODUCT]
    for product, following in pairwise(products):
        product.next = following.what
