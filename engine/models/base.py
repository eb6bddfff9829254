"""What the runner needs of an architecture."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor

from ..attention.base import Attend
from ..spec import ModelSpec
from ..weights import Loader


class Decoder(Protocol):
    """A causal language model over packed sequences."""

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Ids and positions [N] -> hidden states [N, hidden]; keys and values go through `attend`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocabulary], in the model's dtype."""


Builder: TypeAlias = Callable[[ModelSpec, Loader, int], Decoder]
"""Builds a decoder from its spec and weights, for sequences of at most so many tokens."""
