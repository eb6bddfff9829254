"""What attention kernels are launched with: shapes of layers, and how a step's rows become tiles. Without Triton."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..step_batch import StepBatch, to_device
from .runtime import LARGEST_CODES, capability

LEAST_PART, MOST_PARTS = 256, 16
"""The fewest tokens of a part of the context, and the most parts."""

DECODE_PLACES = (1, 2, 4, 8)
"""Sizes of decoding tiles: a row with more places is a chunk."""


class CacheShape(NamedTuple):
    """The sizes of one layer's `LayerCache`. `codes`: the dtype of its codes, int8 or fp8; None: it has no codes."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    codes: torch.dtype | None = None

    @property
    def largest_code(self) -> float:
        """0 without codes."""
        return 0.0 if self.codes is None else LARGEST_CODES[self.codes]


class LayerCache(NamedTuple):
    """Keys and values, each [blocks, kv_heads, block_size, head_dim], contiguous."""

    keys: Tensor
    values: Tensor
    scales: Tensor | None = None
    """For codes, the number that the largest code stands for in each line, float32 [blocks, kv_heads, block_size, keys
    and values]."""

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of kernels, which without codes read no scales."""
        return self.keys, self.values, self.keys if self.scales is None else self.scales


class AttentionSpec(NamedTuple):
    """The attention of one layer: see `LayerAttention`. The scale is explicit."""

    shape: CacheShape
    scale: float
    window: int = 0
    softcap: float = 0.0
    both_ways: bool = False

    @property
    def group(self) -> int:
        return self.shape.heads // self.shape.kv_heads

    @property
    def most_decoded(self) -> int:
        return max(places for places in DECODE_PLACES if self.decode_places(places))

    def decode_places(self, most: int) -> int:
        """The places of the decoding tile for rows of `most` places; 0 where such rows are chunks."""
        queries = 64 if self.shape.head_dim <= 256 else 32  # as many as fit in registers with their mix
        enough = (places for places in DECODE_PLACES if places >= most)
        fits = [places for places in enough if places == 1 or places * self.group <= queries]
        return fits[0] if fits else 0


SHAPES = (
    CacheShape(32, 8, 128, 16),  # Llama 3.1 8B, Mistral, Qwen 3 8B
    CacheShape(14, 2, 64, 16),  # Qwen 2.5 0.5B
    CacheShape(28, 4, 128, 16),  # Qwen 2.5 7B
    CacheShape(16, 8, 256, 16),  # Gemma 2 9B
    CacheShape(32, 32, 96, 16),  # Phi 3 mini
    CacheShape(8, 1, 128, 16),  # Llama 3.1 70B on eight ranks
    CacheShape(32, 4, 512, 16),  # Gemma 4 31B, layers that see all
    CacheShape(64, 8, 64, 16),  # gpt-oss
)
"""Shapes of published models, for proofs."""
CODED_SHAPES = tuple(shape._replace(codes=codes) for shape in SHAPES for codes in LARGEST_CODES)


class StepTiles(NamedTuple):
    """A step's rows as the kernels of one attention take them."""

    places: int
    """The places of a decoding tile; 0: no row decodes."""
    parts: int
    """The most parts of a decoding row's context."""
    chunks: Tensor | None
    """The tiles of chunks, int32 [T, row and offset]."""
    decoded: int
    """Places of all decoding rows."""
    first_states: Tensor | None = None
    """Decoding places before each row, int32 [R]; None: no row is a chunk, so these are all places before it."""


