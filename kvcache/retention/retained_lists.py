"""Lists of cached blocks beside the pool's own, which make room after it. They are links in its ring: a list of any
length is spliced in one move. Knows no scopes, no tables and no tokens."""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_MAKES_ROOM_FIRST = -1
"""The number of no list: a block that nobody is going to want makes room before all others."""


@dataclass(slots=True)
class RetainedList:
    """Blocks without a holder that make room after all others, in their own order of eviction."""

    sentinel: int
    length: int = 0
    rank: tuple[int, int] = (0, 0)
    """Of several lists the lowest makes room first."""


class RetainedLists:
    """Up to `lists` lists: a cached block may be `assign`ed to one, which takes it when nobody holds it, up to `most`
    in all. `following` and `previous`: the pool's ring of blocks, whose own list's sentinel comes last."""

    def __init__(self, following: "array[int]", previous: "array[int]", lists: int, most: int) -> None:
        self.most = most
        self.length = 0
        """Blocks without a holder, in all lists."""
        self.lists: dict[int, RetainedList] = {}
        self._last_list = 0
        size = self._end = len(following) - 1
        self._sentinels = [*range(size + lists, size, -1)]
        self._list_of = array("q", [0]) * size
        """The list that takes a block when nobody holds it; 0, and a list that has ended, stand for the pool's own."""
        self._next = following
        self._previous = previous
        for ring in (following, previous):
            ring.extend(range(size + 1, size + 1 + lists))

    def place_for(self, block: int, is_cached: bool) -> int:
        """What a block that nobody holds any more is to stand before in the ring. Its list takes it, if it may."""
        number = self._list_of[block]
        if is_cached and (kept := self.lists.get(number)) is not None and self.length < self.most:
            kept.length += 1
            self.length += 1
            return kept.sentinel
        self._list_of[block] = 0
        return self._next[self._end] if number == _MAKES_ROOM_FIRST or not is_cached else self._end

    def left(self, block: int) -> None:
        """A block without a holder is held again, or taken."""
        if (kept := self.lists.get(self._list_of[block])) is not None:
            kept.length -= 1
            self.length -= 1

    def forget(self, block: int) -> None:
        """A block gets new content."""
        self._list_of[block] = 0

    def make_room(self) -> None:
        """Give the pool's own list, which is empty, the blocks of the lowest list."""
        assert self.length, "no block is free"
        self.dissolve(min((kept.rank, number) for number, kept in self.lists.items() if kept.length)[1])

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
            self.length -= kept.length
        self._sentinels.append(kept.sentinel)

    def check_integrity(self, blocks_of: Callable[[int], list[int]]) -> list[int]:
        """All blocks in the lists, by what the ring has behind each sentinel. Raises `AssertionError`."""
        listed: list[int] = []
        for number, kept in self.lists.items():
            blocks = blocks_of(kept.sentinel)
            assert len(blocks) == kept.length, "a list is miscounted"
            assert all(self._list_of[block] == number for block in blocks), "a block is in another's list"
            listed += blocks
        assert len(listed) == self.length <= self.most
        return listed
