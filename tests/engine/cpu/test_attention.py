"""The attention kernels at every level: against float64, and the same bits whatever shares the step."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from charonia.engine.attention.backend import CacheSpec
from charonia.engine.attention.native import NativeAttention
from charonia.engine.checkpoint.model_spec import KeyValueShape, LayerAttention
from charonia.engine.layers.rotary import FusedAngles
from charonia.engine.step_batch import StepBatch, StepPositions

CPU = torch.device("cpu")
CAPPED, WINDOWED = LayerAttention(None, 0.3, 2.0), LayerAttention(70, 0.2, sinks=True)
KINDS = ((torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.float32, "int8"), (torch.bfloat16, "int8"))
TOLERANCE = {(torch.float32, "auto"): 2e-5, (torch.bfloat16, "auto"): 1.6e-2}


def spec(heads: int = 14, kv_heads: int = 2, head_dim: int = 64, **changes: object) -> CacheSpec:
    shape = CacheSpec((LayerAttention(),), heads, kv_heads, head_dim, 16, torch.float32, CPU)
    return shape._replace(**changes)


class Sequence:
    """Queries, keys and values of one sequence, drawn once: `tokens` of them, in one layer."""

    def __init__(self, shape: CacheSpec, tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        kept = shape.shapes[0]
        sizes = (shape.heads, kept.heads, kept.heads)
        self.q, self.k, self.v = (
            torch.randn(tokens, heads, kept.key_size, generator=generator).to(shape.dtype) for heads in sizes
        )
        if kept.values_in_keys:
            self.k[..., kept.value_size :] *= 3  # what is rotated is not normalised
            self.v = self.k[..., : kept.value_size]
        self.blocks: list[int] = []


def sinks(shape: CacheSpec) -> Tensor | None:
    """Of the one layer, if it has any: around the largest scores, and far below and above them."""
    return torch.linspace(-20, 20, shape.heads) if shape.attention[0].sinks else None


class World:
    """A cache, and sequences that are computed in it as a test says."""

    def __init__(self, shape: CacheSpec, blocks: int = 400) -> None:
        self.shape, self.attention = shape, NativeAttention(shape)
        self.attention.allocate(blocks)
        self.free = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()

    def step(
        self,
        parts: list[tuple[Sequence, int, int]],
        turns: Tensor | None = None,
        moved: StepPositions | None = None,
    ) -> list[Tensor]:
        """Compute tokens [start, end) of each sequence together; what comes out of each [n, heads * head_dim]."""
        starts, counts = [start for _, start, _ in parts], [end - start for _, start, end in parts]
        for sequence, _, end in parts:
            while len(sequence.blocks) * self.shape.block_size < end:
                sequence.blocks.append(self.free.pop())
        width = max(len(sequence.blocks) for sequence, _, _ in parts)
        tables = torch.tensor([one.blocks + [0] * (width - len(one.blocks)) for one, _, _ in parts])
        batch = StepBatch.from_tokens(torch.zeros(sum(counts)), starts, counts, tables, self.shape.block_size)
        batch.moved = moved
        attend = self.attention.begin_step(batch)
        q, k, v = (torch.cat([getattr(one, name)[start:end] for one, start, end in parts]) for name in "qkv")
        if turns is None:
            stored = None if self.shape.shapes[0].values_in_keys else v
            return list(attend(0, q, k, stored, sinks(self.shape)).split(counts))
        return list(
            attend.apply_rope_and_attend(0, torch.cat((q, k, v), 1), FusedAngles(turns, batch.positions)).split(counts)
        )


def exact(shape: CacheSpec, sequence: Sequence, images: tuple[range, ...] = ()) -> Tensor:
    """All of it, in float64; places of `images` see one another."""
    view, group = shape.attention[0], shape.heads // shape.shapes[0].heads
    q, k, v = sequence.q.double(), *(x.double().repeat_interleave(group, 1) for x in (sequence.k, sequence.v))
    scores = torch.einsum("nhd,thd->hnt", q, k) * (view.scale or 1 / math.sqrt(q.shape[-1]))
    scores = scores if view.softcap is None else view.softcap * (scores / view.softcap).tanh()
    seen = torch.ones(len(q), len(q), dtype=torch.bool).tril()
    for image in images:
        seen[image.start : image.stop, image.start : image.stop] = True
    seen = seen if view.window is None else seen.triu(1 - view.window)
    scores = scores.masked_fill(~seen, -math.inf)
    if (sunk := sinks(shape)) is not None:
        scores = torch.cat((scores, sunk.double().view(-1, 1, 1).expand(-1, len(q), 1)), -1)
    weights = scores.softmax(-1)[..., : len(q)]
    return torch.einsum("hnt,thd->nhd", weights, v).reshape(len(q), -1)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("view", [LayerAttention(), WINDOWED, CAPPED], ids=["plain", "window and sinks", "cap"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 32), (14, 2, 64), (6, 2, 80), (3, 1, 128), (5, 1, 256), (8, 2, 512)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prefill_and_decode_are_right(
    level: str, view: LayerAttention, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Across the borders of blocks, tiles and splits."""
    shape = spec(heads, kv_heads, head_dim, attention=(view,), dtype=dtype)
    world, sequence = World(shape), Sequence(shape, 290, 3)
    found = torch.cat([world.step([(sequence, *part)])[0] for part in ((0, 37), (37, 280), (280, 289), (289, 290))])
    assert (found.double() - exact(shape, sequence)).abs().max() < TOLERANCE[dtype, "auto"]


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_places_of_an_image_see_one_another(level: str, window: int | None, dtype: torch.dtype) -> None:
    """Across the borders of blocks, tiles and splits, and with the same bits beside another sequence; a prefix may end
    within an image."""
    images = range(9, 40), range(250, 262), range(270, 288)
    shape = spec(14, 2, 64, attention=(LayerAttention(window, both_ways=True),), dtype=dtype)
    world, sequence, other = World(shape), Sequence(shape, 290, 3), Sequence(shape, 30, 4)

    def moved(start: int, end: int, before: int = 0) -> StepPositions:
        ends = [next((image.stop for image in images if at in image), at + 1) for at in range(start, end)]
        return StepPositions(
            np.zeros(1 + bool(before), np.int32), None, np.array([*range(1, before + 1), *ends], np.int32)
        )

    cuts = (0, 9, 41, 250, 265, 290)
    parts = [world.step([(sequence, *part)], moved=moved(*part))[0] for part in itertools.pairwise(cuts)]
    found = torch.cat(parts)
    assert (found.double() - exact(shape, sequence, images)).abs().max() < TOLERANCE[dtype, "auto"]
    beside = world.step([(other, 0, 25), (sequence, 255, 290)], moved=moved(255, 290, before=25))
    assert torch.equal(beside[1], found[255:])
    assert torch.equal(beside[0], World(shape).step([(other, 0, 25)])[0])


