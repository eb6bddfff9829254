"""The blocks of one sequence, and what was found of it in the cache."""

from collections.abc import Sequence

NO_BLOCK = -1
"""In a table: the block of a sliding group that no token sees any more."""


class BlockTable:
    """The blocks of one sequence. The manager alone fills and frees it.

    Blocks stand in order of position, span by span: of the first tokens one of each group, and so on. A table only
    grows, but that NO_BLOCK takes the place of a sliding group's block behind the window.
    """

    __slots__ = (
        "blocks",
        "cached",
        "committed",
        "forked",
        "landed",
        "promised",
        "restored",
        "slid",
        "snapshot",
        "states",
    )

    def __init__(self, promised: Sequence[bytes]) -> None:
        self.blocks: list[int] = []
        self.cached = 0
        """Tokens whose blocks `open` and `restore` found."""
        self.committed = 0
        """Leading spans that are findable, or equal to one that is."""
        self.promised = promised
        """The hashes known at `open`; those from `committed` on are what this sequence is computing."""
        self.slid = 0
        """Leading spans without the blocks of sliding groups."""
        self.landed = 0
        """Tokens of `cached` whose blocks had landed from elsewhere."""
        self.restored = 0
        """Tokens of `cached` that came back from the host's memory."""
        self.snapshot = -1
        """The snapshot that the sequence's state begins as; -1: as nothing."""
        self.states: list[bytes] = []
        """The hashes of the last two snapshots of the prefix, the last of which ends it."""
        self.forked = 0
        """Tokens, `cached` or more, of which others had the blocks at `open`, or were computing them, whatever states
        there were."""
