"""The Triton backend on the interpreter: beside attention by its formula, where the kernels have borders of their own.
All of test_backends.py runs with it among the proofs."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from charonia.core.errors import InvalidArgument
from charonia.engine.attention.backend import CacheSpec
from charonia.engine.attention.host_cache import HostCache
from charonia.engine.attention.place_images import PlaceImages
from charonia.engine.attention.selector import capable_backends, create_backend
from charonia.engine.attention.triton_attention import TritonAttention
from charonia.engine.checkpoint.model_spec import LayerAttention, RopeSpec
from charonia.engine.gpu import runtime
from charonia.engine.gpu.attention_plan import AttentionSpec, CacheShape, plan_tiles
from charonia.engine.layers.norm import QKNorm
from charonia.engine.layers.rotary import TorchRotary
from charonia.engine.step_batch import DeviceBatch, StepBatch, StepPositions, upload_columns
from charonia.engine.worker.executor import CachePlaces
from charonia.engine.worker.rank_places import RankPlaces
from tests.engine.kept_attention import KeptReference, keep, quantise

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")
FREE, BLOCKS = 7, 90
"""Blocks of the cache that no row has: what lies there is NaN."""
KEPT = ("auto", "int8", "fp8")

PLAIN = LayerAttention()


def spec(attention: LayerAttention = PLAIN, **changes: object) -> CacheSpec:
    return CacheSpec((attention,), 6, 2, 16, 16, torch.float32, CPU)._replace(**changes)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def lines_of(backend: TritonAttention) -> Tensor:
    """[layers, keys and values, blocks, kv_heads, block_size, head_dim], of one shape."""
    return backend.device_blocks[0].movedim(0, 2).unflatten(-1, (2, -1, 16))


def scales_of(backend: TritonAttention) -> Tensor:
    """[layers, blocks, kv_heads, block_size, keys and values]; without codes nothing."""
    return (
        backend.device_blocks[1].movedim(0, 1).unflatten(2, (2, -1))
        if len(backend.device_blocks) > 1
        else torch.empty(0)
    )


class Pair:
    """The backend and the reference, which computes in float32, with the same tokens in their caches, and rows of such
    lengths and counts. `size`: of the values."""

    def __init__(
        self,
        shape: CacheSpec,
        rows: list[tuple[int, int]],
        size: float = 1.0,
        moved: StepPositions | None = None,
    ) -> None:
        self.shape, self.rows, self.size, self.moved = shape, rows, size, moved
        self.backends = TritonAttention(shape), KeptReference(shape._replace(dtype=torch.float32))
        order = (torch.randperm(BLOCKS - FREE, generator=torch.Generator().manual_seed(1)) + FREE).tolist()
        width = max(-(-sum(row) // shape.block_size) for row in rows)
        blocks = [[order.pop() for _ in range(-(-sum(row) // shape.block_size))] for row in rows]
        self.tables = torch.tensor([[*mine, *[0] * (width - len(mine))] for mine in blocks])
        for backend in self.backends:
            backend.allocate(BLOCKS)
        mine, reference = lines_of(self.backends[0]), self.backends[1]._layers[0]
        scales, kept = scales_of(self.backends[0]), shape.kv_cache_dtype
        if kept == "auto":
            mine.fill_(torch.nan)
        else:
            mine.view(torch.uint8).fill_(127)
            scales.fill_(torch.nan)
        for line, (start, _) in enumerate(rows):
            known = random(2, start, 2, 16).to(shape.dtype) * torch.tensor([1, size]).view(2, 1, 1, 1).to(shape.dtype)
            token = torch.arange(start)
            blocks, offsets = self.tables[line, token // shape.block_size], token % shape.block_size
            for cache, lines in zip(reference, keep(known.float(), kept), strict=True):
                cache[blocks * shape.block_size + offsets] = lines
            if kept != "auto":
                known, largest = quantise(known.float(), kept)
                scales[0, blocks, :, offsets] = largest.permute(1, 2, 0)
            mine[0, :, blocks, :, offsets] = known.transpose(0, 1)

    def batch(self, rows: list[tuple[int, int]], lines: list[int]) -> StepBatch:
        starts, counts = zip(*rows, strict=True)
        tokens = torch.zeros(len(self.tables), 1)
        batch = StepBatch(lines, starts, counts, tokens, self.tables, self.shape.block_size)
        batch.moved = self.moved
        return batch

    def step(self, rows: list[tuple[int, int]], lines: list[int], seed: int) -> list[Tensor]:
        batch, shape = self.batch(rows, lines), self.shape
        q, k, v = (random(batch.size, heads, 16 + seed)[..., :16] for heads in (6, 2, 2))
        q, k, v = (each.to(shape.dtype).contiguous() for each in (q, k, v * self.size))
        sinks = random(6) if shape.attention[0].sinks else None
        mine, reference = (backend.begin_step(batch) for backend in self.backends)
        return [mine(0, q, k, v, sinks), reference(0, q.float(), k.float(), v.float(), sinks)]

    def check(self) -> None:
        found, right = self.step(self.rows, [*range(len(self.rows))], 2)
        assert found.dtype == self.shape.dtype
        bound = 2e-5 if found.dtype == torch.float32 else 4e-3
        torch.testing.assert_close(found.float(), right, atol=bound * self.size, rtol=1e-3)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("attention", [PLAIN, LayerAttention(20, 0.3, 1.5, sinks=True)], ids=str)
def test_decoding_rows_drafts_and_chunks_in_one_step(attention: LayerAttention, kept: str) -> None:
    rows = [(40, 1), (0, 1), (15, 5), (16, 8), (0, 30), (31, 50)] if kept == "auto" else [(40, 1), (15, 5), (31, 20)]
    Pair(spec(attention, kv_cache_dtype=kept), rows).check()


def test_rows_may_have_more_tokens_than_they_see() -> None:
    """As over an encoder's output with fewer rows than a chunk has tokens, or a decoding row places; what lies behind
    its end is not read."""
    seen, counts = [20, 1, 90, 70, 50], [100, 3, 2, 80, 1]
    pair = Pair(spec(LayerAttention(both_ways=True)), [(max(row), 0) for row in zip(seen, counts, strict=True)])
    for line, end in enumerate(seen):
        lines_of(pair.backends[0])[:, :, pair.tables[line, -(-end // 16) : -(-max(end, counts[line]) // 16)]] = (
            torch.nan
        )
    pair.moved = StepPositions(np.zeros(5, np.int32), None, np.repeat(np.array(seen, np.int32), counts))
    starts = np.maximum(np.subtract(seen, counts), 0).tolist()
    batch = pair.batch([*zip(starts, counts, strict=True)], [*range(5)])
    found, right = (backend.begin_step(batch)(0, random(batch.size, 6, 16), None, None) for backend in pair.backends)
    torch.testing.assert_close(found, right, atol=2e-5, rtol=1e-3)
    decoded = plan_tiles(AttentionSpec(CacheShape(6, 2, 16, 16), 0.25, both_ways=True), batch).decoded
    assert decoded is not None
    assert decoded.tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("kept", KEPT)
def test_what_lies_before_a_window_is_not_read(kept: str) -> None:
    """Its blocks are other sequences' by now, and may hold what is no number."""
    window, rows = 20, [(110, 1), (130, 5), (120, 20)]
    pair = Pair(spec(LayerAttention(window), kv_cache_dtype=kept), rows)
    for line, (start, _) in enumerate(rows):
        left = pair.tables[line, : (start - window + 1) // pair.shape.block_size]
        assert len(left) % 4, "and they end in a tile"
        if kept == "auto":
            lines_of(pair.backends[0])[:, :, left] = torch.nan
        else:
            lines_of(pair.backends[0]).view(torch.uint8)[:, :, left] = 127
            scales_of(pair.backends[0])[:, left] = torch.nan
    pair.check()


@pytest.mark.parametrize("window", [None, 12])
def test_places_of_an_image_see_one_another(window: int | None) -> None:
    """Whether they are many, or so few that other rows of as many places decode."""
    rows = [(40, 1), (15, 5), (16, 30), (31, 6)]
    ends = np.concatenate([np.arange(start + 1, start + count + 1) for start, count in rows]).astype(np.int32)
    ends[2:6] = 20
    ends[10:30] = 40
    moved = StepPositions(np.zeros(len(rows), np.int32), None, ends)
    seen = Pair(spec(LayerAttention(window, both_ways=True)), rows, moved=moved)
    seen.check()
    unseen = Pair(spec(LayerAttention(window)), rows, moved=moved)
    unseen.check()
    (found, _), (causal, _) = (pair.step(rows, [*range(4)], 2) for pair in (seen, unseen))
    differ = (found != causal).any(1).nonzero().flatten().tolist()
    assert differ == [*range(2, 5), *range(10, 29)]


@pytest.mark.parametrize("kept", KEPT)
def test_a_long_context_is_cut_into_parts(kept: str) -> None:
    """In half precision, in which a small weight times a scale of a code of such values would be nothing."""
    rows = [(600, 1), (255, 1), (256, 1), (3, 1)] if kept == "auto" else [(600, 1), (3, 1)]
    Pair(spec(dtype=torch.float16, kv_cache_dtype=kept), rows, 1.0 if kept == "auto" else 0.001).check()


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from((0, 1, 15, 16, 70)), st.sampled_from((1, 2, 7, 9, 40))), min_size=1, max_size=3),
    st.sampled_from((None, 1, 16, 17)),
    st.sampled_from((4, 16)),
    st.sampled_from(KEPT),
)
def test_rows_of_any_shape(
    interpreted: None, rows: list[tuple[int, int]], window: int | None, block: int, kept: str
) -> None:
    Pair(spec(LayerAttention(window), block_size=block * 4, kv_cache_dtype=kept), rows).check()


