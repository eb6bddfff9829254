"""Rotary position embedding (arXiv 2104.09864) of whole heads or of their first numbers, with the scalings of
config.json: linear, llama3, yarn (arXiv 2309.00071) and longrope (arXiv 2402.13753); proportional, which turns some of
the pairs of whole heads."""

import math
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..checkpoint.model_spec import NO_ROPE, RopeSpec
from ..cpu import library
from ..cpu.elementwise import apply_rope
from ..step_batch import StepBatch

_PIECE = 1 << 13
"""Positions of a table that are computed at a time."""

_COVERED_FIRST = 1 << 15
"""Positions of a table that are computed before the first step."""


class TorchAngles(NamedTuple):
    """cos and sin [N, 1, rotary_dim] of each token's position; the first half of sin is negated."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        size = self.cos.shape[-1]
        part = x[..., :size]
        rotated = torch.mul(part, self.cos).addcmul_(part.roll(size // 2, -1), self.sin)
        return rotated if size == x.shape[-1] else torch.cat((rotated, x[..., size:]), -1)


class TorchRotary:
    """Tables of cos and sin for every position, in the model's dtype."""

    untraceable: str | None = "its heads are rotated by torch"

    def __init__(self, rope: RopeSpec, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        frequencies = _frequencies(rope, head_dim, positions)
        self._axes = torch.tensor(2 * pair_axes(rope, len(frequencies)), device=device)
        shape = positions, 1, 2 * len(frequencies)
        self._cos, self._sin = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        for first in range(0, positions, _PIECE):
            cos, sin = _cos_sin(frequencies, rope.attention_factor, first, min(first + _PIECE, positions))
            self._cos[first : first + _PIECE, 0] = torch.cat((cos, cos), -1).to(device)
            self._sin[first : first + _PIECE, 0] = torch.cat((-sin, sin), -1).to(device)

    def __call__(self, positions: Tensor) -> TorchAngles:
        if positions.dim() == 1:
            return TorchAngles(self._cos[positions], self._sin[positions])
        lines = positions[self._axes].T
        columns = torch.arange(len(self._axes), device=lines.device)
        return TorchAngles(*(table[lines, 0, columns].unsqueeze(1).contiguous() for table in (self._cos, self._sin)))


class FusedAngles(NamedTuple):
    """The table of a `FusedRotary`, float32 [lines, 2, rotary_dim / 2], and the tokens' `lines` [N] in it."""

    cos_sin: Tensor
    lines: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        size = 2 * self.cos_sin.shape[-1]
        cos_sin = self.cos_sin[self.lines]
        if size == x.shape[-1]:
            return apply_rope(x, cos_sin)
        return torch.cat((apply_rope(x[..., :size].contiguous(), cos_sin), x[..., size:]), -1)


class FusedRotary:
    """A table of cos and sin side by side for the C kernels, in float32. It has its place in memory for every position,
    and takes what is `covered` by the longest sequence that was served."""

    untraceable: str | None = None

    def __init__(self, rope: RopeSpec, head_dim: int, positions: int) -> None:
        self._frequencies = _frequencies(rope, head_dim, positions)
        self._axes = torch.tensor(pair_axes(rope, len(self._frequencies)))
        self._factor = rope.attention_factor
        self.cos_sin = torch.empty(positions, 2, len(self._frequencies))
        """Float32 [positions, 2, rotary_dim / 2]."""
        self.covered = 0
        self.cover(_COVERED_FIRST)

    def cover(self, positions: int) -> None:
        """Compute the table up to so many positions, or all there are."""
        while self.covered < min(positions, len(self.cos_sin)):
            first = self.covered
            end = min(self.covered + _PIECE, len(self.cos_sin))
            torch.stack(_cos_sin(self._frequencies, self._factor, first, end), 1, out=self.cos_sin[first:end])
            self.covered = end

    def __call__(self, positions: Tensor) -> FusedAngles:
        if self.covered < len(self.cos_sin) and positions.numel():
            self.cover(int(positions.max()) + 1)
        if positions.dim() == 1:
            return FusedAngles(self.cos_sin, positions)
        return FusedAngles(self._lines_of(positions), torch.arange(positions.shape[1]))

    def step_table(self, batch: StepBatch) -> Tensor | None:
        """A table of the step's tokens alone, where places are of a grid; None: they are lines of `cos_sin`, which has
        them now."""
        if self.covered < len(self.cos_sin) and batch.size:
            self.cover(int(batch.rotary_positions.max()) + 1)
        return None if batch.moved is None or batch.moved.grid is None else self._lines_of(batch.rotary_positions)

    def _lines_of(self, positions: Tensor) -> Tensor:
        """The lines of places at `positions` [3, N], each put together of those of its three."""
        lines = positions[self._axes].T.unsqueeze(1)
        return self.cos_sin[lines, torch.arange(2).unsqueeze(1), torch.arange(len(self._axes))].contiguous()


RotaryAngles: TypeAlias = TorchAngles | FusedAngles
"""The rotation of each of a step's N tokens: `rotate` turns x [N, heads, head_dim] by their positions, in x's dtype."""

Rotary: TypeAlias = TorchRotary | FusedRotary
"""One rotary embedding of a model, for every position it can have; layers share it. Called with `positions` [N]."""


def build_rotary(rope: RopeSpec, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> Rotary:
    """The fastest implementation for `dtype` on `device`, for positions from 0 up to `positions`."""
    if library.supports(dtype, device):
        return FusedRotary(rope, head_dim, positions)
    return TorchRotary(rope, head_dim, positions, dtype, device)


def pair_axes(rope: RopeSpec, pairs: int) -> list[int]:
    """By which of a place's positions each of its pairs is rotated: 0 is time, 1 height, 2 width."""
    if not rope.sections:
        return [0] * pairs
    if rope.interleaved:
        return [pair % 3 if pair < 3 * rope.sections[pair % 3] else 0 for pair in range(pairs)]
    return [axis for axis, section in enumerate(rope.sections) for _ in range(section)]


def _cos_sin(frequencies: Tensor, factor: float, first: int, end: int) -> tuple[Tensor, Tensor]:
    """cos and sin of positions from `first` up to `end`, each [positions, rotary_dim / 2]."""
    radians = torch.outer(torch.arange(first, end, dtype=torch.float32), frequencies)
    return radians.cos() * factor, radians.sin() * factor


def _frequencies(rope: RopeSpec, head_dim: int, positions: int) -> Tensor:
    """Radians per position [rotary_dim / 2], scaled as the checkpoint says. Longrope has two sets of them. `positions`,
    the most that a sequence may have, decides between them, and not the length of a sequence: cached keys stay valid
    while the sequence grows."""
    size = rope.rotary_dim(head_dim)
    if rope.kind == "proportional":
        turned = int(rope.partial_rotary_factor * head_dim // 2)
        slow = rope.theta ** -(torch.arange(0, 2 * turned, 2, dtype=torch.float32) / head_dim) / rope.factor
        return torch.cat((slow, torch.zeros(head_dim // 2 - turned)))
    plain = 1.0 / rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if rope.kind == NO_ROPE:
        return torch.zeros_like(plain)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        # Waves longer than the original context are slowed by `factor`, short ones kept, those between blended.
        waves = rope.original_max_position * plain / (2 * math.pi)
        kept = ((waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return kept * plain + (1 - kept) * plain / rope.factor
    if rope.kind == "yarn":
        return _scale_yarn(plain, rope, size)
    if rope.kind == "longrope":
        return plain / torch.tensor(rope.long_factor if positions > rope.original_max_position else rope.short_factor)
    return plain


def _scale_yarn(plain: Tensor, rope: RopeSpec, size: int) -> Tensor:
    """Frequencies of more than `beta_fast` turns within the original context are kept, those of less than `beta_slow`
    turns divided by `factor`, those between blended pair by pair."""

    def pair_with(turns: float) -> float:
        """The number, with a fraction, of the pair that makes so many turns within the original context."""
        return size * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = pair_with(rope.beta_fast)
    high = pair_with(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, size - 1)
    slowed = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    return plain / rope.factor * slowed + plain * (1 - slowed)
