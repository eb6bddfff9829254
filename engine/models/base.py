"""What the runner needs of an architecture."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor

from ..attention.base import Attend
from ..spec import ModelSpec
from ..weights import Loader


class Decoder(Protocol):
    """A causal language model over packed sequences."""

    def logits(self, tokens: Tensor, positions: Tensor, attend: Attend, chosen: Tensor) -> Tensor:
        """Compute ids and positions [N]; keys and values go through `attend`.

        Returns the logits [S, vocabulary] of the packed places `chosen` [S], maybe none, in the model's dtype.
        """


Builder: TypeAlias = Callable[[ModelSpec, Loader, int], Decoder]
"""Builds a decoder from its spec and weights, for sequences of at most so many tokens."""