@pytest.mark.parametrize("kept", KEPT)
def test_rotation_and_write_are_those_of_torch(kept: str) -> None:
    """And no other line of the cache is written."""
    shape = spec(kv_cache_dtype=kept)
    pair = Pair(shape, [(5, 3), (40, 1), (0, 20)])
    rotary = TorchRotary(RopeSpec(partial_rotary_factor=0.5), 16, 64, torch.float32, CPU)
    batch = pair.batch(pair.rows, [0, 1, 2])
    packed = random(batch.size, 10, 16)
    angles = rotary(batch.positions)
    mine = pair.backends[0]
    codes, scales = lines_of(mine).view(torch.uint8).clone(), scales_of(mine).view(torch.int32).clone()
    found, right = (backend.begin_step(batch).apply_rope_and_attend(0, packed, angles) for backend in pair.backends)
    torch.testing.assert_close(found, right, atol=2e-5, rtol=1e-3)
    lines = batch.size * 2 * 2
    assert (lines_of(mine).view(torch.uint8) != codes).any(-1).sum() == lines
    assert (scales_of(mine).view(torch.int32) != scales).sum() == (0 if kept == "auto" else lines)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(KEPT),
    st.sampled_from((torch.float32, torch.float16)),
    st.sampled_from((0.5, 1.0)),
    st.booleans(),
    st.booleans(),
)
def test_norms_of_heads_go_with_the_write(
    interpreted: None, kept: str, dtype: torch.dtype, turned: float, of_values: bool, wide: bool
) -> None:
    """To the bits of a launch before it, and of each row alone, whatever is beside it; values are normalised, too, or
    left. And of queries alone, of a layer that attends to what another stored."""
    from charonia.engine.gpu.norm import TritonNorm

    shape, rows = spec(kv_cache_dtype=kept, dtype=dtype), [(5, 3), (40, 1), (0, 20)]
    heads = 10 if of_values else 8
    weights = 1 + random(heads, 16).to(torch.float32 if wide else dtype)
    norm, of_queries = QKNorm(TritonNorm(weights, 1e-6), heads), QKNorm(TritonNorm(weights[:6], 1e-6), 6)
    rotary = TorchRotary(RopeSpec(partial_rotary_factor=turned), 16, 64, dtype, CPU)
    packed = random(24, 10, 16).to(dtype)
    found = []
    for own, pieces in ((norm, [[0, 1, 2]]), (None, [[0, 1, 2]]), (norm, [[0], [1], [2]])):
        pair, outputs, later = Pair(shape, rows), [], []
        for chosen in pieces:
            batch = pair.batch([rows[row] for row in chosen], chosen)
            first = sum(count for _, count in rows[: chosen[0]])
            mine = packed[first : first + batch.size].clone()
            if own is None:
                norm(mine)
            attention = pair.backends[0].begin_step(batch)
            angles, queries = rotary(batch.positions), mine[:, :6].contiguous()
            outputs.append(attention.apply_rope_and_attend(0, mine, angles, None, own))
            later.append(attention.apply_rope_and_attend(0, queries, angles, None, own and of_queries))
        assert all(map(torch.equal, outputs, later))
        found.append((torch.cat(outputs), lines_of(pair.backends[0]).clone(), scales_of(pair.backends[0]).clone()))
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert torch.equal(one.contiguous().view(torch.uint8), same.contiguous().view(torch.uint8))


