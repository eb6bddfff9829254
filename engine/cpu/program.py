"""Runs a recorded decoder: one call into C begins a step of any number of tokens, on threads beside the caller's.

It calls the same functions with the same numbers as layers called one by one: not a bit differs. It saves the Python
between them, which comes from memory again, for weights have just gone through all caches.
"""

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.plan import MaskArray
from ..step_adapters import StepAdapters
from ..step_batch import SampledTokens, StepBatch
from . import library
from .attention import LayerCaches, StepStruct
from .library import struct_fields
from .memory import aligned_empty
from .op_trace import EXPERTS, HEADS, PRODUCT, OpStruct, OpTrace, SymbolicTensor, TraceIO, buffer_bytes, plan_buffers
from .recurrent import MovesStruct, StepSlots

_NO_TENSOR = -1


class _ProgramStruct(ctypes.Structure):
    """`Program` of program.h."""

    _fields_ = struct_fields("p operations", "l token_bytes selected_bytes", "p cos_sin")


class _StepArguments(ctypes.Structure):
    """`StepArguments` of program.h."""

    _fields_ = [
        ("step", StepStruct),
        *struct_fields("p token_ids", "l token_ids_stride"),
        *struct_fields("p hidden_states logits_indices", "l logits_count"),
        *struct_fields("p sampled sampled_of sampling", "l sampled_count operation_count params_count"),
        *struct_fields("p params params_of_layer caches group_of_layer seconds"),
        *struct_fields("p memory", "l memory_bytes", "p workspace", "l workspace_bytes", "p mask_of masks"),
        *struct_fields("l lora_count", "p lora_adapters lora_begins lora_places"),
        ("moves", MovesStruct),
        *struct_fields("p windows matrices"),
        *struct_fields("l filled_count", "p filled_places filled_rows", "l stacked_count", "p stacked_rows cos_sin"),
        ("cross", StepStruct),
        *struct_fields("p cross_params cross_caches"),
    ]


class ProgramTimings(NamedTuple):
    """The duration of each operation of a step of `tokens` tokens, in seconds; `kinds` by the numbers of op_trace.py,
    `selected`: computed only for the places whose logits were wanted."""

    tokens: int
    kinds: NDArray[np.int64]
    selected: NDArray[np.bool_]
    seconds: NDArray[np.float64]


class ProgramInputs(NamedTuple):
    """A step to compute, with its keys and values in `caches`."""

    batch: StepBatch
    caches: LayerCaches
    hidden_states: Tensor | None
    """[N, hidden], the source of a program that does not embed token ids."""
    logits_indices: Tensor | None = None
    """int64 [S], ascending: packed places whose logits are computed; None: hidden states are the result."""
    samples: SampledTokens | None = None
    """How tokens are sampled from logits; each is stored in the batch's token ids behind the token at whose place it
    is, where the row must have room."""
    listener: Callable[[ProgramTimings], None] | None = None
    """Called with the step's times when it is finished."""
    adapters: StepAdapters | None = None
    """The adapters of rows that have one."""
    states: StepSlots | None = None
    """Where layers keep the states of rows."""
    cross: tuple[StepBatch, LayerCaches] | None = None
    """What its rows attend to beside their tokens, and where that is."""


Head: TypeAlias = Callable[[Tensor, Tensor, Sequence[Tensor]], Iterator[Tensor] | None]
"""The output of the traced decoder (`DecoderEnds.output`), called for places that a program was not asked for."""


class _StepWorkspace:
    """The arguments that C reads while it computes one step, and C's own memory for that step."""

    def __init__(self) -> None:
        self.arguments = _StepArguments()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._tables: list[Tensor] = []

    def keep_tables(self, tables: Sequence[Tensor | None]) -> int | None:
        """The address of the addresses of a step's own tables of rotations; None: it has none."""
        self._tables = [table for table in tables if table is not None]
        if not self._tables:
            return None
        self._addresses = np.array([table.data_ptr() for table in self._tables], np.int64)
        return int(self._addresses.ctypes.data)

    def grow(self, size: int) -> None:
        self._memory = aligned_empty(size)
        self.arguments.workspace = self._memory.data_ptr()
        self.arguments.workspace_bytes = len(self._memory)


