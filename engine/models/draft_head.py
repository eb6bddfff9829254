"""Heads: one decoder layer that goes on from hidden states of its target, and proposes what follows. What an EAGLE-3
head and a layer for multi-token prediction have in common."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, cast

from torch import Tensor

from ..attention.native import NativeStepAttention
from ..checkpoint.model_spec import ModelSpec
from ..cpu.op_trace import INPUT, SAMPLE, OpStruct, OpTrace, TraceIO
from ..cpu.program import DecoderProgram, ProgramInputs, StepRun, ThreadPool
from ..layers.embed_and_head import Embedding
from ..layers.linear import LMHead
from ..layers.norm import Norm
from ..layers.step_context import StepContext
from ..step_batch import SampledTokens
from .native_decoder import SymbolicContext


class HeadStep(NamedTuple):
    """A step of a head: at each place of `context`, whose tokens are those that follow, it goes on from `states`
    [N, width], which may be overwritten: the target's, side by side, if it `fuses` them, else its own [N, hidden].
    Tokens are chosen at the packed `places`, int64 [S]."""

    context: StepContext
    states: Tensor
    fuses: bool
    places: Tensor
    samples: SampledTokens


class HeadEnds(NamedTuple):
    """A head's embeddings, last norm and LM head, which may be its target's. `target_ids` int32: the target's token for
    each that the LM head knows."""

    embedding: Embedding
    norm: Norm
    lm_head: LMHead
    target_ids: Tensor


class DraftHead(ABC):
    """A head that drafts: at each place it goes on from the hidden states there, of its target or its own, and the
    token that follows; its attention's cache has one layer. Where kernels compute all of it, and its target is one
    program, it is recorded twice: to go on from the target's states, and from its own."""

    spec: ModelSpec
    """Its layer, whose vocabulary and hidden states are the target's."""

    target_layers: tuple[int, ...]
    """The layers of the target whose input it takes; the number of layers is what comes after the last one."""

    carries_norm = False
    """Whether its own states, from which it goes on, are those after its last norm."""

    def __init__(self, ends: HeadEnds, untraceable: str | None) -> None:
        self._ends = ends
        self.target_ids = ends.target_ids
        self._untraceable = untraceable or ends.embedding.untraceable
        self._programs: tuple[DecoderProgram, DecoderProgram] | None = None

    @abstractmethod
    def _fuse(self, states: Any, context: Any) -> Any:
        """Make one state of the target's, side by side; of tensors, or what stands for them."""

    @abstractmethod
    def _layer(self, embedded: Any, states: Any, context: Any) -> tuple[Any, Any]:
        """The residual stream, and what is to be added to it; of tensors, or what stands for them. `states` may be
        overwritten."""

    def begin_step(self, step: HeadStep, threads: ThreadPool | None) -> StepRun | None:
        """Begin to compute `step` beside the caller, behind what these threads compute. Its tokens are stored, and the
        run keeps its own states at `places`. None: only `compute` can compute it."""
        attention = step.context.attention
        if threads is None or not isinstance(attention, NativeStepAttention) or self._untraceable:
            return None
        if self._programs is None:
            self._programs = self._trace(attention, threads, True), self._trace(attention, threads, False)
        program = self._programs[0 if step.fuses else 1]
        places = step.places if len(step.places) else None
        return program.begin(
            ProgramInputs(step.context.batch, attention.caches, step.states.contiguous(), places, step.samples)
        )

    def compute(self, step: HeadStep) -> tuple[Tensor, Tensor]:
        """The head's own states [S, hidden] at the places of `step`, and logits [S, draft vocabulary]."""
        states = self._fuse(step.states.contiguous(), step.context) if step.fuses else step.states
        residual, delta = self._layer(self._ends.embedding.embed(step.context.batch.tokens), states, step.context)
        own = residual[step.places] + delta[step.places]
        normed = self._ends.norm(own)
        return normed if self.carries_norm else own, self._ends.lm_head(normed)

    def close(self) -> None:
        """Forget its programs, whose threads are the target's."""
        self._programs = None

    def _trace(self, attention: NativeStepAttention, threads: ThreadPool, fuses: bool) -> DecoderProgram:
        trace = OpTrace(attention.dtype)
        context = SymbolicContext(attention.output_sizes)
        width = self.spec.hidden_size * (len(self.target_layers) if fuses else 1)
        states: Any = trace.add_op(OpStruct(kind=INPUT, size=width), None, width)
        if fuses:
            states = self._fuse(states, context)
        residual, delta = self._layer(self._ends.embedding.trace(trace), states, context)
        layer_ops = len(trace.ops)
        own = residual.select()
        normed: Any = cast(Any, self._ends.norm).add_and_norm(own, delta.select())
        logits: Any = self._ends.lm_head(normed)
        trace.add_in_place(OpStruct(kind=SAMPLE, size=logits.width, what=self.target_ids.data_ptr()), logits)
        kept = normed if self.carries_norm else own
        io = TraceIO(residual, delta, layer_ops, False, logits, (kept,))
        return DecoderProgram(trace, io, context.rotary_tables, threads)
