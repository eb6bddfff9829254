"""Numbered blocks, who holds them, and which are found again by their hash. Knows no tables and no tokens."""

from array import array
from collections.abc import Iterable

from .events.cache_events import CacheEvents
from .retention.retained_lists import RetainedLists


class BlockPool:
    """Numbered blocks 0 to `size` - 1, each held by `references[block]` tables.

    Blocks without a holder form an intrusive doubly linked list in eviction order; one that has a hash can still be
    found there. So free and cached blocks are the same list, and caching costs no memory:

    ======================  =======  ==========  =====================
    block is                holders  in the list  findable by its hash
    ======================  =======  ==========  =====================
    being filled            1        no          no
    full, committed         1 or more no         yes
    cached                  0        yes, tail   yes, until taken
    worthless               0        yes, head   no
    ======================  =======  ==========  =====================

    """

    def __init__(self, size: int, events: CacheEvents | None = None, lists: int = 0, most_retained: int = 0) -> None:
        """Beside the list there may be `lists` others, whose blocks, `most_retained` in all, make room after it."""
        self.size = size
        self._events = events
        self.free = size
        self.references = array("i", [0]) * size
        self._end = size  # the sentinel that closes the ring: its next is the head, its previous the tail
        self._next = array("i", [*range(1, size + 1), 0])
        self._previous = array("i", [size, *range(size)])
        self.retained = RetainedLists(self._next, self._previous, lists, most_retained) if lists else None
        """None: nobody asks to retain blocks beyond their turn."""
        self._hashes: list[bytes | None] = [None] * size
        self._index: dict[bytes, int] = {}
        self.is_cached = self._index.__contains__
        """Whether a block of this hash can be found; asked of each block of a prompt, so without a call of Python's."""

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._index

    def take(self) -> tuple[int, bytes | None]:
        """Hold the block at the head of the list; the hash of what it cached is forgotten, and returned. One must be
        free."""
        if self.retained is not None and self._next[self._end] == self._end:
            self.retained.make_room()
        block: int = self._next[self._end]
        assert block != self._end, "no block is free"
        self._unlink(block)
        if self.retained is not None:
            self.retained.forget(block)
        digest, self._hashes[block] = self._hashes[block], None
        if digest is not None:
            del self._index[digest]
            if self._events is not None:
                self._events.removed(digest, on_host=False)
        self.references[block] = 1
        return block, digest

    def share(self, digest: bytes) -> int | None:
        """Hold the block of this hash once more, or None where no block has it."""
        block = self._index.get(digest)
        if block is None:
            return None
        if self.references[block] == 0:
            self._unlink(block)
        self.references[block] += 1
        return block

    def publish(self, block: int, digest: bytes) -> None:
        """Make a full block findable. Of two blocks with equal content the first stays the one that is found."""
        if digest not in self._index:
            self._index[digest] = block
            self._hashes[block] = digest
            if self._events is not None:
                self._events.stored(digest, on_host=False)

    def drop(self, block: int) -> None:
        """Give up one hold. A block that can be found again goes to the tail; one without a hash is taken first."""
        self.references[block] -= 1
        if self.references[block]:
            return
        is_cached = self._hashes[block] is not None
        after: int = self._end if is_cached else self._next[self._end]
        if self.retained is not None:
            after = self.retained.place_for(block, is_cached)
        before = self._previous[after]
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self.free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.free -= 1
        if self.retained is not None:
            self.retained.left(block)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Recompute everything from `held`: every block of every table, repeated where shared."""
        references = [0] * self.size
        for block in held:
            references[block] += 1
        assert references == self.references.tolist(), "a reference count is not the number of holders"
        listed = self._listed(self._end)
        if self.retained is not None:
            listed += self.retained.check_integrity(self._listed)
        assert sorted(listed) == [block for block in range(self.size) if references[block] == 0]
        assert self.free == len(listed)
        hashed = {digest: block for block, digest in enumerate(self._hashes) if digest is not None}
        assert hashed == self._index, "index and blocks disagree"

    def _listed(self, sentinel: int) -> list[int]:
        """The blocks of a list, in order."""
        listed, block = list[int](), self._next[sentinel]
        while block != sentinel:
            assert self._next[self._previous[block]] == block == self._previous[self._next[block]]
            listed.append(block)
            assert len(listed) <= self.size, "a list runs in a circle"
            block = self._next[block]
        return listed
