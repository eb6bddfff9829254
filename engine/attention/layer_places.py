"""Which layers share blocks. A block has room for the keys and values of so many layers, those of one group; layers of
other groups have the same places in other blocks."""

from collections.abc import Sequence
from typing import NamedTuple

from ...kvcache.layer_groups import ONE_GROUP, LayerGroups
from ..checkpoint.model_spec import DecoderShape, LayerAttention

_MOST_GROUPS = 8
"""Each has a block table of its own."""

_USUAL_WINDOWS = 8
"""Sequences of so many windows are those that groups are chosen for."""

_LEAST_GAIN = 0.1
"""The share of such a sequence's memory that groups must save: with less, all layers stay in one."""


class LayerPlace(NamedTuple):
    """Where a layer's keys and values lie: in blocks of its group, which has one layer for each number."""

    group: int
    number: int


def groups_of(shape: DecoderShape, longest: int) -> LayerGroups:
    """Groups for a model of this `shape` and sequences of at most `longest` tokens. Where some layers keep states, all
    others have one group."""
    return ONE_GROUP if any(shape.states) else choose_groups(shape.cached_attention, longest)


def choose_groups(attention: Sequence[LayerAttention], longest: int) -> LayerGroups:
    """Groups for a model with these layers and sequences of at most `longest` tokens, by which its sequences take the
    least memory. Layers that keep different things of a token have one group."""
    windows = [kind.window for kind in attention if _slides(kind, longest)]
    if not windows or len({kind.kept for kind in attention}) > 1:
        return ONE_GROUP
    window = max(filter(None, windows))
    tokens = min(longest, _USUAL_WINDOWS * window)
    full, sliding = len(attention) - len(windows), len(windows)
    least, groups = len(attention) * tokens * (1 - _LEAST_GAIN), ONE_GROUP
    for places in range(1, len(attention) + 1):
        candidate = LayerGroups(-(-full // places), -(-sliding // places), window)
        size = places * (candidate.full * tokens + candidate.sliding * min(window, tokens))
        if size <= least and candidate.total <= _MOST_GROUPS:
            least, groups = size, candidate
    return groups


def place_layers(attention: Sequence[LayerAttention], groups: LayerGroups, longest: int) -> tuple[LayerPlace, ...]:
    """The places of a rank's layers; none where all are in one group."""
    if not groups.sliding:
        return ()
    slides = [_slides(kind, longest) for kind in attention]
    full, sliding = slides.count(False), slides.count(True)
    most = max(-(-full // max(groups.full, 1)), -(-sliding // groups.sliding))
    numbers = [sum(other == slid for other in slides[:layer]) for layer, slid in enumerate(slides)]
    placed = zip(slides, numbers, strict=True)
    return tuple(LayerPlace(slid * groups.full + number // most, number % most) for slid, number in placed)


def places_in_block(attention: Sequence[LayerAttention], groups: LayerGroups, longest: int) -> int:
    """Layers that a block has room for."""
    places = place_layers(attention, groups, longest)
    return 1 + max(place.number for place in places) if places else len(attention)


def _slides(kind: LayerAttention, longest: int) -> bool:
    return kind.window is not None and kind.window < longest
