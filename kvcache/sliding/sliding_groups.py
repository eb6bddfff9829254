"""The blocks of sliding groups: which the next token sees, which are given up as tokens are computed, and how many
sequences may take.

The one object that the manager has of them, where a model has any. Knows no rows and no steps.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..block_hashes import group_key
from ..block_pool import BlockPool
from ..block_table import NO_BLOCK, BlockTable
from ..layer_groups import LayerGroups, last_end

WINDOW_SLACK = 3
"""Spans that a window takes beside its own: for where it begins and ends within a block, and for tokens that are
proposed."""


class SpanDemand:
    """How many blocks `groups` take. A sequence has its window at most in a sliding group, and what is being computed;
    that is bounded for all sequences together."""

    def __init__(self, groups: LayerGroups, block_size: int) -> None:
        self._groups = groups
        self._usual = groups.window_spans(block_size) + WINDOW_SLACK
        self._in_flight = -(-groups.in_flight // block_size)

    def blocks(self, spans: int) -> int:
        """The most blocks that a sequence of so many spans holds at a time."""
        return self._groups.full * spans + self._groups.sliding * min(spans, self._usual + self._in_flight)

    def longest(self, blocks: int) -> int | None:
        """The most spans of a sequence that so many blocks suffice for; None: of any."""
        groups, most = self._groups, self._usual + self._in_flight
        if blocks < groups.total * most:
            return blocks // groups.total
        return (blocks - groups.sliding * most) // groups.full if groups.full else None

    def to_come(self, spans: int, held: int) -> int:
        """The most blocks that a sequence takes for `spans` more, when it holds `held` in each sliding group."""
        groups = self._groups
        window = min(max(self._usual - held, 0), spans)
        return groups.full * spans + groups.sliding * (window + min(spans - window, self._in_flight))

    def all_to_come(self, spans: NDArray[np.int32], held: NDArray[np.int32]) -> int:
        """The same of several sequences, which share what is in flight."""
        groups = self._groups
        total = int(spans.sum())
        windows = int(np.clip(self._usual - held, 0, spans).sum())
        excess = int(np.maximum(held - self._usual, 0).sum())
        chunks = min(total - windows, max(self._in_flight - excess, 0))
        return groups.full * total + groups.sliding * (windows + chunks)


class SlidingGroups:
    """The sliding ones of `groups`, whose blocks are in `pool`."""

    def __init__(self, groups: LayerGroups, block_size: int, pool: BlockPool) -> None:
        self._groups = groups
        self._window = groups.window_spans(block_size)
        self._block_size = block_size
        self._pool = pool
        self.demand = SpanDemand(groups, block_size)
        self.shared = 0
        """Holds of their blocks beyond the first of each: sequences that share a block will each take one in its place,
        and it does not come back when one of them gives it up."""

    def prefix_end(
        self, hashes: Sequence[bytes], end: int, is_cached: Callable[[bytes], bool], resumable: list[int] | None
    ) -> int:
        """How many of the first `end` spans a sequence can begin with, all of whose blocks of full groups there are:
        of sliding ones it takes those that the next token sees. `resumable`: see `last_end`."""
        number = end
        sliding = range(self._groups.full, self._groups.total)
        while number > max(end - self._window, 0):
            number -= 1
            if not all(is_cached(group_key(hashes[number], group)) for group in sliding):
                number = end = last_end(number, resumable)
        return end

    def share(self, table: BlockTable, first: int, slid: int) -> None:
        """The table holds the blocks of its spans from `first` on, which others may hold too; those before `slid` lack
        sliding groups' blocks."""
        for span in range(first, len(table.blocks) // self._groups.total):
            self.shared += self._holds_beyond_first(table.blocks[self._of_span(span)])
        self._slide_to(table, slid)

    def slide(self, table: BlockTable, computed: int) -> None:
        """Give up the blocks that no token from position `computed` on sees. They stay cached."""
        self._slide_to(table, max(computed + 1 - self._groups.window, 0) // self._block_size)

    def _slide_to(self, table: BlockTable, spans: int) -> None:
        for span in range(table.slid, spans):
            blocks = table.blocks[self._of_span(span)]
            self.shared -= self._holds_beyond_first(blocks)
            for block in reversed(blocks):
                if block != NO_BLOCK:
                    self._pool.drop(block)
            table.blocks[self._of_span(span)] = [NO_BLOCK] * self._groups.sliding
        table.slid = max(table.slid, spans)

    def close(self, table: BlockTable) -> None:
        """The table is about to give all its blocks back."""
        for group in range(self._groups.full, self._groups.total):
            self.shared -= self._holds_beyond_first(table.blocks[group :: self._groups.total])

    def _of_span(self, span: int) -> slice:
        """Where the blocks of a span lie in a table."""
        total = self._groups.total
        return slice(span * total + self._groups.full, (span + 1) * total)

    def _holds_beyond_first(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are held by another table too."""
        return sum(block != NO_BLOCK and self._pool.references[block] > 1 for block in blocks)

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Recompute what slid, and who shares, from all tables. Raises `AssertionError`."""
        held: list[int] = []
        for table in tables:
            for span in range(len(table.blocks) // self._groups.total):
                blocks = table.blocks[self._of_span(span)]
                assert all((block == NO_BLOCK) == (span < table.slid) for block in blocks), "slid, or not"
                held += [block for block in blocks if block != NO_BLOCK]
        assert self.shared == len(held) - len(set(held)), "holds of sliding blocks are miscounted"
