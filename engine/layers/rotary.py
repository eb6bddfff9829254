"""Rotary position embedding (arXiv 2104.09864), halves turned against each other, of whole heads or of their beginning;
linear and Llama 3's scaling, yarn (arXiv 2309.00071) and longrope (arXiv 2402.13753)."""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..checkpoint.model_spec import RopeSpec
from ..cpu import library
from ..cpu.elementwise import apply_rope


class RotaryAngles(Protocol):
    """How far each token of a step is turned."""

    def rotate(self, x: Tensor) -> Tensor:
        """x [N, heads, head_dim], turned by each token's position."""


class Rotary(Protocol):
    """Knows every position the model can have."""

    def __call__(self, positions: Tensor) -> RotaryAngles: ...


class TorchAngles(NamedTuple):
    """cos and sin [N, 1, rotary_dim] of each token's position; sin's first half is negated."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        size = self.cos.shape[-1]
        part = x[..., :size]
        turned = torch.mul(part, self.cos).addcmul_(part.roll(size // 2, -1), self.sin)
        return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), -1)


class TorchRotary:
    """cos and sin for every position, in the model's dtype."""

    def __init__(self, rope: RopeSpec, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        cos, sin = _cos_sin(rope, head_dim, positions)
        self._cos = torch.cat((cos, cos), -1).unsqueeze(1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), -1).unsqueeze(1).to(device, dtype)

    def __call__(self, positions: Tensor) -> TorchAngles:
        return TorchAngles(self._cos[positions], self._sin[positions])


class FusedAngles(NamedTuple):
    """`turns`: cos and sin of every position, float32 [positions, 2, rotary_dim / 2]; `positions` [N] of the tokens."""

    cos_sin: Tensor
    positions: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        size, turns = 2 * self.cos_sin.shape[-1], self.cos_sin[self.positions]
        if size == x.shape[-1]:
            return apply_rope(x, turns)
        return torch.cat((apply_rope(x[..., :size].contiguous(), turns), x[..., size:]), -1)


class FusedRotary:
    """cos and sin for every position, side by side for the kernels: half as many, in float32."""

    def __init__(self, rope: RopeSpec, head_dim: int, positions: int) -> None:
        self.cos_sin = torch.stack(_cos_sin(rope, head_dim, positions), 1)
        """Float32 [positions, 2, rotary_dim / 2]."""

    def __call__(self, positions: Tensor) -> FusedAngles:
        return FusedAngles(self.cos_sin, positions)


def build_rotary(rope: RopeSpec, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> Rotary:
    """The fastest one here."""
    if library.supports(dtype, device):
        return FusedRotary(rope, head_dim, positions)
    return TorchRotary(rope, head_dim, positions, dtype, device)


def _cos_sin(rope: RopeSpec, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, rotary_dim / 2]."""
    radians = torch.outer(torch.arange(positions, dtype=torch.float32), rope_frequencies(rope, head_dim, positions))
    return radians.cos() * rope.attention_factor, radians.sin() * rope.attention_factor


def rope_frequencies(rope: RopeSpec, head_dim: int, positions: int) -> Tensor:
    """Radians per position [rotary_dim / 2], scaled as the checkpoint says.

    Longrope has two sets of them. Which one is taken follows from `positions`, the most that a sequence may have, and
    not from a sequence's own length: then keys that are cached stay what they are while a text grows.
    """
    size = rope.rotary_dim(head_dim)
    plain = 1.0 / rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _scale_llama3(plain, rope)
    if rope.kind == "yarn":
        return _scale_yarn(plain, rope, size)
    if rope.kind == "longrope":
        return plain / torch.tensor(rope.long_factor if positions > rope.original_max_position else rope.short_factor)
    return plain


def _scale_llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    """Llama 3.1: waves longer than the original context are slowed by `factor`, short ones kept, between blended."""
    waves = rope.original_max_position * plain / (2 * math.pi)
    kept = ((waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / rope.factor


def _scale_yarn(plain: Tensor, rope: RopeSpec, size: int) -> Tensor:
    """What turns more than `beta_fast` times within the original context is kept, what turns less than `beta_slow`
    times is slowed by `factor`, between blended pair by pair."""
    low, high = (_pair_of_turns(turns, rope, size) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    slowed = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    return plain / rope.factor * slowed + plain * (1 - slowed)


def _pair_of_turns(turns: float, rope: RopeSpec, size: int) -> float:
    """Number of the pair that turns so often within the original context; not a whole one."""
    return size * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
