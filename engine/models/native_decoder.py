"""The decoder of our own architectures: layers one after the other between input and output, where the C kernels
compute all of them as one recorded program that runs beside the caller."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ...core.errors import InvalidArgument
from ..attention.native import NativeStepAttention
from ..cpu.op_trace import (
    ATTENTION,
    CROSS,
    FILL,
    INPUT,
    SAMPLE,
    STACK,
    OpStruct,
    OpTrace,
    SymbolicTensor,
    Traceable,
    TraceIO,
)
from ..cpu.program import DecoderProgram, ProgramInputs, ProgramTimings, RotaryTable, StepRun, ThreadPool
from ..layers.cross_attention import CrossAttention
from ..layers.embed_and_head import DecoderEnds, Embedding, LogitsOutput
from ..layers.norm import QKNorm
from ..layers.rotary import FusedRotary, Rotary, RotaryAngles
from ..layers.step_context import SharedPart, StepContext
from ..step_batch import SampledTokens
from .interfaces import LogitsIterator

log = logging.getLogger(__name__)


class DecoderLayer(Traceable, Protocol):
    """One layer of a decoder. `host_bound`: on a GPU it waits for numbers that the host needs to go on."""

    @property
    def host_bound(self) -> bool: ...

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        """Adds `delta` to the residual stream x [N, hidden] in place; returns what is to be added to it next."""


class StackedLayer:
    """Layer `index` of a decoder, and what it adds at places of images (`EmbeddedPlaces.stacked`)."""

    def __init__(self, layer: DecoderLayer, index: int) -> None:
        self._layer, self._index = layer, index
        self.untraceable, self.host_bound = layer.untraceable, layer.host_bound

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        following = self._layer(x, delta, context)
        traced: object = x  # declared for tensors
        if isinstance(traced, SymbolicTensor):
            traced.trace.add_in_place(OpStruct(kind=STACK, layer=self._index, size=traced.width), traced)
        elif context.batch.embedded is not None:
            context.batch.embedded.add_stacked(x, self._index)
        return following


class NativeDecoder:
    """A `Decoder` of our own layers. Its first step records them, if all can be (`Traceable`) and the attention backend
    is the C kernels'. CUDA graphs are recorded around it (`gpu/graphs.py`)."""

    def __init__(self, ends: DecoderEnds, layers: Sequence[DecoderLayer], cross: Sequence[CrossAttention] = ()) -> None:
        self.ends = ends
        self.cross = cross
        """What of its layers attends to an encoder's output."""
        self._layers = layers
        self.program: DecoderProgram | None = None
        """Its layers, once they are recorded."""
        self._traced = False
        self.timing_listener: Callable[[ProgramTimings], None] | None = None
        """Called with the times of every step that the program computes: for measurements."""
        self._beside: NativeDecoder | None = None
        self._kept_layers: tuple[int, ...] = ()
        self._kept: Callable[[], Sequence[Tensor]] = tuple

    @property
    def host_bound(self) -> bool:
        """Whether some layer waits for the device, so that no CUDA graph can have it."""
        return any(layer.host_bound for layer in self._layers)

    def keep_states(self, layers: Sequence[int]) -> None:
        """Keep the hidden states that go into these layers, counted from 0; before the first step. The number of layers
        stands for those that come out of the last one.

        Raises:
            InvalidArgument: there is no such layer.
        """
        if stray := [layer for layer in layers if not 0 <= layer <= len(self._layers)]:
            raise InvalidArgument(f"hidden states of layer {stray[0]} are asked for, of {len(self._layers)}")
        self._kept_layers = tuple(layers)

    def compute_beside(self, other: "NativeDecoder") -> None:
        """Compute with the threads of `other`, behind what they compute, if it is recorded first. Threads of two pools
        would wait for work on the same cores."""
        self._beside = other

    @property
    def kept(self) -> Sequence[Tensor]:
        """The states [N, hidden] that were asked for, of the finished step that began last, until the next begins; set
        by who replays a recorded step."""
        return self._kept()

    @kept.setter
    def kept(self, states: Sequence[Tensor]) -> None:
        self._kept = lambda: states

    def compute_logits(self, context: StepContext, selections: Sequence[Tensor]) -> LogitsIterator | None:
        if len(selections) == 1 and (run := self.begin_step(context, selections[0])) is not None:
            run.finish()
            return iter((run.logits,))
        if (program := self._program_for(context)) is None:
            x = self.ends.input(context.batch)
            delta = torch.zeros_like(x)
            kept: dict[int, Tensor] = {}
            for index, layer in enumerate(self._layers):
                if index in self._kept_layers:
                    kept[index] = x + delta
                delta = layer(x, delta, context)
            if len(self._layers) in self._kept_layers:
                kept[len(self._layers)] = x + delta
            self.kept = [kept[index] for index in self._kept_layers]
            return self.ends.output(x, delta, selections)
        run = program.begin(self._inputs(program, context))
        self._kept = partial(_kept_by, run, self._kept_layers, len(self._layers))
        run.finish()
        return run.more_logits(selections)

    def begin_step(
        self, context: StepContext, logits_indices: Tensor, samples: SampledTokens | None = None
    ) -> StepRun | None:
        program = self._program_for(context)
        if program is None or program.io.logits is None:
            return None
        run = program.begin(self._inputs(program, context, logits_indices, samples))
        self._kept = partial(_kept_by, run, self._kept_layers, len(self._layers))
        return run

    def close(self) -> None:
        if self.program is not None:
            self.program.threads.close()

    def _inputs(
        self,
        program: DecoderProgram,
        context: StepContext,
        logits_indices: Tensor | None = None,
        samples: SampledTokens | None = None,
    ) -> ProgramInputs:
        attention = cast(NativeStepAttention, context.attention)
        if context.batch.embedded is not None:
            context.batch.embedded = context.batch.embedded.to(attention.dtype)
        states = None if program.io.embeds_tokens else self.ends.input(context.batch)
        listener = self.timing_listener
        caches = attention.caches
        adapters = context.adapters
        slots = context.state_slots
        cross = None
        if context.attends_across:
            across = cast(NativeStepAttention, context.cross)
            cross = across.batch, across.caches
        return ProgramInputs(context.batch, caches, states, logits_indices, samples, listener, adapters, slots, cross)

    def _program_for(self, context: StepContext) -> DecoderProgram | None:
        """The layers as a program; None where they are called one by one."""
        if not isinstance(context.attention, NativeStepAttention):
            return None
        if not self._traced:
            self._traced = True
            self.program = self._trace(context.attention)
        return self.program

    def _trace(self, attention: NativeStepAttention) -> DecoderProgram | None:
        reason = next((layer.untraceable for layer in self._layers if layer.untraceable), None)
        if reason is not None or not self._layers:
            log.info("layers are computed one by one, not as one program: %s", reason or "it has none on this rank")
            return None
        source, last, width = self.ends
        for end, part in ((source.untraceable, "the input"), (last.untraceable, "the logits")):
            if end is not None:
                log.info("layers are computed as one program without %s: %s", part, end)
        trace = OpTrace(attention.dtype)
        if isinstance(source, Embedding) and source.untraceable is None:
            x = source.trace(trace)
            trace.add_in_place(OpStruct(kind=FILL, size=width), x)  # skipped where all places are tokens
        else:
            x = trace.add_op(OpStruct(kind=INPUT, size=width), None, width)
        context = SymbolicContext(attention.output_sizes)
        delta = trace.no_delta
        kept: dict[int, SymbolicTensor] = {}
        for index, layer in enumerate(self._layers):
            first = len(trace.ops)
            delta = cast(Any, layer)(x, delta, context)  # declared for tensors and their context
            if index in self._kept_layers:
                kept[index] = trace.keep_after(first, x)
        layer_ops = len(trace.ops)
        logits = None
        if isinstance(last, LogitsOutput) and last.untraceable is None:
            logits = last.trace(x, delta)
            trace.add_in_place(OpStruct(kind=SAMPLE, size=logits.width), logits)  # skipped where nothing is sampled
        states = tuple(kept[index] for index in self._kept_layers if index in kept)
        io = TraceIO(x, delta, layer_ops, source.untraceable is None, logits, states)
        beside = None if self._beside is None else self._beside.program
        threads = ThreadPool() if beside is None else beside.threads
        return DecoderProgram(trace, io, context.rotary_tables, threads, last)


