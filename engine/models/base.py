"""What the executor needs of an architecture."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ..attention.base import Attend
from ..layers.group import Group
from ..spec import ModelSpec, Shape
from ..weights import Loader


class Decoder(Protocol):
    """A causal language model over packed sequences."""

    def logits(self, tokens: Tensor, positions: Tensor, attend: Attend, chosen: Tensor) -> Tensor:
        """Compute ids and positions [N]; keys and values go through `attend`.

        Returns the logits [S, vocabulary] of the packed places `chosen` [S], maybe none, in the model's dtype or in
        float32.
        """


Builder: TypeAlias = Callable[[ModelSpec, Loader, int], Decoder]
"""Builds a decoder from its spec and weights, for sequences of at most so many tokens."""


class Place(NamedTuple):
    """What a decoder is built for: this rank's device, and sequences of at most `positions` tokens.

    `progress` is told the fraction of the rank's bytes read so far. `quantized`: its matrices become int8."""

    dtype: torch.dtype
    device: torch.device
    group: Group
    positions: int
    progress: Callable[[float], None] = lambda _: None
    quantized: bool = False


class Built(NamedTuple):
    decoder: Decoder
    shape: Shape


class Recipe(Protocol):
    """A checkpoint that can be served: what is known before its weights are read, and how to build it."""

    @property
    def dtype(self) -> str:
        """What the weights are stored in."""

    @property
    def max_position(self) -> int:
        """Tokens of the longest sequence."""

    def build(self, place: Place) -> Built:
        """Raises CheckpointError: the weights are broken, not what config.json says, or can't be quantised."""