@pytest.mark.filterwarnings("ignore:overflow encountered in divide:RuntimeWarning")  # by the least number there is
@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_codes_and_scales_are_those_of_torch(kept: str) -> None:
    """Of numbers of any size: an outlier beside others, zeros, the least there are, and halves between two codes."""
    shape = spec(kv_cache_dtype=kept)
    backend = TritonAttention(shape)
    backend.allocate(2)
    k, v = random(30, 2, 16) * 2.0 ** torch.randint(-20, 20, (30, 2, 1)), random(30, 2, 16) ** 5
    k[0], k[1, 0], k[2], v[3, :, 0] = 0, 1e-45, 1e30, 1e4
    largest_code = quantise(k, kept)[0].float().max()
    v[4], v[4, :, 0] = torch.linspace(-20.5, 9.5, 16), largest_code
    batch = StepBatch([0], [0], [30], torch.zeros(1, 1), torch.tensor([[1, 0]]), 16)
    backend.begin_step(batch)(0, random(30, 6, 16), k, v)
    for which, x in enumerate((k, v)):
        codes, largest = quantise(x, kept)
        lines, largest_of = lines_of(backend)[0, which], scales_of(backend)[0]
        written = torch.cat((lines[1], lines[0]), 1)[:, :30].transpose(0, 1)
        scales = torch.cat((largest_of[1], largest_of[0]), 1)[:, :30, which].t()
        assert torch.equal(written.float(), codes.float())
        assert torch.equal(scales, largest)