def plan_tiles(spec: AttentionSpec, batch: StepBatch) -> StepTiles:
    """The tiles of a step, from numbers that the host has."""
    counts = batch.counts
    few = counts[counts <= spec.most_decoded]
    places = spec.decode_places(int(few.max())) if few.any() else 0
    parts = min(-(-batch.longest // LEAST_PART), MOST_PARTS)
    device = batch.token_ids.device
    chunks = _chunk_tiles(spec, (counts > places) | _sees_ahead(spec, batch), counts, device)
    if chunks is None or not places or parts == 1:
        return StepTiles(places, parts, chunks, batch.size)
    decoding = np.where(counts <= places, counts, 0)
    first_states = to_device((np.cumsum(decoding) - decoding).astype(np.int32), device)
    return StepTiles(places, parts, chunks, int(decoding.sum()), first_states)


def _sees_ahead(spec: AttentionSpec, batch: StepBatch) -> NDArray[np.bool_]:
    """[R] whether a place of the row sees some behind itself."""
    moved = batch.moved
    if not spec.both_ways or moved is None or moved.ends is None:
        return np.zeros(len(batch.rows), np.bool_)
    own = np.repeat(batch.starts - batch.first_places, batch.counts) + np.arange(1, batch.size + 1)
    sees: NDArray[np.bool_] = np.logical_or.reduceat(moved.ends > own, batch.first_places)
    return sees


def _chunk_tiles(
    spec: AttentionSpec, wanted: NDArray[np.bool_], counts: NDArray[np.int32], device: torch.device
) -> Tensor | None:
    """The tiles of the rows that are `wanted`: of those with more places than the decoding kernel takes, and of those
    for which it computes something else."""
    left = np.flatnonzero(wanted)
    if not len(left):
        return None
    tokens = chunk_plan(spec, capability(device))["M"] // spec.group
    numbers = -(-counts[left] // tokens)
    offsets = (np.arange(numbers.sum()) - np.repeat(np.cumsum(numbers) - numbers, numbers)) * tokens
    return to_device(np.stack((np.repeat(left, numbers), offsets), 1).astype(np.int32), device)


def _sizes(spec: AttentionSpec, sinks: bool) -> dict[str, Any]:
    shape = spec.shape
    cache = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "HEAD_DIM": shape.head_dim}
    kind = {"LARGEST_CODE": shape.largest_code, "WINDOW": spec.window, "CAPPED": spec.softcap > 0, "SINKS": sinks}
    return cache | kind | {"BLOCK_SIZE": shape.block_size, "DIMS": max(next_power_of_2(shape.head_dim), 16)}


def decode_plan(spec: AttentionSpec, places: int, sinks: bool = False) -> dict[str, Any]:
    """Tensor cores need sixteen queries or more. Keys are as many as leave room for two tiles in flight, or four of
    codes."""
    queries = max(next_power_of_2(places * spec.group), 16)
    cut = {"PLACES": places, "LEAST": LEAST_PART, "MOST": MOST_PARTS, "M": queries, "TILE": _tile_tokens(spec)}
    stages = 3 if spec.shape.codes is None else 5
    warps = 4 if queries <= 32 else 8
    if spec.shape.head_dim > 256:
        warps = 8 if queries == 16 else 16
    return _sizes(spec, sinks) | cut | {"num_warps": warps, "num_stages": stages}


def combine_plan(spec: AttentionSpec, places: int) -> dict[str, Any]:
    plan = decode_plan(spec, places)
    names = ("HEADS", "HEAD_DIM", "WINDOW", "PLACES", "LEAST", "MOST", "TILE", "DIMS", "num_warps")
    return {name: plan[name] for name in names}


def chunk_plan(spec: AttentionSpec, generation: int, sinks: bool = False, spans: bool = False) -> dict[str, Any]:
    """The largest tile that spills no register; an A100 has room for fewer queries than later GPUs."""
    size = spec.shape.head_dim
    queries = 128 if 64 < size <= 128 and generation >= 90 else 64 if size <= 256 else 32
    tile = {"SPANS": spans, "M": max(queries, next_power_of_2(spec.group)), "TILE": _tile_tokens(spec)}
    return _sizes(spec, sinks) | tile | {"num_warps": 4 if size <= 64 else 8, "num_stages": 2}


def _tile_tokens(spec: AttentionSpec) -> int:
    """Tokens whose keys and values are read at a time."""
    size = spec.shape.head_dim
    return 64 if size <= 128 else 32 if size <= 256 else 16


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
