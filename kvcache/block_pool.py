"""Numbered blocks, who holds them, and which are found again by their hash. Knows no tables and no tokens."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from .events.cache_events import CacheEvents

_MAKES_ROOM_FIRST = -1
"""The number of no list: a block that nobody is going to want makes room before all others."""


@dataclass(slots=True)
class RetainedList:
    """Blocks without a holder that make room after all others, in their own order of eviction."""

    sentinel: int
    length: int = 0
    rank: tuple[int, int] = (0, 0)
    """Of several lists the lowest makes room first."""


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

    Beside it there are up to `lists` others: a cached block may be `assign`ed to one, which takes it when nobody holds
    it, up to `most_retained` in all. They make room when the list has no block.
    """

    def __init__(self, size: int, events: CacheEvents | None = None, lists: int = 0, most_retained: int = 0) -> None:
        self.size = size
        self.most_retained = most_retained
        self.retained = 0
        """Blocks without a holder in the other lists."""
        self.lists: dict[int, RetainedList] = {}
        self._last_list = 0
        self._sentinels = [*range(size + lists, size, -1)]
        self._list_of = array("q", [0]) * size
        """The list that takes a block when nobody holds it; 0, and a list that has ended, stand for the usual one."""
        self._events = events
        self.free = size
        self.references = array("i", [0]) * size
        self._end = size  # the sentinel that closes the ring: its next is the head, its previous the tail
        self._next = array("i", [*range(1, size + 1), 0, *range(size + 1, size + 1 + lists)])
        self._previous = array("i", [size, *range(size), *range(size + 1, size + 1 + lists)])
        self._hashes: list[bytes | None] = [None] * size
        self._index: dict[bytes, int] = {}
        self.is_cached = self._index.__contains__
        """Whether a block of this hash can be found; asked of each block of a prompt, so without a call of Python's."""

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._index

    def take(self) -> tuple[int, bytes | None]:
        """Hold the block at the head of the list; the hash of what it cached is forgotten, and returned. One must be
        free."""
        block: int = self._next[self._end]
        while block == self._end:
            assert self.retained, "no block is free"
            self.dissolve(min((kept.rank, number) for number, kept in self.lists.items() if kept.length)[1])
            block = self._next[self._end]
        self._unlink(block)
        self._list_of[block] = 0
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
        after = self._end
        number = self._list_of[block]
        if self._hashes[block] is None or number == _MAKES_ROOM_FIRST:
            after = self._next[self._end]
            self._list_of[block] = 0
        elif number and (kept := self.lists.get(number)) is not None and self.retained < self.most_retained:
            after = kept.sentinel
            kept.length += 1
            self.retained += 1
        elif number:
            self._list_of[block] = 0
        before = self._previous[after]
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self.free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.free -= 1
        if (number := self._list_of[block]) and (kept := self.lists.get(number)) is not None:
            kept.length -= 1
            self.retained -= 1

    def open_list(self) -> int | None:
        """The number of a new list, which no other ever has; None where there are too many."""
        if not self._sentinels:
            return None
        self._last_list += 1
        self.lists[self._last_list] = RetainedList(self._sentinels.pop())
        return self._last_list

    def assign(self, blocks: Iterable[int], number: int, common: int) -> None:
        """Let the list of this number take these blocks, which are held, when nobody holds them any more; or the list
        `common`, where another one would take them."""
        list_of, lists = self._list_of, self.lists
        for block in blocks:
            list_of[block] = number if list_of[block] == number or list_of[block] not in lists else common

    def expect_no_use(self, blocks: Iterable[int]) -> None:
        """Let these blocks, which are held, be the next to make room when nobody holds them."""
        for block in blocks:
            if self._list_of[block] not in self.lists:
                self._list_of[block] = _MAKES_ROOM_FIRST

    def dissolve(self, number: int, first: bool = False) -> None:
        """Let the blocks of a list be as all others, as if they had just been used, or be the `first` to make room; in
        a time that does not depend on their number."""
        kept = self.lists.pop(number)
        head, tail = self._next[kept.sentinel], self._previous[kept.sentinel]
        if head != kept.sentinel:
            before = self._end if first else self._previous[self._end]
            after = self._next[before]
            self._next[before], self._previous[head] = head, before
            self._next[tail], self._previous[after] = after, tail
            self._next[kept.sentinel] = self._previous[kept.sentinel] = kept.sentinel
            self.retained -= kept.length
        self._sentinels.append(kept.sentinel)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Recompute everything from `held`: every block of every table, repeated where shared."""
        references = [0] * self.size
        for block in held:
            references[block] += 1
        assert references == self.references.tolist(), "a reference count is not the number of holders"
        listed = self._listed(self._end)
        for number, kept in self.lists.items():
            retained = self._listed(kept.sentinel)
            assert len(retained) == kept.length, "a list is miscounted"
            assert all(self._list_of[block] == number for block in retained), "a block is in another's list"
            listed += retained
        assert sum(kept.length for kept in self.lists.values()) == self.retained <= self.most_retained
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
