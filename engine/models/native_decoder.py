"""A decoder's layers one after the other, between its ends; where our kernels are all they need, by one call of a
recorded program."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from ..attention.backend import StepAttention
from ..attention.native import NativeStepAttention
from ..cpu import library
from ..cpu.buffer_planner import TraceIO
from ..cpu.op_trace import ATTENTION, ENTER, PICK, OpStruct, OpTrace, SymbolicIndices, SymbolicTensor, SymbolicTokenIds
from ..cpu.program import DecoderProgram, HiddenStates, ProgramInputs, StepRun
from ..layers.embed_and_head import DecoderEnds
from ..layers.rotary import FusedRotary, Rotary, RotaryAngles
from ..step_batch import SampledTokens, StepBatch

DecoderLayer: TypeAlias = Callable[[Tensor, Tensor, RotaryAngles, StepAttention], Tensor]
"""The residual stream x [N, hidden], changed in place, and what is still to be added to it; what to add after it."""


class LayerRotaries(NamedTuple):
    """The ways in which layers turn their heads, and which of them each layer has; without that all have the first."""

    rotaries: Sequence[Rotary]
    by_layer: Sequence[int] | None = None


class NativeDecoder:
    """Our own architectures as a Decoder."""

    def __init__(self, ends: DecoderEnds, layers: Sequence[DecoderLayer], rotation: LayerRotaries) -> None:
        self._ends, self._rotaries = ends, rotation.rotaries
        self._layers = list(zip(layers, rotation.by_layer or [0] * len(layers), strict=True))
        self._program: DecoderProgram | None = None
        self._trace_tried = False

    def compute_logits(
        self, batch: StepBatch, attend: StepAttention, chosen: Sequence[Tensor]
    ) -> Iterator[Tensor] | None:
        """See `Decoder.logits`."""
        if len(chosen) == 1 and (run := self.begin_step(batch, attend, chosen[0])) is not None:
            run.finish()
            return iter((run.logits,))
        return self._ends.output(*self._hidden(batch, attend), chosen)

    def begin_step(
        self, batch: StepBatch, attend: StepAttention, places: Tensor, picks: SampledTokens | None = None
    ) -> StepRun | None:
        """See `Decoder.begin`."""
        if not isinstance(attend, NativeStepAttention) or (program := self._traced_program(attend)) is None:
            return None
        if program.io.logits is None:
            return None
        return program.begin(batch, ProgramInputs(attend.caches, self._input_states(program, batch), places, picks))

    def close(self) -> None:
        """See `Decoder.close`."""
        if self._program is not None:
            self._program.close()

    def _hidden(self, batch: StepBatch, attend: StepAttention) -> HiddenStates:
        if not isinstance(attend, NativeStepAttention) or (program := self._traced_program(attend)) is None:
            return self._run_layers(batch, attend)
        run = program.begin(batch, ProgramInputs(attend.caches, self._input_states(program, batch)))
        run.finish()
        return run.hidden

    def _input_states(self, program: DecoderProgram, batch: StepBatch) -> Tensor | None:
        return None if program.io.embeds_tokens else self._ends.input(batch.tokens)

    def _run_layers(self, batch: StepBatch, attend: StepAttention) -> HiddenStates:
        x, angles = self._ends.input(batch.tokens), [rotary(batch.positions) for rotary in self._rotaries]
        delta = torch.zeros_like(x)
        for layer, rope in self._layers:
            delta = layer(x, delta, angles[rope], attend)
        return HiddenStates(x, delta)

    def _traced_program(self, attend: NativeStepAttention) -> DecoderProgram | None:
        if not self._trace_tried:
            self._trace_tried = True
            self._program = self._trace(attend)
        return self._program

    def _trace(self, attend: NativeStepAttention) -> DecoderProgram | None:
        """The decoder as a program, found by calling its parts with what stands for tensors (see `OpTrace`)."""
        turns = [rotary.cos_sin for rotary in self._rotaries if isinstance(rotary, FusedRotary)]
        if attend.dtype not in library.DTYPE_CODES or not self._layers or len(turns) < len(self._rotaries):
            return None
        tape = OpTrace(attend.dtype)
        stream, embeds = self._trace_input(tape)
        told, rest = cast(StepAttention, _SymbolicAttention(attend.output_size)), tape.no_delta
        try:
            for layer, rope in self._layers:
                turned = _SymbolicAngles(rope, 2 * turns[rope].shape[-1])
                rest = cast(SymbolicTensor, layer(*_as_tensors(stream, rest), cast(RotaryAngles, turned), told))
        except (TypeError, AttributeError):
            return None  # something is computed in between that only torch can
        layers = len(tape.ops)
        return DecoderProgram(
            tape, TraceIO(stream, rest, layers, embeds, self._trace_output(tape, stream, rest)), turns
        )

    def _trace_input(self, tape: OpTrace) -> tuple[SymbolicTensor, bool]:
        try:
            return self._ends.input.trace(SymbolicTokenIds(tape)), True
        except TypeError:
            return tape.add_source(OpStruct(kind=ENTER, size=self._ends.hidden_size), self._ends.hidden_size), False

    def _trace_output(self, tape: OpTrace, stream: SymbolicTensor, rest: SymbolicTensor) -> SymbolicTensor | None:
        """The slot of the logits; None, and nothing recorded, if a program can't compute them."""
        before = len(tape.ops)
        try:
            found = self._ends.output(*_as_tensors(stream, rest), [cast(Tensor, SymbolicIndices())])
            return None if found is None else _trace_sampling(cast(SymbolicTensor, next(found)))
        except (TypeError, AttributeError):
            del tape.ops[before:]
            return None


def _as_tensors(x: SymbolicTensor, delta: SymbolicTensor) -> tuple[Tensor, Tensor]:
    return cast(Tensor, x), cast(Tensor, delta)


def _trace_sampling(logits: SymbolicTensor) -> SymbolicTensor:
    """Tokens are chosen last, if somebody wants them to be."""
    logits.trace.add_in_place(OpStruct(kind=PICK, size=logits.width), logits)
    return logits


class _SymbolicAngles(NamedTuple):
    """Stands for angles, which turn so much of a head."""

    number: int
    size: int


class _SymbolicAttention(NamedTuple):
    """Stands for the attention of a step; what comes out has `width` features."""

    width: int

    def apply_rope_and_attend(self, layer: int, packed: SymbolicTensor, angles: _SymbolicAngles) -> SymbolicTensor:
        operation = OpStruct(kind=ATTENTION, layer=layer, angles=angles.number, size=angles.size)
        return packed.trace.add_op(operation, packed, self.width)