def _kept_by(run: StepRun, layers: Sequence[int], after_last: int) -> list[Tensor]:
    kept = iter(run.kept)
    return [run.last_states if layer == after_last else next(kept) for layer in layers]


class _SymbolicAngles(NamedTuple):
    """Stands for the rotation of a step's tokens by the `number`th rotary embedding of a program."""

    number: int
    rotary_dim: int


class SymbolicContext:
    """Stands for a `StepContext`, its states, and its attention, whose results have so many features, by cache."""

    kernel = None

    def __init__(self, output_sizes: Sequence[int]) -> None:
        self.attention = self
        self.states = self
        self._output_sizes = output_sizes
        self.adapters = None
        self._shared: dict[SharedPart, Any] = {}
        self._rotaries: list[FusedRotary] = []  # each once

    @property
    def rotary_tables(self) -> list[RotaryTable]:
        """The tables of the rotary embeddings that layers asked for, by their numbers."""
        return [RotaryTable(rotary.cos_sin, rotary.step_table) for rotary in self._rotaries]

    def shared(self, part: SharedPart, x: Tensor) -> Tensor:
        if part not in self._shared:
            self._shared[part] = part(x, cast(StepContext, self))
        return cast(Tensor, self._shared[part])

    def angles(self, rotary: Rotary) -> RotaryAngles:
        assert isinstance(rotary, FusedRotary), "a layer that rotates by torch says that it is untraceable"
        if rotary not in self._rotaries:
            self._rotaries.append(rotary)
        return cast(RotaryAngles, _SymbolicAngles(self._rotaries.index(rotary), 2 * rotary.cos_sin.shape[-1]))

    def cross(self, layer: int, q: SymbolicTensor, *_: None) -> SymbolicTensor:
        """The attention to an encoder's output."""
        return q.trace.add_op(OpStruct(kind=CROSS, stride=q.width, layer=layer), q, q.width)

    def apply_rope_and_attend(
        self,
        layer: int,
        packed: SymbolicTensor,
        angles: _SymbolicAngles,
        sinks: Tensor | None = None,
        norm: QKNorm | None = None,
    ) -> SymbolicTensor:
        if norm is not None:
            norm(cast(Tensor, packed))
        operation = OpStruct(
            kind=ATTENTION,
            what=None if sinks is None else sinks.data_ptr(),
            stride=packed.width,
            layer=layer,
            angles=angles.number,
            size=angles.rotary_dim,
        )
        return packed.trace.add_op(operation, packed, self._output_sizes[layer])