class StepRun:
    """A step that other threads may be computing already. Its results are good until the next step begins."""

    def __init__(self, program: "DecoderProgram", workspace: _StepWorkspace, inputs: ProgramInputs) -> None:
        self._program = program
        self.workspace = workspace
        self.inputs = inputs
        self.seconds = None if inputs.listener is None else np.zeros(workspace.arguments.operation_count)
        workspace.arguments.seconds = None if self.seconds is None else self.seconds.ctypes.data
        self.number = -1
        self.memory = program.memory
        self._masks: MaskArray | None = None

    def provide_masks(self, masks: MaskArray | None) -> None:
        """The masks that its `SampledTokens.mask_of` names; until they come it is not finished, nor is any step after
        it. None: there are none, and its tokens mean nothing."""
        samples, logits = self.inputs.samples, self._program.io.logits
        if samples is None or samples.mask_of is None or logits is None:
            return
        if masks is None:
            masks = np.zeros((int(samples.mask_of.max()) + 1, -(-logits.width // 32)), np.int32)
        self._masks = np.ascontiguousarray(masks)  # C reads it until the step is finished
        address = ctypes.addressof(self.workspace.arguments)
        library.bind_function("charonia_provide_masks")(address, self._masks.ctypes.data)

    def finish(self) -> None:
        """Help to compute it, and return when it is computed. Steps are finished in the order they were begun in."""
        self._program.finish_up_to(self)

    @property
    def logits(self) -> Tensor:
        """Logits [S, vocabulary] of `ProgramInputs.logits_indices`, of a finished step."""
        logits, places = self._program.io.logits, self.inputs.logits_indices
        if logits is None or places is None:
            raise RuntimeError("the step was begun without logits")
        return self._tensor(logits)

    @property
    def kept(self) -> list[Tensor]:
        """The tensors [N or S, width] of `TraceIO.kept`."""
        return [self._tensor(tensor) for tensor in self._program.io.kept]

    @property
    def last_states(self) -> Tensor:
        """The residual stream [N, width] after all layers, of a finished step; in memory of its own."""
        return self._tensor(self._program.io.residual) + self._tensor(self._program.io.delta)

    def more_logits(self, selections: Sequence[Tensor]) -> Iterator[Tensor] | None:
        """Logits of other packed places of a finished step, in `selections` as of `Decoder.compute_logits`; once."""
        io, head = self._program.io, self._program.head
        if head is None:
            raise RuntimeError("the program has no logits of other places")
        return head(self._tensor(io.residual), self._tensor(io.delta), selections)

    def _tensor(self, symbol: SymbolicTensor) -> Tensor:
        begin, rows = 0, self.inputs.batch.size
        if symbol.selected:
            places = self.inputs.logits_indices
            begin, rows = rows * self._program.token_bytes, 0 if places is None else len(places)
        at = begin + self._program.offsets[symbol] * rows
        raw = self.memory[at : at + rows * symbol.width * symbol.dtype.itemsize]
        return raw.view(symbol.dtype).view(rows, symbol.width)


class ThreadPool:
    """As many threads as torch has now, the caller's included: they compute the steps of one program or of several, in
    the order in which these are begun.

    Raises:
        MemoryError: the machine gives no more threads.
    """

    def __init__(self) -> None:
        helpers = library.bind_function("charonia_threads")() - 1
        self.address: int | None = library.bind_function("charonia_pool_start")(helpers)
        if self.address is None:
            raise MemoryError(f"no {helpers} threads to compute with")
        self.close = weakref.finalize(self, _stop_threads, self.address, os.getpid())
        """Ends the threads when everything begun is computed. Called at the latest when the pool is collected."""


class RotaryTable(NamedTuple):
    """The cosines and sines of a rotary embedding, for a program."""

    cos_sin: Tensor
    """Float32 [positions, 2, rotary_dim / 2]; steps that are computed read only those that are there."""
    of_step: Callable[[StepBatch], Tensor | None]
    """Those of a step's tokens, float32 [N, 2, rotary_dim / 2]; None: they are lines of `cos_sin`, which has them by
    then."""


class DecoderProgram:
    """A trace with planned memory, which `threads` compute."""

    def __init__(
        self,
        trace: OpTrace,
        io: TraceIO,
        rotaries: Sequence[RotaryTable],
        threads: ThreadPool,
        head: Head | None = None,
    ) -> None:
        """`rotaries`: by their numbers. `head`: for `StepRun.more_logits`."""
        self.io = io
        self.head = head
        self._rotaries = rotaries
        self.offsets = plan_buffers(trace, io)
        for to, x, delta, out, aside in trace.ops:
            offsets = (_NO_TENSOR if tensor is None else self.offsets[tensor] for tensor in (x, delta, out, aside))
            to.x, to.delta, to.out, to.aside = offsets
            to.dtype, to.selected = library.DTYPE_CODES[(x or out).dtype], out.selected
        operations = [op.operation for op in trace.ops]
        products = [operation for operation in operations if operation.kind in (PRODUCT, EXPERTS, HEADS)]
        for product, following in pairwise(products):
            if product.kind == following.kind == PRODUCT:
                product.next = following.what  # its weights are fetched while the product ends
        self._operations = (OpStruct * len(operations))(*operations)
        self._tables = np.array([rotary.cos_sin.data_ptr() for rotary in rotaries], np.int64)
        self.token_bytes, selected_bytes = (buffer_bytes(self.offsets, selected) for selected in (False, True))
        sizes = self.token_bytes, selected_bytes
        self._program = _ProgramStruct(ctypes.addressof(self._operations), *sizes, self._tables.ctypes.data)
        self._submit_step = library.bind_function("charonia_step_submit")
        self._wait = library.bind_function("charonia_pool_wait")
        self.threads = threads
        self.memory = aligned_empty(0)
        self._pending: deque[StepRun] = deque()
        self._free_workspaces: list[_StepWorkspace] = []

    def begin(self, inputs: ProgramInputs) -> StepRun:
        """Have a step computed after those begun before it, beside the caller."""
        tables = [rotary.of_step(inputs.batch) for rotary in self._rotaries]
        workspace = self._free_workspaces.pop() if self._free_workspaces else _StepWorkspace()
        arguments, token_ids = workspace.arguments, inputs.batch.token_ids
        arguments.cos_sin = workspace.keep_tables(tables)
        arguments.step = StepStruct(*inputs.batch.c_fields)
        arguments.token_ids = token_ids.data_ptr()
        arguments.token_ids_stride = token_ids.stride(0)
        arguments.params_count, *layers = inputs.caches.c_fields
        arguments.params, arguments.params_of_layer, arguments.caches, arguments.group_of_layer = layers
        arguments.lora_count = 0
        if (adapters := inputs.adapters) is not None:
            arguments.lora_count, *lora = adapters.c_fields
            arguments.lora_adapters, arguments.lora_begins, arguments.lora_places = lora
        if (states := inputs.states) is not None:
            arguments.moves = states.moves
            arguments.windows = states.layers.windows.ctypes.data
            arguments.matrices = states.layers.matrices.ctypes.data
        arguments.cross_params = None
        if inputs.cross is not None:
            across, cross_caches = inputs.cross
            arguments.cross = StepStruct(*across.c_fields)
            arguments.cross_params = ctypes.addressof(cross_caches.params[0])
            arguments.cross_caches = cross_caches.c_fields[3]
        arguments.filled_count = arguments.stacked_count = 0
        if (embedded := inputs.batch.embedded) is not None:
            arguments.filled_count = len(embedded.places)
            arguments.filled_places = embedded.places.data_ptr()
            arguments.filled_rows = embedded.rows.data_ptr()
            if (stacked := embedded.stacked) is not None:
                arguments.stacked_count = len(stacked)
                arguments.stacked_rows = stacked.data_ptr()
        arguments.hidden_states = None if inputs.hidden_states is None else inputs.hidden_states.data_ptr()
        # Computed are the layers alone, or all but sampling, or all.
        places, samples = inputs.logits_indices, inputs.samples
        arguments.operation_count = self.io.layer_ops
        arguments.logits_count = 0
        arguments.sampled_count = 0
        arguments.mask_of = arguments.masks = None
        if places is not None:
            arguments.operation_count = len(self._operations) - 1
            arguments.logits_count, arguments.logits_indices = len(places), places.data_ptr()
        if places is not None and samples is not None:
            arguments.operation_count = len(self._operations)
            arguments.sampled_count = len(samples.tokens)
            columns = samples.tokens, samples.sampling, samples.selected, samples.mask_of
            addresses = [None if column is None else column.ctypes.data for column in columns]
            arguments.sampled, arguments.sampling, arguments.sampled_of, arguments.mask_of = addresses
        run = StepRun(self, workspace, inputs)
        while (number := self._submit(arguments)) < 0:
            self._grow(run)
        run.number = number
        self._pending.append(run)
        return run

    def finish_up_to(self, run: StepRun) -> None:
        """Compute the steps begun up to `run`."""
        while run in self._pending:
            first = self._pending[0]
            self._wait(self.threads.address, first.number)
            self._pending.popleft()  # not before: a caller that is interrupted comes back for it
            self._free_workspaces.append(first.workspace)
            if first.seconds is not None and (listener := first.inputs.listener) is not None:
                computed = self._operations[: len(first.seconds)]
                kinds = np.array([operation.kind for operation in computed])
                selected = np.array([operation.selected for operation in computed]).astype(bool)
                listener(ProgramTimings(first.inputs.batch.size, kinds, selected, first.seconds))

    def _submit(self, arguments: _StepArguments) -> int:
        arguments.memory, arguments.memory_bytes = self.memory.data_ptr(), len(self.memory)
        number: int = self._submit_step(
            self.threads.address, ctypes.addressof(self._program), ctypes.addressof(arguments)
        )
        return number

    def _grow(self, run: StepRun) -> None:
        """Allocate somewhat more than the step takes: attention takes more with every few tokens. Memory of steps that
        are being computed is not taken away."""
        arguments = run.workspace.arguments
        if arguments.memory_bytes > len(self.memory):
            if self._pending:
                self.finish_up_to(self._pending[-1])
            self.memory = run.memory = aligned_empty(arguments.memory_bytes * 5 // 4)
        run.workspace.grow(arguments.workspace_bytes * 5 // 4)


def _stop_threads(address: int, process: int) -> None:
    """A forked process has the pool's memory but none of its threads, and would wait for them for ever."""
    if os.getpid() == process:
        library.bind_function("charonia_pool_stop")(address)
