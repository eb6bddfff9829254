"""The blocks of one sequence, and what was found of it in the cache."""

from collections.abc import Sequence

NO_BLOCK = -1
"""In a table: the block of a sliding group that no token sees any more."""


class BlockTable:
    """The blocks of one sequence in order of position, span by span: of the first tokens one of each group, and so on.
    Filled and freed by the manager alone, append-only, but that NO_BLOCK takes the place of one of a sliding group: the
    first `slid` spans have none. `cached`: tokens that `open` and `restore` found, `restored` of them the latter.
    `committed`: leading spans that are findable, or equal to one that is. `promised`: the hashes known at `open`; those
    from `committed` on are what this sequence is computing.

    Where sequences have states: `snapshot` is the one that this one's state begins as, -1 for as nothing, and `forked`
    are the tokens, `cached` or more, of which others had the blocks at `open`, or were computing them. `states`: the
    hashes of the last two snapshots of the prefix, the last of which ends it.
    """

    __slots__ = ("blocks", "cached", "committed", "forked", "promised", "restored", "slid", "snapshot", "states")

    def __init__(self, promised: Sequence[bytes]) -> None:
        self.blocks: list[int] = []
        self.cached = 0
        self.committed = 0
        self.promised = promised
        self.slid = 0
        self.restored = 0
        self.snapshot = -1
        self.states: list[bytes] = []
        self.forked = 0
