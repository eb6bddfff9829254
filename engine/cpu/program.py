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

from ..step_batch import SampledTokens, StepBatch
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

    residual: Tensor
    delta: Tensor


class ProgramTimings(NamedTuple):
    """What one run took, by operation: kinds (tape.py has their numbers), whether of the chosen places alone, and
    seconds."""

    tokens: int
    kinds: NDArray[np.int64]
    selected: NDArray[np.bool_]
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

    caches: LayerCaches
    hidden_states: Tensor | None
    logits_indices: Tensor | None = None
    samples: SampledTokens | None = None


class _StepWorkspace:
    """What C reads of one step while it is computed, and memory for what it makes of it."""

    def __init__(self) -> None:
        self.arguments = _StepArguments()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def grow(self, size: int) -> None:
        self._memory = aligned_empty(size)
        self.arguments.desk, self.arguments.desk_bytes = self._memory.data_ptr(), len(self._memory)


class StepRun:
    """A step on its way; its results are good until the next one begins."""

    def __init__(self, program: "DecoderProgram", desk: _StepWorkspace, batch: StepBatch, asked: ProgramInputs) -> None:
        self._program, self.workspace, self.batch, self.inputs = program, desk, batch, asked
        self.seconds = np.zeros(desk.arguments.until) if _listeners else None
        desk.arguments.seconds = None if self.seconds is None else self.seconds.ctypes.data
        self.number = -1
        self.memory = program.memory

    def finish(self) -> None:
        """Help, until it is computed."""
        self._program.finish(self)

    @property
    def logits(self) -> Tensor:
        """[S, vocabulary], of one that is finished."""
        slot, places = self._program.io.logits, self.inputs.logits_indices
        if slot is None or places is None:
            raise RuntimeError("nobody asked for logits")
        return self._tensor(slot, self.batch.size * self._program.token_bytes, len(places))

    @property
    def hidden(self) -> HiddenStates:
        """Of one that is finished."""
        marks = self._program.io
        return HiddenStates(*(self._tensor(slot, 0, self.batch.size) for slot in (marks.residual, marks.delta)))

    def _tensor(self, slot: SymbolicTensor, begin: int, rows: int) -> Tensor:
        at = begin + self._program.offsets[slot] * rows
        raw = self.memory[at : at + rows * slot.width * slot.dtype.itemsize]
        return raw.view(slot.dtype).view(rows, slot.width)


class DecoderProgram:
    """A tape with memory for its slots, and threads that run it beside the caller's: as many as torch has now."""

    def __init__(self, tape: OpTrace, marks: TraceIO, turns: Sequence[Tensor]) -> None:
        """`turns`: by angles, cosines and sines of every position, float32 [positions, 2, rotary_dim / 2]."""
        self.io, self._turns, self.offsets = marks, turns, plan_buffers(tape, marks)
        for use in tape.ops:
            self._set_offsets(use)
        operations = [use.operation for use in tape.ops]
        _link_prefetches(operations)
        self._operations = (OpStruct * len(operations))(*operations)
        self._angles = np.array([each.data_ptr() for each in turns], np.int64)
        self.token_bytes, place_bytes = (buffer_bytes(self.offsets, chosen) for chosen in (False, True))
        sizes = self.token_bytes, place_bytes
        self._program = _ProgramStruct(ctypes.addressof(self._operations), *sizes, self._angles.ctypes.data)
        self._start, self._join = library.bind_function("charonia_start"), library.bind_function("charonia_join")
        self._pool, self.close = start_thread_pool(self)
        self.memory = aligned_empty(0)
        self._pending: deque[StepRun] = deque()
        self._free_workspaces: list[_StepWorkspace] = []

    def begin(self, batch: StepBatch, asked: ProgramInputs) -> StepRun:
        """Have it computed after those begun before it, beside the caller."""
        desk = self._free_workspaces.pop() if self._free_workspaces else _StepWorkspace()
        scene = desk.arguments
        fill_step_struct(batch, scene.step)
        scene.known, scene.longest = batch.token_ids.data_ptr(), batch.token_ids.stride(0)
        scene.kinds, scene.manners, scene.kind_of, scene.caches = asked.caches.c_fields
        scene.entering = None if asked.hidden_states is None else asked.hidden_states.data_ptr()
        self._set_extent(scene, asked)
        run = StepRun(self, desk, batch, asked)
        while (number := self._submit(desk)) < 0:
            self._grow(run)
        run.number = number
        self._pending.append(run)
        return run

    def finish(self, run: StepRun) -> None:
        """Help with it, and before with those begun before it."""
        while run in self._pending:
            first = self._pending[0]
            self._join(self._pool, first.number)
            self._pending.popleft()  # not before: who is interrupted comes back for it
            self._free_workspaces.append(first.workspace)
            if first.seconds is not None:
                self._report(first.batch.size, first.seconds)

    def _set_extent(self, scene: _StepArguments, asked: ProgramInputs) -> None:
        """How far it goes."""
        if asked.logits_indices is None:
            scene.until, scene.chosen = self.io.layer_ops, 0
            return
        scene.chosen, scene.places = len(asked.logits_indices), asked.logits_indices.data_ptr()
        if asked.samples is None:
            scene.until = len(self._operations) - 1
            return
        scene.until, (tokens, choices, _) = len(self._operations), asked.samples
        scene.picked, scene.choices = tokens.ctypes.data, None if choices is None else choices.ctypes.data

    def _submit(self, desk: _StepWorkspace) -> int:
        scene = desk.arguments
        scene.memory, scene.bytes = self.memory.data_ptr(), len(self.memory)
        number: int = self._start(self._pool, ctypes.addressof(self._program), ctypes.addressof(scene))
        return number

    def _grow(self, run: StepRun) -> None:
        """Some more than is asked for: what attention takes grows with every few tokens. Others' memory is not taken
        away while they are computed."""
        scene = run.workspace.arguments
        if scene.bytes > len(self.memory):
            if self._pending:
                self.finish(self._pending[-1])
            self.memory = run.memory = aligned_empty(scene.bytes * 5 // 4)
        run.workspace.grow(scene.desk_bytes * 5 // 4)

    def _report(self, tokens: int, seconds: NDArray[np.float64]) -> None:
        done = self._operations[: len(seconds)]
        kinds, chosen = (np.array([getattr(each, name) for each in done]) for name in ("kind", "chosen"))
        for listener in _listeners:
            listener(ProgramTimings(tokens, kinds, chosen.astype(bool), seconds))

    def _set_offsets(self, use: TracedOp) -> None:
        to = use.operation
        to.x, to.delta, to.out = (_NONE if slot is None else self.offsets[slot] for slot in (use.x, use.delta, use.out))
        to.dtype, to.chosen = library.DTYPE_CODES[(use.x or use.out).dtype], use.out.selected


def _link_prefetches(operations: list[OpStruct]) -> None:
    """Tell each product which matrix is read after its own."""
    products = [each for each in operations if each.kind == PRODUCT]
    for product, following in pairwise(products):
        product.next = following.what
