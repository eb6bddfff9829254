"""Where layers keep keys and values. Each layer of a group has its own part of the group's blocks; layers of other
groups have theirs in other blocks, where parts may be of other sizes."""

from collections import Counter
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
    """Where a layer's keys and values lie: in blocks of its group, whose layers are numbered."""

    group: int
    number: int


class BlockStrips(NamedTuple):
    """A cache is strips of memory, each with so many units of every block. Layers with the same number share a strip,
    if all that do take equally much; if not, there is one strip, and a group's layers lie in it one behind another."""

    widths: list[int]
    layers: list[tuple[int, int]]
    """The strip of each layer, and where in a block's part of it the layer's own begins."""

    @property
    def by_width(self) -> dict[int, list[int]]:
        """The strips of each width: they lie side by side."""
        return {width: [at for at, own in enumerate(self.widths) if own == width] for width in self.widths}


def groups_of(shape: DecoderShape, longest: int) -> LayerGroups:
    """Groups for a model of this `shape` and sequences of at most `longest` tokens. Where some layers keep states, all
    others have one group."""
    if any(shape.states):
        return ONE_GROUP
    return choose_groups(shape.cached_attention, [shape.kept(kind).numbers for kind in shape.cached_attention], longest)


def choose_groups(attention: Sequence[LayerAttention], sizes: Sequence[int], longest: int) -> LayerGroups:
    """Groups for a model with these layers, of which each keeps so many numbers of a token, and sequences of at most
    `longest` tokens, by which its sequences take the least memory."""
    windows = [kind.window for kind in attention if _slides(kind, longest)]
    if not windows:
        return ONE_GROUP
    window = max(filter(None, windows))
    tokens = min(longest, _USUAL_WINDOWS * window)
    sliding = len(windows)
    full = len(attention) - sliding
    groups, least = ONE_GROUP, (sum(sizes) * tokens * (1 - _LEAST_GAIN), _MOST_GROUPS + 1)
    for of_full in range(min(full, 1), min(full, _MOST_GROUPS - 1) + 1):
        for of_sliding in range(1, min(sliding, _MOST_GROUPS - of_full) + 1):
            candidate = LayerGroups(of_full, of_sliding, window)
            block = block_size(place_layers(attention, candidate, longest), sizes)
            taken = block * (of_full * tokens + of_sliding * min(window, tokens)), candidate.total
            if taken < least:
                groups, least = candidate, taken
    return groups


def place_layers(attention: Sequence[LayerAttention], groups: LayerGroups, longest: int) -> tuple[LayerPlace, ...]:
    """The places of a rank's layers."""
    if not groups.sliding:
        return tuple(LayerPlace(0, layer) for layer in range(len(attention)))
    slides = [_slides(kind, longest) for kind in attention]
    full, sliding = slides.count(False), slides.count(True)
    most = -(-full // max(groups.full, 1)), -(-sliding // groups.sliding)
    numbers = [sum(other == slid for other in slides[:layer]) for layer, slid in enumerate(slides)]
    placed = zip(slides, numbers, strict=True)
    return tuple(LayerPlace(slid * groups.full + number // most[slid], number % most[slid]) for slid, number in placed)


def lay_strips(places: Sequence[LayerPlace], sizes: Sequence[int]) -> BlockStrips:
    """The strips for layers in these places, whose parts of a block take so many units each."""
    by_number: dict[int, set[int]] = {}
    for place, size in zip(places, sizes, strict=True):
        by_number.setdefault(place.number, set()).add(size)
    if all(len(alike) == 1 for alike in by_number.values()):
        widths = [by_number[number].pop() for number in range(len(by_number))]
        return BlockStrips(widths, [(place.number, 0) for place in places])
    taken = Counter[int]()
    layers = []
    for place, size in zip(places, sizes, strict=True):
        layers.append((0, taken[place.group]))
        taken[place.group] += size
    return BlockStrips([max(taken.values())], layers)


def block_size(places: Sequence[LayerPlace], sizes: Sequence[int]) -> int:
    """The units that a block takes of any group."""
    return sum(lay_strips(places, sizes).widths)


def token_room(shape: DecoderShape, groups: LayerGroups, longest: int) -> int:
    """Numbers of keys and values that a block has room for, for each of its tokens."""
    kinds = shape.cached_attention
    return block_size(place_layers(kinds, groups, longest), [shape.kept(kind).numbers for kind in kinds])


def _slides(kind: LayerAttention, longest: int) -> bool:
    return kind.window is not None and kind.window < longest
