"""Where a stage's hidden states come from and where they go: embedding and head, or the stages beside it.

What travels is the residual stream with everything added to it, [N, hidden] in the model's dtype: a stage goes on with
the very numbers that one rank would have.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ..checkpoint.build_context import PipelineLink
from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..cpu.op_trace import SymbolicTensor, SymbolicTokenIds
from .embedding import Embedding
from .linear import LMHead
from .norm import NormFactory

EMBEDDING_WEIGHT, HEAD_WEIGHT = "model.embed_tokens.weight", "lm_head.weight"


class DecoderInput(Protocol):
    """Token ids [N] -> hidden states [N, hidden], in memory of their own."""

    def __call__(self, tokens: Tensor) -> Tensor: ...

    def trace(self, ids: SymbolicTokenIds) -> SymbolicTensor:
        """What a program does instead.

        Raises:
            TypeError: no program can.
        """


DecoderOutput: TypeAlias = Callable[[Tensor, Tensor, Sequence[Tensor]], Iterator[Tensor] | None]
"""Hidden states and what is still to be added to them, both [N, hidden] and not needed any more, and selections of
packed places, each [S] in order, no place twice in all of them -> the logits [S, vocabulary] of each when it is asked
for; None from a stage that is not the last."""


class DecoderEnds(NamedTuple):
    """Both ends of a stage, and the width of the hidden states between them."""

    input: DecoderInput
    output: DecoderOutput
    hidden_size: int


def build_ends(spec: ModelSpec, load: WeightLoader, norm: NormFactory, scale: float = 1.0) -> DecoderEnds:
    """The embedding, multiplied by `scale` in the model's dtype, or what the stage before sends; the last norm and the
    head, or the way to the stage after."""
    return DecoderEnds(_build_input(spec, load, scale), _build_output(spec, load, norm), spec.hidden_size)


def _build_input(spec: ModelSpec, load: WeightLoader, scale: float) -> DecoderInput:
    seat = load.context.shard
    if seat.link is not None and not seat.stage.first:
        return _StageReceiver(seat.link, spec.hidden_size, load.dtype, load.device)
    return Embedding(load, EMBEDDING_WEIGHT, spec.vocab_size, spec.hidden_size, scale)


def _build_output(spec: ModelSpec, load: WeightLoader, norm: NormFactory) -> DecoderOutput:
    seat = load.context.shard
    if seat.link is not None and not seat.stage.last:
        return _StageSender(seat.link)
    return _LogitsOutput(spec, load, norm)


class _StageReceiver:
    def __init__(self, pipe: PipelineLink, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._pipe, self._hidden, self._dtype, self._device = pipe, hidden, dtype, device

    def __call__(self, tokens: Tensor) -> Tensor:
        x = torch.empty(len(tokens), self._hidden, dtype=self._dtype, device=self._device)
        self._pipe.receive(x)
        return x

    def trace(self, ids: SymbolicTokenIds) -> SymbolicTensor:
        raise TypeError("what the stage before sends is no program's to fetch")


class _StageSender:
    def __init__(self, pipe: PipelineLink) -> None:
        self._pipe = pipe

    def __call__(self, x: Tensor, delta: Tensor, chosen: Sequence[Tensor]) -> None:
        self._pipe.send(x + delta)  # in memory of its own: the layers' is written to again while this is on its way


class _LogitsOutput:
    """Softly capped where the model wants it: cap * tanh(logit / cap)."""

    def __init__(self, spec: ModelSpec, load: WeightLoader, norm: NormFactory) -> None:
        self._norm = norm(load.vector("model.norm.weight", spec.hidden_size), spec.norm_eps)
        name = EMBEDDING_WEIGHT if spec.tied_embeddings else HEAD_WEIGHT
        self._head = LMHead(load, name, spec.vocab_size, spec.hidden_size)
        self._cap = spec.logit_softcap

    def __call__(self, x: Tensor, delta: Tensor, chosen: Sequence[Tensor]) -> Iterator[Tensor]:
        return (self._logits(x, delta, places) for places in chosen)

    def _logits(self, x: Tensor, delta: Tensor, places: Tensor) -> Tensor:
        if len(places) < len(x):
            x, delta = x[places], delta[places]
        logits = self._head(self._norm.add_and_norm(x, delta))
        return logits if self._cap is None else (logits / self._cap).tanh_().mul_(self._cap)