@pytest.mark.parametrize(("kept", "bound"), [("int8", 1 / 254), ("fp8", 1 / 28)])
def test_what_is_kept_is_near_what_was_given(kept: str, bound: float) -> None:
    """Half a step of the largest codes, of each line's largest number: what a token that is alone gets back."""
    backend, rows = create_backend("triton", spec(kv_cache_dtype=kept)), 12
    backend.allocate(rows)
    batch = StepBatch(np.arange(rows), [0] * rows, [1] * rows, torch.zeros(rows, 1), torch.arange(rows).view(-1, 1), 16)
    v = random(rows, 2, 16)
    found = backend.begin_step(batch)(0, random(rows, 6, 16), random(rows, 2, 16), v).view(rows, 6, 16)
    error = (found - v.repeat_interleave(3, 1)).abs() / v.abs().amax(-1, keepdim=True).repeat_interleave(3, 1)
    assert bound / 8 < error.max() <= bound * 1.0001


def test_a_block_of_codes_takes_half_of_one_in_half_precision_and_its_scales() -> None:
    half, *others = (
        create_backend("triton", spec(dtype=torch.float16, kv_cache_dtype=kept)).block_bytes for kept in KEPT
    )
    assert half == 2 * 2 * 16 * 2 * 16
    assert others == [half // 2 + 2 * 4 * 16 * 2] * 2
    for kept in KEPT:
        backend = TritonAttention(spec((PLAIN, PLAIN), kv_cache_dtype=kept)._replace(attention=(PLAIN,) * 3))
        backend.allocate(5)
        assert sum(block[0].nbytes for block in backend.device_blocks) == backend.block_bytes


@pytest.mark.parametrize("kept", KEPT)
def test_blocks_go_to_the_host_and_come_back_with_their_scales(kept: str) -> None:
    """Into other blocks of the cache, where they are attended to."""
    pair = Pair(spec(kv_cache_dtype=kept), [(40, 1)])
    right = pair.step(pair.rows, [0], 2)[1]
    backend, blocks = pair.backends[0], pair.tables[0].tolist()
    host = HostCache(backend.device_blocks, len(blocks))
    host.make_copies(np.array([(block, slot, 0) for slot, block in enumerate(blocks)]))
    for tensor in backend.device_blocks:
        tensor.copy_(torch.tensor(torch.nan if tensor.dtype == torch.float32 else 100.0))
    host.make_copies(np.array([(BLOCKS - 1 - slot, slot, 1) for slot in range(len(blocks))]))
    pair.tables[0] = torch.arange(BLOCKS - 1, BLOCKS - 1 - len(blocks), -1)
    torch.testing.assert_close(pair.step(pair.rows, [0], 2)[0], right, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("kept", KEPT)
def test_blocks_that_went_to_another_server_are_attended_to_alike(kept: str) -> None:
    pair = Pair(spec(kv_cache_dtype=kept), [(41, 1)])
    [right, _] = pair.step([(41, 1)], [0], 2)
    computed, fetched = pair.backends[0], TritonAttention(pair.shape)
    fetched.allocate(BLOCKS)
    ours, theirs = (RankPlaces(PlaceImages(backend.device_blocks), None) for backend in (computed, fetched))
    assert ours.layout == theirs.layout
    blocks = pair.tables[0].tolist()
    sent = ours.take(CachePlaces(blocks))()
    theirs.put(CachePlaces([*range(len(blocks))]), memoryview(bytearray(sent)))
    pair.tables = torch.arange(len(blocks)).view(1, -1)
    pair.backends = fetched, pair.backends[1]
    assert pair.step([(41, 1)], [0], 2)[0].equal(right)


@pytest.mark.parametrize("kept", ["auto", "fp8"])
def test_padded_rows_and_places_touch_nothing(kept: str) -> None:
    """As a recorded step has them: eight rows and places, of which three count."""
    pair = Pair(spec(kv_cache_dtype=kept), [(40, 1), (3, 1), (64, 1)])
    three = [[0, 1, 2], [40, 3, 64], [1, 1, 1], [0, 1, 2]]
    columns = np.array([[*own, *[padding] * 5] for own, padding in zip(three, (0, 0, 0, 3), strict=True)])
    numbers = upload_columns(list(columns), CPU)
    there = DeviceBatch(*numbers, pair.tables, 8)
    ones = np.ones(8, np.int32)
    tokens = torch.zeros(3, 1)
    padded = StepBatch(columns[0], columns[1], ones, tokens, pair.tables, 16, there)
    q, k, v = (random(8, heads, 16) for heads in (6, 2, 2))
    mine = lines_of(pair.backends[0]).view(torch.uint8)
    before = mine.clone()
    found = pair.backends[0].begin_step(padded)(0, q, k, v)[:3]
    right = pair.backends[1].begin_step(pair.batch(pair.rows, [0, 1, 2]))(0, q[:3], k[:3], v[:3])
    torch.testing.assert_close(found, right, atol=2e-5, rtol=1e-3)
    assert (mine != before).any((3, 5)).sum() == 2 * 3  # a key and a value of each row that counts


def test_it_is_for_gpus_and_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(create_backend("auto", spec()), TritonAttention)
    monkeypatch.delenv("CHARONIA_KERNELS")
    assert "triton" not in capable_backends("auto", CPU, torch.float32, 16, "auto")
    with pytest.raises(InvalidArgument, match="'triton' needs a GPU"):
        create_backend("triton", spec())
    assert capable_backends("auto", torch.device("cuda"), torch.bfloat16, 16, "auto")[0] == "triton"


def test_fp8_needs_a_gpu_that_converts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for capability, says in ((80, "and cuda:0 has 8.0; int8 takes as few bytes"), (89, "")):
        monkeypatch.setattr(runtime, "capability", lambda device, found=capability: found)
        if not says:
            assert capable_backends("auto", gpu, torch.bfloat16, 16, "fp8") == ["triton"]
            continue
        with pytest.raises(InvalidArgument, match=says) as refusal:
            create_backend("auto", spec(device=gpu, kv_cache_dtype="fp8"))
        assert refusal.value.field == "kv_cache_dtype"
        assert capable_backends("auto", gpu, torch.bfloat16, 16, "int8") == ["triton"]
    monkeypatch.delenv("CHARONIA_KERNELS")
    says = r"fp8 is for GPUs .* the engine computes on cpu; int8 takes as few bytes$"
    for name in ("auto", "cpu"):
        with pytest.raises(InvalidArgument, match=says):
            create_backend(name, spec(kv_cache_dtype="fp8"))


@pytest.mark.parametrize("kept", KEPT)
def test_a_new_cache_has_numbers_everywhere(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its memory held: a head that drafts attends to places that it never wrote."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **how: empty(*sizes, **how).fill_(torch.nan))
    backend = TritonAttention(spec(kv_cache_dtype=kept))
    backend.allocate(3)
    assert all(block.float().isfinite().all() for block in backend.device_blocks)
