"""Where a stage's hidden states come from and where they go: embedding and head, or the stages beside it.

What travels is the residual stream with everything added to it, [N, hidden] in the model's dtype: a stage goes on with
the very numbers that one rank would have.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ..checkpoint.build_context import Pipe
from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import Loader
from ..cpu.op_trace import Ids, Slot
from .embedding import Embedding
from .linear import Head
from .norm import NormMaker

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Inlet(Protocol):
    """Token ids [N] -> hidden states [N, hidden], in memory of their own."""

    def __call__(self, tokens: Tensor) -> Tensor: ...

    def recorded(self, ids: Ids) -> Slot:
        """What a program does instead.

        Raises:
            TypeError: no program can.
        """


Outlet: TypeAlias = Callable[[Tensor, Tensor, Sequence[Tensor]], Iterator[Tensor] | None]
"""Hidden states and what is still to be added to them, both [N, hidden] and not needed any more, and selections of
packed places, each [S] in order, no place twice in all of them -> the logits [S, vocabulary] of each when it is asked
for; None from a stage that is not the last."""


class Ends(NamedTuple):
    """Both ends of a stage, and the width of the hidden states between them."""

    inlet: Inlet
    outlet: Outlet
    hidden: int


def ends(spec: ModelSpec, load: Loader, norm: NormMaker, scale: float = 1.0) -> Ends:
    """The embedding, multiplied by `scale` in the model's dtype, or what the stage before sends; the last norm and the
    head, or the way to the stage after."""
    return Ends(_inlet(spec, load, scale), _outlet(spec, load, norm), spec.hidden_size)


def _inlet(spec: ModelSpec, load: Loader, scale: float) -> Inlet:
    seat = load.place.seat
    if seat.pipe is not None and not seat.stage.first:
        return _Received(seat.pipe, spec.hidden_size, load.dtype, load.device)
    return Embedding(load, EMBEDDING, spec.vocab_size, spec.hidden_size, scale)


def _outlet(spec: ModelSpec, load: Loader, norm: NormMaker) -> Outlet:
    seat = load.place.seat
    if seat.pipe is not None and not seat.stage.last:
        return _Sent(seat.pipe)
    return _Logits(spec, load, norm)


class _Received:
    def __init__(self, pipe: Pipe, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._pipe, self._hidden, self._dtype, self._device = pipe, hidden, dtype, device

    def __call__(self, tokens: Tensor) -> Tensor:
        x = torch.empty(len(tokens), self._hidden, dtype=self._dtype, device=self._device)
        self._pipe.receive(x)
        return x

    def recorded(self, ids: Ids) -> Slot:
        raise TypeError("what the stage before sends is no program's to fetch")


class _Sent:
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def __call__(self, x: Tensor, delta: Tensor, chosen: Sequence[Tensor]) -> None:
        self._pipe.send(x + delta)  # in memory of its own: the layers' is written to again while this is on its way


class _Logits:
    """Softly capped where the model wants it: cap * tanh(logit / cap)."""

    def __init__(self, spec: ModelSpec, load: Loader, norm: NormMaker) -> None:
        self._norm = norm(load.vector("model.norm.weight", spec.hidden_size), spec.norm_eps)
        name = EMBEDDING if spec.tied_embeddings else HEAD
        self._head = Head(load, name, spec.vocab_size, spec.hidden_size)
        self._cap = spec.logit_cap

    def __call__(self, x: Tensor, delta: Tensor, chosen: Sequence[Tensor]) -> Iterator[Tensor]:
        return (self._logits(x, delta, places) for places in chosen)

    def _logits(self, x: Tensor, delta: Tensor, places: Tensor) -> Tensor:
        if len(places) < len(x):
            x, delta = x[places], delta[places]
        logits = self._head(self._norm.after(x, delta))
        return logits if self._cap is None else (logits / self._cap).tanh_().mul_(self._cap)
