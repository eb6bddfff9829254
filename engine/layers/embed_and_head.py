"""The two ends of a decoder on one rank: token embedding or the stage before; the LM head or the stage after.

Between pipeline stages travels the residual stream with everything added to it, [N, hidden] in the model's dtype: a
stage goes on with the very numbers that one rank would have.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ..checkpoint.build_context import PipelineLink, rank_slice
from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import TensorSlice, WeightLoader
from ..cpu import library
from ..cpu.elementwise import FusedSoftCap, trace_embedding, trace_positions
from ..cpu.op_trace import OpTrace, SymbolicTensor, Traceable
from ..step_batch import StepBatch
from .linear import LMHead, split_reason
from .norm import WholeNorm

EMBEDDING_WEIGHT = "model.embed_tokens.weight"
HEAD_WEIGHT = "lm_head.weight"


class InputPositions(NamedTuple):
    """What is added to embeddings by position: of `lines` [.., hidden], in which position 0 is line `first`; and the
    norm of the sum, if it has one."""

    lines: Tensor
    first: int = 0
    norm: WholeNorm | None = None


class Embedding:
    """Token ids [N] -> rows [N, hidden] of the embedding table, in memory of their own, the vocabulary split over the
    group. Called for a step, with the rows of places that have no token. The table stays in the memory-mapped file
    where it can: a step reads few rows of it. `positions`: what is added to them, if anything."""

    def __init__(
        self, loader: WeightLoader, spec: ModelSpec, scale: float = 1.0, positions: InputPositions | None = None
    ) -> None:
        self._positions = positions
        self._part = rank_slice(spec.vocab_size, loader.group)
        shape = spec.vocab_size, spec.hidden_size
        self._table = loader.table(TensorSlice(EMBEDDING_WEIGHT, shape, self._part))
        self._group = loader.group
        self._scale = None if scale == 1 else torch.tensor(scale, dtype=loader.dtype, device=loader.device)
        contiguous = None if self._table.rows.is_contiguous() else "its embedding table is not contiguous"
        self.untraceable = split_reason(loader.group) or contiguous

    def __call__(self, batch: StepBatch) -> Tensor:
        x = self.embed(batch.tokens)
        if (positions := self._positions) is not None:
            x = x + positions.lines[batch.positions + positions.first]
            x = x if positions.norm is None else positions.norm(x)
        return x if batch.embedded is None else batch.embedded.fill(x)

    def embed(self, tokens: Tensor) -> Tensor:
        if self._group.size == 1:
            x = self._table.gather(tokens)
        else:
            local = tokens - self._part.start
            elsewhere = (local < 0) | (local >= len(self._table))
            mine = self._table.gather(local.masked_fill(elsewhere, 0))
            x = self._group.all_reduce(mine.masked_fill_(elsewhere.unsqueeze(-1), 0))
        return x if self._scale is None else x * self._scale

    def trace(self, trace: OpTrace) -> SymbolicTensor:
        """Record the same as operations; only if `untraceable` gives no reason against it."""
        factor = 1.0 if self._scale is None else float(self._scale)
        x = trace_embedding(trace, self._table.rows, self._table.width, self._table.block_type, factor)
        if (positions := self._positions) is not None:
            trace_positions(x, positions.lines, positions.first)
            x = x if positions.norm is None else cast(Any, positions.norm)(x)
        return x


class StageReceiver:
    untraceable: str | None = "its hidden states come from the stage before"

    def __init__(self, link: PipelineLink, spec: ModelSpec, loader: WeightLoader) -> None:
        self._link = link
        self._hidden = spec.hidden_size
        self._dtype = loader.dtype
        self._device = loader.device

    def __call__(self, batch: StepBatch) -> Tensor:
        x = torch.empty(batch.size, self._hidden, dtype=self._dtype, device=self._device)
        self._link.receive(x)
        return x


class StageSender:
    untraceable: str | None = "its hidden states go to the stage after"

    def __init__(self, link: PipelineLink) -> None:
        self._link = link

    def __call__(self, x: Tensor, delta: Tensor, selections: Sequence[Tensor]) -> None:
        self._link.send(x + delta)  # in memory of its own: the layers' is written to again while this is on its way


class LogitsOutput:
    """The last norm and the LM head. Logits are softly capped where the model wants it: cap * tanh(logit / cap)."""

    def __init__(
        self,
        spec: ModelSpec,
        loader: WeightLoader,
        norm: Callable[[Tensor, float], WholeNorm],
        norm_weight: str,
        bias: Tensor | None = None,
    ) -> None:
        self.norm = norm(loader.vector(norm_weight, spec.hidden_size), spec.norm_eps)
        name = EMBEDDING_WEIGHT if spec.tied_embeddings else HEAD_WEIGHT
        self.head = LMHead(loader, name, spec.vocab_size, spec.hidden_size, bias)
        self._soft_cap = None if spec.logit_softcap is None else _fastest_soft_cap(spec.logit_softcap, loader)
        self.untraceable = self.head.untraceable

    def __call__(self, x: Tensor, delta: Tensor, selections: Sequence[Tensor]) -> Iterator[Tensor]:
        """The residual stream `x` and what is still to be added to it, both [N, hidden], may be overwritten. Each
        selection is packed places [S], ascending, and no place is in two of them. Its logits [S, vocabulary] are
        computed when the iterator comes to it."""
        return (self._logits(x, delta, places) for places in selections)

    def trace(self, x: SymbolicTensor, delta: SymbolicTensor) -> SymbolicTensor:
        """Record logits of selected places as operations; only if `untraceable` gives no reason against it."""
        # Both are declared for tensors.
        norm = cast(Any, self.norm)
        head = cast(Any, self.head)
        logits: SymbolicTensor = head(norm.add_and_norm(x.select(), delta.select()))
        return logits if self._soft_cap is None else cast(Any, self._soft_cap)(logits)

    def _logits(self, x: Tensor, delta: Tensor, places: Tensor) -> Tensor:
        if len(places) < len(x):
            x = x[places]
            delta = delta[places]
        logits = self.head(self.norm.add_and_norm(x, delta))
        return logits if self._soft_cap is None else self._soft_cap(logits)


def _fastest_soft_cap(cap: float, loader: WeightLoader) -> Callable[[Tensor], Tensor]:
    """cap * tanh(logits / cap), in place where kernels compute."""
    if library.supports(loader.dtype, loader.device):
        return FusedSoftCap(cap)
    return lambda logits: (logits / cap).tanh_().mul_(cap)


class DecoderInput(Traceable, Protocol):
    """The N tokens of a step, or what stands in their places -> hidden states [N, width] in memory of their own."""

    def __call__(self, batch: StepBatch) -> Tensor: ...


class DecoderOutput(Traceable, Protocol):
    """As `LogitsOutput`; without a head it returns None."""

    def __call__(self, x: Tensor, delta: Tensor, selections: Sequence[Tensor]) -> Iterator[Tensor] | None: ...


class DecoderEnds(NamedTuple):
    """A decoder's input and output, and the width of the hidden states between them."""

    input: DecoderInput
    output: DecoderOutput
    hidden_size: int


def build_ends(
    spec: ModelSpec,
    loader: WeightLoader,
    norm: Callable[[Tensor, float], WholeNorm],
    scale: float = 1.0,
    last_norm: str = "model.norm.weight",
    positions: InputPositions | None = None,
    bias: Tensor | None = None,
) -> DecoderEnds:
    """The ends of this rank's pipeline stage. `scale` multiplies embeddings, to which `positions` are added; `norm`
    makes the one before the head, of the weight `last_norm`; `bias` [vocabulary] is added to logits."""
    link = loader.context.shard.link
    stage = loader.context.shard.stage
    first: DecoderInput
    first = (
        Embedding(loader, spec, scale, positions) if link is None or stage.first else StageReceiver(link, spec, loader)
    )
    last: DecoderOutput
    last = LogitsOutput(spec, loader, norm, last_norm, bias) if link is None or stage.last else StageSender(link)
    return DecoderEnds(first, last, spec.hidden_size)
