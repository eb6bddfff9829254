"""What attention kernels are launched with: shapes of layers, and how a step's rows become tiles. Without Triton."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..step_batch import StepBatch, to_device
from .row_tiles import lay_recorded_tiles, lay_tiles
from .runtime import LARGEST_CODES, capability

PART_TOKENS = 256
"""Tokens of a part of the context: by its parts, from position 0 on, a row's sums are ordered."""

_ENOUGH_PROGRAMS = 512
"""Programs that occupy a device; to be measured."""
_LONG_RUN = 32
"""Parts that a program of many takes one after the other."""
_STATE_BYTES = 128 << 20
"""The most memory for states of parts, of one layer's attention."""

DECODE_PLACES = (1, 2, 4, 8)
"""Sizes of decoding tiles: a row with more places is a chunk."""


class CacheShape(NamedTuple):
    """The sizes of one layer's `LayerCache`. `codes`: the dtype of its codes, int8 or fp8; None: it has no codes.
    `block_lines` and `scale_lines`: from a block of keys, or of scales, to the next; 0: as many as a block has."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    codes: torch.dtype | None = None
    block_lines: int = 0
    scale_lines: int = 0

    @property
    def largest_code(self) -> float:
        """0 without codes."""
        return 0.0 if self.codes is None else LARGEST_CODES[self.codes]

    @property
    def blocks(self) -> dict[str, int]:
        """Where kernels find the lines of a block."""
        lines = self.kv_heads * self.block_size
        apart = {"BLOCK_LINES": self.block_lines or lines, "SCALE_LINES": self.scale_lines or lines}
        return apart | {"BLOCK_SIZE": self.block_size}


class LayerCache(NamedTuple):
    """Keys and values, each [blocks, numbers], of which a block's first are [kv_heads, block_size, head_dim]; behind
    them may be those of other layers."""

    keys: Tensor
    values: Tensor
    scales: Tensor | None = None
    """For codes, the number that the largest code stands for in each line, float32 [blocks, lines, keys and values],
    in the same way."""

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
    """The tiles of chunks, int32 [T, row and offset]; of a recorded step followed by some of row -1, for nobody."""
    decoded: Tensor | None = None
    """int32 [R] the places of each row that decodes, 0 of others; None: those of `DeviceBatch`."""


class ChunkTile(NamedTuple):
    """`lines`: query heads of tokens that a program of so many warps has."""

    lines: int
    warps: int


class PartsPlan(NamedTuple):
    """How programs share out the parts of decoding rows. It changes no sum and no order of sums."""

    run: int
    """Parts that a program takes of a row with more; it takes all of a row with fewer."""
    programs: int
    """Programs of a row and key head."""
    states: int
    """States, one for each place and part, that there is room for; rows without room are a program's whole."""


