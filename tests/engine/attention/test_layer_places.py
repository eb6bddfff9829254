"""Groups of layers and their parts of a block: no two layers of a group share a byte, and none is outside its block."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.engine.attention.layer_places import block_size, choose_groups, lay_strips, place_layers
from charonia.engine.checkpoint.model_spec import LayerAttention
from charonia.kvcache.layer_groups import ONE_GROUP, LayerGroups

LONGEST = 1 << 17
LAYERS = st.lists(st.tuples(st.sampled_from((None, 16, 4096)), st.sampled_from((1, 2, 3, 64))), min_size=1, max_size=40)


@given(LAYERS)
def test_layers_lie_apart(layers: list[tuple[int | None, int]]) -> None:
    attention, sizes = [LayerAttention(window) for window, _ in layers], [size for _, size in layers]
    groups = choose_groups(attention, sizes, LONGEST)
    places = place_layers(attention, groups, LONGEST)
    widths, parts = lay_strips(places, sizes)
    taken = [
        (place.group, strip, unit)
        for place, (strip, begin), size in zip(places, parts, sizes, strict=True)
        for unit in range(begin, begin + size)
    ]
    assert len(set(taken)) == len(taken) == sum(sizes)
    assert all(unit < widths[strip] for _, strip, unit in taken)
    assert {place.group for place in places} == set(range(groups.total))
    if groups.sliding:
        slides = [kind.window is not None for kind in attention]
        assert slides == [place.group >= groups.full for place in places]
        window = groups.window * 8
        alike = block_size(places, sizes) * (groups.full * window + groups.sliding * groups.window)
        assert alike <= 0.9 * sum(sizes) * window


@pytest.mark.parametrize(
    ("full", "sliding", "window", "groups", "size"),
    [
        ((4, 1), (22, 1), 512, LayerGroups(1, 6, 512), 4),  # Gemma 3 1B
        ((12, 1), (12, 1), 128, LayerGroups(1, 1, 128), 12),  # gpt-oss 20b
        ((3, 1024), (12, 512), 512, LayerGroups(1, 2, 512), 3072),  # Gemma 4 E2B
        ((4, 2048), (20, 1024), 512, LayerGroups(2, 5, 512), 4096),  # E4B
        ((5, 2048), (25, 4096), 1024, LayerGroups(1, 7, 1024), 16384),  # 26B-A4B
        ((2, 1), (1, 1), 100_000, ONE_GROUP, 3),  # so little slides that groups would save nothing
    ],
)
def test_groups_of_published_shapes(
    full: tuple[int, int], sliding: tuple[int, int], window: int, groups: LayerGroups, size: int
) -> None:
    attention = [LayerAttention()] * full[0] + [LayerAttention(window)] * sliding[0]
    sizes = [full[1]] * full[0] + [sliding[1]] * sliding[0]
    assert choose_groups(attention, sizes, LONGEST) == groups
    assert block_size(place_layers(attention, groups, LONGEST), sizes) == size