LATENT = LayerAttention(None, 0.08, kept=KeyValueShape(1, 80, 64, True))
LARGE_LATENT = LayerAttention(None, 0.04, kept=KeyValueShape(1, 576, 512, True))


@pytest.mark.parametrize(("heads", "view", "tokens"), [(5, LATENT, 290), (30, LARGE_LATENT, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_attend_to_latents(level: str, heads: int, view: LayerAttention, tokens: int, dtype: torch.dtype) -> None:
    """30 heads are more than one piece of work holds."""
    shape = spec(heads, attention=(view,), dtype=dtype)
    world, sequence = World(shape), Sequence(shape, tokens, 3)
    cuts = (0, 37, tokens - 10, tokens - 1, tokens)
    found = torch.cat([world.step([(sequence, *part)])[0] for part in itertools.pairwise(cuts)])
    assert (found.double() - exact(shape, sequence)).abs().max() < TOLERANCE[dtype, "auto"]


def test_latents_are_rotated_behind_their_values(level: str) -> None:
    """As by the layers' own rotation before them, to the bit: in float32 nothing is rounded between."""
    shape = spec(5, attention=(LATENT,))
    turns = torch.stack([torch.linspace(0, 40, 300 * 8).view(300, 8).cos(), torch.linspace(0, 9, 2400).view(300, 8)], 1)
    sequence, rotated = (Sequence(shape, 290, 3) for _ in range(2))
    angles = FusedAngles(turns, torch.arange(290))
    for name in "qk":
        heads = getattr(rotated, name)
        heads[..., 64:] = angles.rotate(heads[..., 64:].contiguous())
    sequence.v = sequence.k[..., :0].reshape(290, 0, 80)
    packed, apart = World(shape), World(shape)
    for part in ((0, 280), (280, 290)):
        assert torch.equal(packed.step([(sequence, *part)], turns)[0], apart.step([(rotated, *part)])[0])


@pytest.mark.parametrize(
    ("block_size", "view"),
    [(16, LATENT), (16, LayerAttention()), (48, LayerAttention()), (16, LayerAttention(sinks=True))],
    ids=str,
)
def test_int8_is_as_good_as_eight_bits_are(level: str, block_size: int, view: LayerAttention) -> None:
    """A byte a number is off by 1/254 of the largest in its head, at most; typically a tenth of that remains."""
    shape = spec(kv_cache_dtype="int8", block_size=block_size, attention=(view,))
    world, sequence = World(shape), Sequence(shape, 290, 3)
    found = torch.cat([world.step([(sequence, *part)])[0] for part in ((0, 200), (200, 289), (289, 290))])
    off = (found.double() - exact(shape, sequence)).abs()
    assert off.max() < 0.05
    assert off.mean() < 0.004


def test_int8_takes_half_of_what_bfloat16_does_and_the_scales(level: str) -> None:
    full, half = (NativeAttention(spec(dtype=torch.bfloat16, kv_cache_dtype=stored)) for stored in ("auto", "int8"))
    assert half.block_bytes - full.block_bytes // 2 == 2 * 16 * 4 * 2
    full, half = (
        NativeAttention(spec(attention=(LATENT,), dtype=torch.bfloat16, kv_cache_dtype=stored))
        for stored in ("auto", "int8")
    )
    assert full.block_bytes == 16 * 80 * 2
    assert half.block_bytes == 16 * (80 + 2 * 4)


@pytest.mark.parametrize(("dtype", "stored"), KINDS, ids=str)
@pytest.mark.parametrize("view", [LayerAttention(), WINDOWED, LATENT], ids=["plain", "window and sinks", "latents"])
def test_the_same_bits_whatever_shares_the_step(
    level: str, dtype: torch.dtype, stored: str, view: LayerAttention
) -> None:
    """Alone and whole; in chunks; token by token at the end; among others; on one thread."""
    shape = spec(attention=(view,), dtype=dtype, kv_cache_dtype=stored)
    sequence, others = Sequence(shape, 600, 5), [Sequence(shape, 300, seed) for seed in range(4)]
    whole = World(shape).step([(sequence, 0, 600)])[0]

    def same(world: World, cuts: list[int], company: list[Sequence]) -> None:
        for one in (sequence, *company):
            one.blocks = []
        for start, end in itertools.pairwise(cuts):
            parts = [(other, 0, 60 + 20 * number) for number, other in enumerate(company)]
            found = world.step([*parts[:2], (sequence, start, end), *parts[2:]])[len(parts[:2])]
            assert torch.equal(found, whole[start:end])

    same(World(shape), [0, 1, 5, 270, 511, 512, 513, 599, 600], [])
    same(World(shape), [0, 256, 300, 301, 599, 600], others)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        same(World(shape), [0, 600], [])
        torch.set_num_threads(3)
        same(World(shape), [0, 550, 600], others[:1])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_turning_on_the_way_is_turning_before(level: str, dtype: torch.dtype) -> None:
    """Fused and not: the same but for the rounding of what was turned, which the fused one keeps in float32."""
    shape = spec(dtype=dtype)
    sequence, angles = Sequence(shape, 40, 7), torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    turns = torch.stack((angles.cos(), angles.sin()), 1)
    fused = World(shape).step([(sequence, 0, 40)], turns)[0]
    sequence.blocks = []
    sequence.q, sequence.k = (FusedAngles(turns, torch.arange(40)).rotate(x) for x in (sequence.q, sequence.k))
    apart = World(shape).step([(sequence, 0, 40)])[0]
    assert (fused.double() - apart.double()).abs().max() < TOLERANCE[dtype, "auto"]


def test_what_an_earlier_sequence_left_is_not_seen(level: str) -> None:
    """Not even NaN, which a weight of 0 does not silence."""
    shape = spec()
    world, broken, sequence = World(shape, blocks=2), Sequence(shape, 32, 1), Sequence(shape, 20, 2)
    for tensor in (broken.q, broken.k, broken.v):
        tensor.fill_(math.nan)
    assert world.step([(broken, 0, 32)])[0].isnan().all()
    sequence.blocks = broken.blocks
    found = torch.cat([world.step([(sequence, *part)])[0] for part in ((0, 18), (18, 19), (19, 20))])
    assert (found.double() - exact(shape, sequence)).abs().max() < TOLERANCE[torch.float32, "auto"]
