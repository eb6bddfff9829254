"""Rotary position embedding (arXiv 2104.09864), halves turned against each other; linear and Llama 3's scaling."""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels import library
from ..kernels.elementwise import turn
from ..spec import Rope


class Angles(Protocol):
    """How far each token of a step is turned."""

    def rotate(self, x: Tensor) -> Tensor:
        """x [N, heads, head_dim], turned by each token's position."""


class Rotary(Protocol):
    """Knows every position the model can have."""

    def __call__(self, positions: Tensor) -> Angles: ...


class TorchAngles(NamedTuple):
    """cos and sin [N, 1, head_dim] of each token's position; sin's first half is negated."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        swapped = x.roll(x.shape[-1] // 2, -1)
        return torch.mul(x, self.cos).addcmul_(swapped, self.sin)


class TorchRotary:
    """cos and sin for every position, in the model's dtype."""

    def __init__(self, rope: Rope, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        turns = _turns(rope, head_dim, positions)
        cos, sin = turns.cos(), turns.sin()
        self._cos = torch.cat((cos, cos), -1).unsqueeze(1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), -1).unsqueeze(1).to(device, dtype)

    def __call__(self, positions: Tensor) -> TorchAngles:
        return TorchAngles(self._cos[positions], self._sin[positions])


class FusedAngles(NamedTuple):
    """`turns`: cos and sin of every position, float32 [positions, 2, head_dim / 2]; `positions` [N] of the tokens."""

    turns: Tensor
    positions: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        return turn(x, self.turns[self.positions])


class FusedRotary:
    """cos and sin for every position, side by side for the kernels: half as many, in float32."""

    def __init__(self, rope: Rope, head_dim: int, positions: int) -> None:
        turns = _turns(rope, head_dim, positions)
        self.turns = torch.stack((turns.cos(), turns.sin()), 1)
        """Float32 [positions, 2, head_dim / 2]."""

    def __call__(self, positions: Tensor) -> FusedAngles:
        return FusedAngles(self.turns, positions)


def rotary(rope: Rope, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> Rotary:
    """The fastest one here."""
    if library.serves(dtype, device):
        return FusedRotary(rope, head_dim, positions)
    return TorchRotary(rope, head_dim, positions, dtype, device)


def _turns(rope: Rope, head_dim: int, positions: int) -> Tensor:
    """Radians [positions, head_dim / 2]."""
    return torch.outer(torch.arange(positions, dtype=torch.float32), frequencies(rope, head_dim))


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position [head_dim / 2], scaled as the checkpoint says."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return plain


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1: waves longer than the original context are slowed by `factor`, short ones kept, between blended."""
    waves = rope.original_max_position * plain / (2 * math.pi)
    kept = ((waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / rope.factor
