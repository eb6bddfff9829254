"""What the layers of a model keep of a sequence: all of its tokens, or the last ones.

Layers are divided into groups that keep about equally much, so that a block, which is of one group, takes the same
memory whatever group it is of: all of them share a pool, and what each gets follows the demand.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WINDOW_SLACK = 3
"""Spans that a window takes beside its own: for where it begins and ends within a block, and for tokens that are
proposed."""


class LayerGroups(NamedTuple):
    """`full` groups, which keep every token, then `sliding` ones, which keep what later tokens still see. The blocks
    that all of them have of the same tokens are a span."""

    full: int = 1
    sliding: int = 0
    window: int = 0
    """A token of a sliding layer attends to so many of the last tokens, itself included."""
    in_flight: int = 0
    """Tokens of all sequences that plans in flight may compute together: sliding layers keep them until they are
    computed."""

    @property
    def total(self) -> int:
        return self.full + self.sliding


class SpanDemand:
    """How many blocks `groups` take. A sequence has its window at most in a sliding group, and what is being computed;
    that is bounded for all sequences together."""

    def __init__(self, groups: LayerGroups, block_size: int) -> None:
        self.groups = groups
        self.window = -(-max(groups.window - 1, 0) // block_size)
        """Spans with what the first token after them sees."""
        self._usual = self.window + WINDOW_SLACK
        self._in_flight = -(-groups.in_flight // block_size)

    def blocks(self, spans: int) -> int:
        """The most blocks that a sequence of so many spans holds at a time."""
        return self.groups.full * spans + self.groups.sliding * min(spans, self._usual + self._in_flight)

    def longest(self, blocks: int) -> int | None:
        """The most spans of a sequence that so many blocks suffice for; None: of any."""
        groups, most = self.groups, self._usual + self._in_flight
        if blocks < groups.total * most or not groups.sliding:
            return blocks // groups.total
        return (blocks - groups.sliding * most) // groups.full if groups.full else None

    def to_come(self, spans: int, held: int) -> int:
        """The most blocks that a sequence takes for `spans` more, when it holds `held` in each sliding group."""
        groups = self.groups
        window = min(max(self._usual - held, 0), spans)
        return groups.full * spans + groups.sliding * (window + min(spans - window, self._in_flight))

    def all_to_come(self, spans: NDArray[np.int32], held: NDArray[np.int32]) -> int:
        """The same of several sequences, which share what is in flight."""
        groups = self.groups
        total = int(spans.sum())
        windows = int(np.clip(self._usual - held, 0, spans).sum())
        excess = int(np.maximum(held - self._usual, 0).sum())
        chunks = min(total - windows, max(self._in_flight - excess, 0))
        return groups.full * total + groups.sliding * (windows + chunks)


ONE_GROUP = LayerGroups()
"""All layers keep every token."""


def last_end(most: int, ends: list[int] | None) -> int:
    """The last of these ends that is not beyond `most`; those that are, are taken out."""
    if ends is None:
        return most
    while ends and ends[-1] > most:
        ends.pop()
    return ends[-1] if ends else 0
