"""Every backend against attention in float64 over the whole sequence."""

import math

import pytest
import torch

from charonia.core.errors import InvalidArgument
from charonia.engine.attention.backend import AttentionBackend, CacheSpec
from charonia.engine.attention.layer_places import LayerPlace
from charonia.engine.attention.native import NativeAttention
from charonia.engine.attention.selector import AUTO_ORDER, BACKENDS, create_backend
from charonia.engine.attention.torch_attention import ReferenceAttention, TorchSdpaAttention
from charonia.engine.checkpoint.model_spec import KeyValueShape, LayerAttention
from charonia.engine.cpu import library
from charonia.engine.step_batch import StepBatch

CPU = torch.device("cpu")
PLAIN = LayerAttention()
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def spec(**changes: object) -> CacheSpec:
    return CacheSpec((PLAIN, PLAIN), 6, 2, 16, 4, torch.float32, CPU)._replace(**changes)


class Story:
    """Sequences that grow step by step: what attention says at each against what it should say."""

    def __init__(self, attention: AttentionBackend, spec: CacheSpec, blocks: int = 200, seed: int = 0) -> None:
        self.attention, self.spec = attention, spec
        self.generator = torch.Generator().manual_seed(seed)
        self.free = torch.randperm(blocks, generator=self.generator).tolist()
        self.groups = 1 + max(place.group for place in spec.layer_places)
        self.tables: dict[int, list[list[int]]] = {}
        self.history: dict[tuple[int, int], list[torch.Tensor]] = {}
        sizes = [(spec.heads, *((v.distances,) if v.distances else ())) for v in spec.attention]
        self.sinks = [
            2 * torch.randn(size, generator=self.generator) if v.sinks or v.distances else None
            for size, v in zip(sizes, spec.attention, strict=True)
        ]
        attention.allocate(blocks)

    def random(self, tokens: int, heads: int, size: int) -> torch.Tensor:
        return torch.randn(tokens, heads, size, generator=self.generator).to(self.spec.dtype)

    def length(self, row: int) -> int:
        return sum(len(k) for k in self.history.get((row, 0), [])[::2])

    def step(self, rows: dict[int, int]) -> float:
        """Compute `rows`: counts by row; returns the largest error over all layers and rows."""
        starts = [self.length(row) for row in rows]
        batch = self.batch(rows, starts)
        attend = self.attention.begin_step(batch)
        return max(self.layer(attend, batch, layer, rows, starts) for layer in range(self.spec.layers))

    def batch(self, rows: dict[int, int], starts: list[int]) -> StepBatch:
        for (row, count), start in zip(rows.items(), starts, strict=True):
            table = self.tables.setdefault(row, [])
            while len(table) * self.spec.block_size < start + count:
                table.append([self.free.pop() for _ in range(self.groups)])
        width = max(len(self.tables[row]) for row in rows)
        none = [0] * self.groups
        lines = [self.tables[row] + [none] * (width - len(self.tables[row])) for row in rows]
        tables = torch.tensor(lines).transpose(1, 2).flatten(1)
        known = torch.zeros(len(rows), 1, dtype=torch.int32)
        counts = list(rows.values())
        return StepBatch(range(len(rows)), starts, counts, known, tables, self.spec.block_size, groups=self.groups)

    def layer(self, attend: object, batch: StepBatch, layer: int, rows: dict[int, int], starts: list[int]) -> float:
        total = sum(rows.values())
        kept = self.spec.shapes[layer]
        q, k = self.random(total, self.spec.heads, kept.key_size), self.random(total, kept.heads, kept.key_size)
        v = k[..., : kept.value_size] if kept.values_in_keys else self.random(total, kept.heads, kept.value_size)
        if not kept.values_in_keys:
            self.attention.store(batch, layer, k, v)
            stored = attend(layer, q, None, None, self.sinks[layer])
            assert torch.equal(attend(layer, q, k, v, self.sinks[layer]), stored)
        found = attend(layer, q, k, None if kept.values_in_keys else v, self.sinks[layer])
        # One that stores nothing finds what is there.
        assert torch.equal(attend(layer, q, None, None, self.sinks[layer]), found)
        counts = list(rows.values())
        errors = [
            self.error(found_row, layer, row, start, *mine)
            for row, start, found_row, *mine in zip(
                rows, starts, found.split(counts), q.split(counts), k.split(counts), v.split(counts), strict=True
            )
        ]
        return max(errors)

    def error(self, found: torch.Tensor, layer: int, row: int, start: int, *qkv: torch.Tensor) -> float:
        q, k, v = qkv
        seen = self.history.setdefault((row, layer), [])
        seen += [k, v]
        past = torch.cat(seen[::2]), torch.cat(seen[1::2])
        right = exact(q, *past, start, self.spec.attention[layer], self.sinks[layer])
        return (found.double() - right).abs().max().item()


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, view: LayerAttention, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Head by head, in float64; a sink is one more token, seen by all, with a value of 0."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(start)
    if view.window is not None:
        seen = seen.triu(start + 1 - view.window)
    for head in range(q.shape[1]):
        mine, keys, values = (t.double() for t in (q[:, head], k[:, head // group], v[:, head // group]))
        scores = mine @ keys.T * (view.scale or 1 / math.sqrt(q.shape[-1]))
        if view.distances and sinks is not None:
            back = torch.arange(start, start + len(q))[:, None] - torch.arange(len(k))
            scores = scores + sinks[head].double()[back.clamp(0, view.distances - 1)]
        scores = scores if view.softcap is None else view.softcap * (scores / view.softcap).tanh()
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None and not view.distances:
            scores = torch.cat((scores, sinks[head].double().expand(len(q), 1)), -1)
            values = torch.cat((values, torch.zeros(1, values.shape[1])))
        out[:, head] = scores.softmax(-1) @ values
    return out.reshape(len(q), -1)


STEPS = [
    {0: 9, 1: 1, 2: 30},
    {0: 1, 1: 1, 2: 1},
    {0: 1, 1: 7, 3: 2, 2: 1},
    {3: 1, 1: 1, 0: 5, 2: 1, 4: 1},
    {0: 1, 1: 1, 2: 1, 3: 1, 4: 1},
    {2: 1},
]
"""Prefills, chunks on top of context, decodes of lengths near and far, mixed and in changing order."""


NATIVE = pytest.param("native", marks=pytest.mark.skipif(library.level() is None, reason="no C extension here"))


INTERPRETED = pytest.param("triton", marks=pytest.mark.proof)
"""Slowly; some cases of its own are in test_triton_attention.py."""


@pytest.fixture(params=[NATIVE, INTERPRETED, *sorted({*BACKENDS} - {"native", "triton"})])
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        request.getfixturevalue("interpreted")
    return str(request.param)


def spec_for(name: str, **changes: object) -> CacheSpec:
    """As `spec`, in blocks that the backend can do."""
    return spec(**({"block_size": 16} if name == "native" else {}) | changes)


def able(name: str, shape: CacheSpec) -> bool:
    supports = BACKENDS[name].supports
    if name == "triton" and shape.dtype == torch.bfloat16:
        return False  # the interpreter multiplies their bit patterns
    held = shape.dtype in supports.dtypes and shape.block_size in supports.block_sizes
    return held and BACKENDS[name].supports_heads(shape)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (7, 1)])
def test_a_whole_story(name: str, dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    shape = spec_for(name, dtype=dtype, heads=heads, kv_heads=kv_heads)
    if not able(name, shape):
        pytest.skip("the backend does not do this")
    story = Story(create_backend(name, shape), shape)
    assert max(story.step(rows) for rows in STEPS) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("window", "dtype"), [*((window, torch.float32) for window in (1, 4, 6, 100)), (6, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("cap", [None, 1.5])
def test_layers_with_views_of_their_own(name: str, window: int, cap: float | None, dtype: torch.dtype) -> None:
    """A window as long as a block, one that is not, one that is longer than everything."""
    shape = spec_for(
        name,
        attention=(
            PLAIN,
            LayerAttention(window, 0.3, cap),
            LayerAttention(window),
            LayerAttention(scale=0.1, softcap=cap),
        ),
        dtype=dtype,
    )
    if not able(name, shape):
        pytest.skip("the backend does not do this")
    story = Story(create_backend(name, shape), shape)
    assert max(story.step(rows) for rows in STEPS) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 6])
def test_what_others_have_in_the_block_that_pads_tables_changes_nothing(name: str, window: int | None) -> None:
    """Not even what is no number, as another sequence's keys may be that overflowed."""
    shape = spec_for(name, attention=(LayerAttention(window), PLAIN))
    story = Story(create_backend(name, shape), shape)
    story.free.remove(0)
    for strip in story.attention.device_blocks:
        strip[0] = math.nan if strip.is_floating_point() else -1
    steps = {0: 18, 1: 40}, {0: 1, 1: 1}, {0: 3, 1: 1}, {0: 1, 1: 1}
    assert max(story.step(rows) for rows in steps) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_layers_with_sinks(name: str, dtype: torch.dtype) -> None:
    """Beside one without, with windows and a cap."""
    views = (
        LayerAttention(sinks=True),
        PLAIN,
        LayerAttention(6, 0.3, sinks=True),
        LayerAttention(None, 0.3, 1.5, sinks=True),
    )
    shape = spec_for(name, attention=views, dtype=dtype)
    if not able(name, shape):
        pytest.skip("the backend does not do this")
    story = Story(create_backend(name, shape), shape)
    assert max(story.step(rows) for rows in STEPS) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_layers_with_additions_by_distance(name: str, dtype: torch.dtype) -> None:
    """Beside one without, with a window and a cap."""
    views = (LayerAttention(None, 1.0, distances=9), PLAIN, LayerAttention(6, 0.3, 1.5, distances=40))
    shape = spec_for(name, attention=views, dtype=dtype)
    if not able(name, shape):
        pytest.skip("the backend does not do this")
    story = Story(create_backend(name, shape), shape)
    assert max(story.step(rows) for rows in STEPS) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_keep_different_keys_and_values(name: str, dtype: torch.dtype) -> None:
    """Beside each other, and the largest heads that models have."""
    views = (
        PLAIN,
        LayerAttention(6, kept=KeyValueShape(3, 32, 32)),
        LayerAttention(kept=KeyValueShape(1, 512, 512)),
        LayerAttention(kept=KeyValueShape(3, 32, 32)),
    )
    shape = spec_for(name, attention=views, dtype=dtype)
    if not able(name, shape):
        pytest.skip("the backend does not do this")
    backend = create_backend(name, shape)
    numbers = 2 * (2 * 16 + 3 * 32 + 512 + 3 * 32)
    assert backend.block_bytes == numbers * shape.block_size * dtype.itemsize
    story = Story(backend, shape)
    assert sum(blocks[0].nbytes for blocks in backend.device_blocks) == backend.block_bytes
    assert max(story.step(rows) for rows in STEPS[:4]) < TOLERANCE[dtype]


def test_groups_of_unlike_layers_share_blocks(name: str) -> None:
    large, small = LayerAttention(kept=KeyValueShape(2, 48, 48)), LayerAttention(9, kept=KeyValueShape(1, 32, 32))
    places = LayerPlace(0, 0), LayerPlace(1, 0), LayerPlace(1, 1)
    shape = spec_for(name, attention=(large, small, small), places=places)
    backend = create_backend(name, shape)
    assert backend.block_bytes == 2 * 2 * 48 * shape.block_size * 4
    story = Story(backend, shape)
    assert sum(blocks[0].nbytes for blocks in backend.device_blocks) == backend.block_bytes
    assert max(map(story.step, STEPS)) < TOLERANCE[torch.float32]


def test_values_that_are_in_keys_take_no_memory(name: str) -> None:
    views = (LayerAttention(kept=KeyValueShape(1, 48, 32, True)), LayerAttention(kept=KeyValueShape(2, 32, 32)))
    shape = spec_for(name, attention=views)
    if not BACKENDS[name].supports_heads(shape):
        with pytest.raises(InvalidArgument, match="keys of 48 and values of 32"):
            create_backend(name, shape)
        return
    backend = create_backend(name, shape)
    assert backend.block_bytes == (48 + 2 * (32 + 32)) * shape.block_size * 4
    story = Story(backend, shape)
    assert sum(blocks[0].nbytes for blocks in backend.device_blocks) == backend.block_bytes
    assert max(story.step(rows) for rows in STEPS[:4]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_block_sizes(name: str, block_size: int) -> None:
    shape = spec(block_size=block_size)
    if not able(name, shape):
        pytest.skip("the backend does not do this")
    story = Story(create_backend(name, shape), shape)
    assert max(story.step(rows) for rows in STEPS) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_numbers_that_overflowed_are_no_later_sequences(name: str, dtype: torch.dtype) -> None:
    """A weight of 0 does not silence the NaN that an ended sequence left in a block."""
    shape = spec_for(name, dtype=dtype)
    if not able(name, shape):
        pytest.skip("the backend does not do this")
    story = Story(create_backend(name, shape), shape)
    attend = story.attention.begin_step(story.batch({9: 90}, [0]))
    nothing = torch.full((90, shape.heads, shape.head_dim), math.nan, dtype=dtype)
    for layer in range(shape.layers):
        assert attend(layer, nothing, *[nothing[:, : shape.kv_heads]] * 2, None).isnan().all()
    story.free += [block for span in story.tables.pop(9) for block in span]
    assert max(story.step(rows) for rows in STEPS) < TOLERANCE[dtype]


def test_block_bytes_count_keys_and_values_of_all_layers(name: str) -> None:
    shape = spec_for(name)
    assert create_backend(name, shape).block_bytes == 2 * 2 * shape.block_size * 2 * 16 * 4


def test_what_a_backend_cannot_do_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="auto or one of native, triton, cpu, reference"):
        create_backend("flash", spec())
    with pytest.raises(InvalidArgument, match=r"dtype float64; it can do bfloat16, float16, float32$") as refusal:
        create_backend("reference", spec(dtype=torch.float64))
    assert refusal.value.field == "dtype"
    with pytest.raises(InvalidArgument, match=r"block_size 0; it can do 1 to 4096$"):
        create_backend("cpu", spec(block_size=0))
    with pytest.raises(InvalidArgument, match=r"block_size 8; it can do 16 to 4096 in steps of 16$"):
        create_backend("native", spec(block_size=8))
    with pytest.raises(InvalidArgument, match="int8") as refusal:
        create_backend("cpu", spec(kv_cache_dtype="int8"))
    assert refusal.value.field == "kv_cache_dtype"


def test_without_the_extension_its_backend_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "level", lambda: None)
    with pytest.raises(InvalidArgument, match="needs the C extension") as refusal:
        create_backend("native", spec(block_size=16))
    assert refusal.value.field == "attention"
    assert isinstance(create_backend("auto", spec(block_size=16)), TorchSdpaAttention)


@pytest.mark.skipif(library.level() is None, reason="no C extension here")
def test_auto_is_what_knows_the_heads() -> None:
    assert isinstance(create_backend("auto", spec(block_size=16)), NativeAttention)
    assert isinstance(create_backend("auto", spec(block_size=16, head_dim=24)), TorchSdpaAttention)
    with pytest.raises(InvalidArgument, match="6 heads on 2 with keys of 24 and values of 24"):
        create_backend("native", spec(block_size=16, head_dim=24))


@pytest.mark.skipif(library.level() is None, reason="no C extension here")
def test_the_slow_way_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As on a GPU, whose kernels know no latents."""
    monkeypatch.setitem(AUTO_ORDER, "cpu", ("native", "reference"))
    assert isinstance(create_backend("auto", spec(block_size=16)), NativeAttention)
    assert caplog.text == ""
    assert isinstance(create_backend("auto", spec(block_size=16, head_dim=24)), ReferenceAttention)
    assert "'native' can't do 6 heads on 2 with keys of 24 and values of 24, so torch attends" in caplog.text