def plan_parts(spec: AttentionSpec, rows: int, tiles: StepTiles) -> PartsPlan:
    """Few rows: a program for each part. Many: one walks through all parts of a context that is not long."""
    shape = spec.shape
    run = _LONG_RUN if rows * shape.kv_heads >= _ENOUGH_PROGRAMS else 1
    if tiles.parts <= run:
        return PartsPlan(run, 1, 0)
    room = _STATE_BYTES // (4 * shape.heads * (shape.head_dim + 2))
    return PartsPlan(run, -(-tiles.parts // run), min(rows * tiles.places * tiles.parts, room))


def plan_tiles(spec: AttentionSpec, batch: StepBatch) -> StepTiles:
    """The tiles of a step, from numbers that the host has."""
    apart = _ends_apart(spec, batch)
    counts = batch.counts if apart is None else batch.counts * ~apart
    few = counts[counts <= spec.most_decoded]
    places = spec.decode_places(int(few.max())) if few.any() else 0
    if batch.on_device.prompts:
        chunks: Tensor | None = _plan_recorded_chunks(spec, batch, places)
    else:
        chunks = _plan_chunks(spec, batch, places, apart)
    decoded = None if apart is None or not places else to_device(counts, batch.token_ids.device)
    return StepTiles(places, most_parts(spec, batch.longest), chunks, decoded)


def most_parts(spec: AttentionSpec, longest: int) -> int:
    """The most parts that a decoding row of up to `longest` tokens sees."""
    parts = -(-longest // PART_TOKENS)
    return min(parts, -(-(spec.window + spec.most_decoded) // PART_TOKENS) + 1) if spec.window else parts


def _plan_chunks(
    spec: AttentionSpec, batch: StepBatch, places: int, apart: NDArray[np.bool_] | None = None
) -> Tensor | None:
    """The tiles of the rows with more than `places` places, and of those `apart`."""
    left = np.flatnonzero(batch.counts > (places if apart is None else np.where(apart, 0, places)))
    if not len(left):
        return None
    device = batch.token_ids.device
    return lay_tiles(left, batch.counts[left], _tokens_of_chunks(spec, device), device)


def _plan_recorded_chunks(spec: AttentionSpec, batch: StepBatch, places: int) -> Tensor:
    """The same of numbers that the device alone has; as many as there may be. Places see none behind themselves."""
    counts = batch.on_device.counts
    tokens = _tokens_of_chunks(spec, counts.device)
    lengths = torch.where(counts > places, counts, 0)
    return lay_recorded_tiles(lengths, tokens, batch.size, batch.size // (places + 1))


def _tokens_of_chunks(spec: AttentionSpec, device: torch.device) -> int:
    """Tokens of a chunk's tile."""
    lines: int = chunk_plan(spec, capability(device))["M"]
    return lines // spec.group


def _ends_apart(spec: AttentionSpec, batch: StepBatch) -> NDArray[np.bool_] | None:
    """[R] whether a place of the row sees some behind itself, or not all before: only chunks are told what each sees.
    None: no row has any."""
    moved = batch.moved
    if not spec.both_ways or moved is None or moved.ends is None:
        return None
    own = np.repeat(batch.starts - batch.first_places, batch.counts) + np.arange(1, batch.size + 1)
    apart: NDArray[np.bool_] = np.logical_or.reduceat(moved.ends != own, batch.first_places)
    return apart if apart.any() else None


def _sizes(spec: AttentionSpec, sinks: bool) -> dict[str, Any]:
    shape = spec.shape
    cache = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "HEAD_DIM": shape.head_dim}
    kind = {"LARGEST_CODE": shape.largest_code, "WINDOW": spec.window, "CAPPED": spec.softcap > 0, "SINKS": sinks}
    return cache | kind | shape.blocks | {"DIMS": max(next_power_of_2(shape.head_dim), 16)}


def decode_plan(spec: AttentionSpec, places: int, sinks: bool = False) -> dict[str, Any]:
    """Tensor cores need sixteen queries; more than fit in registers with two states are several programs'. Keys are as
    many as leave room for two tiles in flight, or four of codes."""
    most = 32 if spec.shape.head_dim <= 256 else 16
    queries = min(max(next_power_of_2(places * spec.group), 16), most)
    cut = {"PLACES": places, "PART": PART_TOKENS, "M": queries, "TILE": _tile_tokens(spec)}
    stages = 3 if spec.shape.codes is None else 5
    warps = 8 if queries == 32 or spec.shape.head_dim > 256 or spec.shape.codes is not None else 4
    launch = {"num_warps": warps, "num_stages": stages}
    if spec.shape.head_dim > 256 and spec.shape.codes is None:
        launch["maxnreg"] = 224  # else Hopper's assembler would rather spill than use more than 128
    return _sizes(spec, sinks) | cut | launch


def combine_plan(spec: AttentionSpec, places: int, sinks: bool = False) -> dict[str, Any]:
    """A warp holds 256 numbers of a state, and more parts' are on their way."""
    plan = decode_plan(spec, places, sinks)
    names = ("HEADS", "HEAD_DIM", "LARGEST_CODE", "WINDOW", "SINKS", "PLACES", "PART", "DIMS")
    kept = {name: plan[name] for name in names}
    return kept | {"STAGES": 4, "num_warps": max(plan["DIMS"] // 256, 1)}


CHUNK_TILES: dict[int, tuple[tuple[int, ChunkTile, ChunkTile], ...]] = {
    80: ((64, ChunkTile(64, 8), ChunkTile(32, 8)), (512, ChunkTile(32, 8), ChunkTile(32, 8))),
    90: (
        (64, ChunkTile(64, 4), ChunkTile(64, 8)),
        (128, ChunkTile(64, 4), ChunkTile(64, 8)),
        (256, ChunkTile(64, 8), ChunkTile(32, 8)),
        (512, ChunkTile(32, 8), ChunkTile(32, 8)),
    ),
    100: (
        (64, ChunkTile(64, 8), ChunkTile(64, 8)),
        (128, ChunkTile(64, 8), ChunkTile(64, 8)),
        (256, ChunkTile(32, 8), ChunkTile(32, 8)),
        (512, ChunkTile(16, 8), ChunkTile(16, 8)),
    ),
}
"""By the least capability, and the largest head: a chunk's tiles, and those over codes, which take registers until they
are multiplied, as Blackwell's sums do, which are read back for each tile. None spills a register. On Hopper four
warps took four fifths of what eight did (docs/performance.md): two programs compute weights and products in turn."""


def chunk_plan(spec: AttentionSpec, generation: int, sinks: bool = False, spans: bool = False) -> dict[str, Any]:
    """The tile that `CHUNK_TILES` has for a device of this capability."""
    device = max(least for least in CHUNK_TILES if least <= max(generation, 80))
    plain, coded = next(tiles for most, *tiles in CHUNK_TILES[device] if spec.shape.head_dim <= most)
    chosen = plain if spec.shape.codes is None else coded
    lines = max(chosen.lines, next_power_of_2(spec.group))
    tile = {"SPANS": spans, "PART": PART_TOKENS, "M": lines, "TILE": _tile_tokens(spec)}
    return _sizes(spec, sinks) | tile | {"num_warps": chosen.warps, "num_stages": 2}


def _tile_tokens(spec: AttentionSpec) -> int:
    """Tokens whose keys and values are read at a time, by whichever kernel: they divide PART_TOKENS."""
    size = spec.shape.head_dim
    return 64 if size <= 128 else 32 if size <= 256 else 16


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
