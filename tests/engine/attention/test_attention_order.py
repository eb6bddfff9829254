"""A query's attention has the same bits whatever shares its step and whoever computes it: on the interpreter, with sums
as a GPU takes them."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from charonia.engine.attention.backend import CacheSpec
from charonia.engine.attention.triton_attention import TritonAttention
from charonia.engine.checkpoint.model_spec import LayerAttention
from charonia.engine.gpu import attention_plan
from charonia.engine.gpu.attention_plan import (
    PART_TOKENS,
    SHAPES,
    AttentionSpec,
    CacheShape,
    StepTiles,
    plan_parts,
    plan_tiles,
)
from charonia.engine.step_batch import DeviceBatch, StepBatch

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE, BLOCK = 3, 1, 16, 16
LENGTHS = (76, 40, 6)
PART, TILE = 32, 16
"""In place of 256 and 64."""
LONG, MIDDLE, SHORT = range(3)


class Rows(NamedTuple):
    """Tokens of one row in a step."""

    line: int
    first: int
    count: int


class Contexts:
    """Sequences of LENGTHS, whose keys and values are in the cache, and each token's query."""

    def __init__(self, attention: LayerAttention, kept: str) -> None:
        spec = CacheSpec((attention,), HEADS, KV_HEADS, SIZE, BLOCK, torch.float16, CPU, kept)
        self.backend = TritonAttention(spec)
        blocks = [-(-length // BLOCK) for length in LENGTHS]
        self.backend.allocate(sum(blocks))
        self.tables = torch.zeros(len(LENGTHS), max(blocks), dtype=torch.int64)
        order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(3))
        for line, own in enumerate(order.split(blocks)):
            self.tables[line, : len(own)] = own
        generator = torch.Generator().manual_seed(1)
        self.tokens = [
            torch.randn(length, HEADS + 2 * KV_HEADS, SIZE, generator=generator).half() for length in LENGTHS
        ]
        self.sinks = torch.randn(HEADS, generator=generator) if attention.sinks else None
        self.attend([Rows(line, 0, length) for line, length in enumerate(LENGTHS)])

    def attend(self, rows: list[Rows]) -> list[Tensor]:
        """What each row's tokens get, [count, heads * size]; their keys and values are written once more."""
        lines, firsts, counts = zip(*rows, strict=True)
        batch = StepBatch(lines, firsts, counts, torch.zeros(len(LENGTHS), 1), self.tables, BLOCK)
        packed = torch.cat([self.tokens[line][first : first + count] for line, first, count in rows])
        q, k, v = (part.contiguous() for part in packed.split([HEADS, KV_HEADS, KV_HEADS], 1))
        return list(self.backend.begin_step(batch)(0, q, k, v, self.sinks).split(list(counts)))


ATTENTION = [
    (LayerAttention(None, 0.3, 1.5, sinks=True), "auto"),
    pytest.param(LayerAttention(), "auto", marks=pytest.mark.proof),
    pytest.param(LayerAttention(40, sinks=True), "int8", marks=pytest.mark.proof),
    pytest.param(LayerAttention(20, 0.3, 1.5), "fp8", marks=pytest.mark.proof),
]


@pytest.mark.usefixtures("interpreted", "sums_of_a_gpu")
@pytest.mark.parametrize(("attention", "kept"), ATTENTION, ids=str)
def test_whoever_computes_a_query_takes_the_same_sums(
    attention: LayerAttention, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_plan, "PART_TOKENS", PART)
    monkeypatch.setattr(attention_plan, "_tile_tokens", lambda spec: TILE)
    contexts = Contexts(attention, kept)
    watched = (31, 32, 73)
    alone = {at: contexts.attend([Rows(LONG, at, 1)])[0][0] for at in watched}

    def check(rows: list[Rows], which: int) -> None:
        own = contexts.attend(rows)[which]
        _, first, count = rows[which]
        inside = [at for at in watched if first <= at < first + count]
        assert inside
        assert all(torch.equal(own[at - first], alone[at]) for at in inside)

    drafts = [Rows(MIDDLE, 39, 1), Rows(LONG, 71, 5), Rows(SHORT, 0, 6)]
    check(drafts, 1)
    check([Rows(LONG, 28, 8)], 0)
    check([Rows(SHORT, 5, 1), Rows(LONG, 20, 56)], 1)
    check([Rows(LONG, 23, 11)], 0)
    monkeypatch.setattr(attention_plan, "_ENOUGH_PROGRAMS", 0)
    check(drafts, 1)
    monkeypatch.setattr(attention_plan, "_LONG_RUN", 2)
    check(drafts, 1)
    room = 6 * HEADS * (SIZE + 2) * 4  # for the states of one row of two
    monkeypatch.setattr(attention_plan, "_ENOUGH_PROGRAMS", 10**9)
    monkeypatch.setattr(attention_plan, "_STATE_BYTES", room)
    check([Rows(LONG, 73, 1), Rows(LONG, 73, 2)], 0)
    check([Rows(LONG, 73, 1), Rows(LONG, 73, 2)], 1)


@given(
    st.sampled_from(SHAPES),
    st.sampled_from((0, 128, 4096)),
    st.integers(1, 1024),
    st.sampled_from((1, 8)),
    st.integers(1, 1 << 20),
)
def test_no_plan_changes_the_order_of_sums(
    shape: attention_plan.CacheShape, window: int, rows: int, places: int, longest: int
) -> None:
    """What decides it is a part's and a tile's tokens; of these, rows and lengths decide nothing. Every part has a
    program, and states stay within their memory."""
    spec = AttentionSpec(shape, 0.1, window)
    orders = {
        (plan["PART"], plan["TILE"], plan["DIMS"])
        for plan in (
            *(attention_plan.decode_plan(spec, places) for places in attention_plan.DECODE_PLACES),
            *(attention_plan.chunk_plan(spec, generation) for generation in (80, 90, 100)),
        )
    }
    assert len(orders) == 1
    [(part, tile, _)] = orders
    assert part % tile == 0
    parts = attention_plan.most_parts(spec, longest)
    plan = plan_parts(spec, rows, StepTiles(places, parts, None))
    assert plan.programs * plan.run >= parts
    assert plan.states * shape.heads * (shape.head_dim + 2) * 4 <= 128 << 20
    seen = np.arange(longest)[-(window + 8) if window else 0 :]
    assert parts >= len(np.unique(seen // PART_TOKENS)) - (seen[0] % PART_TOKENS > 0 and not window)


@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=9), st.sampled_from((1, 8)), st.sampled_from(SHAPES), st.data()
)
def test_a_recorded_step_finds_the_tiles_that_the_host_plans(
    counts: list[int], most: int, shape: CacheShape, data: st.DataObject
) -> None:
    """On the device, of whatever rows it has; tiles behind them are nobody's."""
    spec, size = AttentionSpec(shape, 0.1), sum(counts) + data.draw(st.integers(0, 40))
    most = min(most, spec.most_decoded)
    tables = torch.zeros(len(counts), 1), torch.zeros(len(counts), 1)
    real = [*filter(None, counts)]
    rows = StepBatch(range(len(real)), [0] * len(real), real, *tables, BLOCK)
    wanted = attention_plan._plan_chunks(spec, rows, most) if real else None
    on_device = torch.tensor([*real, *[0] * (len(counts) - len(real))], dtype=torch.int32)
    recorded = DeviceBatch(on_device, on_device, on_device, on_device, tables[1], size, prompts=True)
    bounds = np.full(len(counts), most)
    tiles = plan_tiles(spec, StepBatch(range(len(counts)), bounds, bounds, *tables, BLOCK, recorded))
    assert tiles.places == spec.decode_places(most)
    assert tiles.chunks is not None
    assert tiles.chunks[: 0 if wanted is None else len(wanted)].tolist() == ([] if wanted is None else wanted.tolist())
    assert (tiles.chunks[0 if wanted is None else len(wanted) :, 0] == -1).all()
