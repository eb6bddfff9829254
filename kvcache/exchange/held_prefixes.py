"""Prefixes that no sequence has and that stay all the same: computed ones until a peer has fetched them, and fetched
ones until their sequence is admitted. Knows no peers, no bytes and no clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..block_table import NO_BLOCK, BlockTable
from ..manager import KVCacheManager

_SPANS_AT_ONCE = 16
"""Spans that an arriving prefix grows by before what no later token sees is given up."""


@dataclass(slots=True, eq=False)
class HeldPrefix:
    """A prefix that is computed, and that a peer may fetch."""

    hashes: list[bytes]
    """The hashes of its spans, all of which are cached."""
    table: BlockTable
    state: bytes | None
    """The hash of the snapshot that ends it, where sequences have states."""
    until: float
    """When it is given up."""


class HeldPrefixes:
    """Computed prefixes by their handles. Together they hold `most_blocks`, and `most_states` snapshots, at most: the
    oldest make room."""

    def __init__(self, cache: KVCacheManager, most_blocks: int, most_states: int) -> None:
        self._cache = cache
        self._most_blocks = most_blocks
        self._most_states = most_states
        self.held: dict[str, HeldPrefix] = {}
        """By handle, to look at."""

    def __len__(self) -> int:
        return len(self.held)

    @property
    def blocks(self) -> int:
        """Blocks that they hold, those that several share as often."""
        return sum(self._cache.held_blocks(prefix.table) for prefix in self.held.values())

    def hold(self, handle: str, hashes: Sequence[bytes], until: float) -> int | None:
        """Keep what is cached of these hashes; how many older prefixes made room. None: it is more than all may hold,
        or the handle is taken."""
        if handle in self.held:
            return None
        table = open_cached(self._cache, hashes)
        needed = self._cache.held_blocks(table)
        if needed > self._most_blocks:
            self._cache.close(table)
            return None
        dropped = 0
        while needed + self.blocks > self._most_blocks:
            self.release_oldest()
            dropped += 1
        states, state = self._cache.states, table.states[-1] if table.states else None
        if states is not None and state is not None:
            while not states.is_pinned(state) and states.pinned >= self._most_states:
                self.release_oldest()
                dropped += 1
            states.pin(state)
        self._cache.held_tables += 1
        self.held[handle] = HeldPrefix(list(table.promised), table, state, until)
        return dropped

    def release(self, handle: str) -> bool:
        """Give a prefix up, which stays cached as any other. False: there is none of this handle."""
        prefix = self.held.pop(handle, None)
        if prefix is None:
            return False
        self._cache.held_tables -= 1
        self._cache.close(prefix.table)
        if self._cache.states is not None and prefix.state is not None:
            self._cache.states.unpin(prefix.state)
        return True

    def release_oldest(self) -> bool:
        """False: there is none."""
        return bool(self.held) and self.release(next(iter(self.held)))

    def expire(self, now: float) -> int:
        """Give up those whose time has passed; how many there were."""
        late = [handle for handle, prefix in self.held.items() if prefix.until <= now]
        return sum(map(self.release, late))


def open_cached(cache: KVCacheManager, hashes: Sequence[bytes]) -> BlockTable:
    """A table of what is cached of these hashes, which promises nothing."""
    table = cache.open(hashes, len(hashes) * cache.block_size + 1)
    if table.committed < len(hashes):
        known = hashes[: table.committed]
        cache.close(table)
        table = cache.open(known, len(known) * cache.block_size + 1)
    return table


class ArrivingPrefix:
    """A prefix whose blocks come from elsewhere, span by span: its table holds a place for each, which others find once
    its content is there."""

    def __init__(self, cache: KVCacheManager, hashes: Sequence[bytes]) -> None:
        """`hashes`: of all its spans. What is cached already need not come."""
        self._cache = cache
        self.hashes = list(hashes)
        self.table = open_cached(cache, self.hashes)
        cache.held_tables += 1
        self.first = self.table.committed
        """The first span that has to come."""

    def reserve(self, spare: int) -> bool:
        """Take a place for each span, and leave `spare` blocks; all or nothing."""
        cache, size = self._cache, self._cache.block_size
        if not cache.room_for(self.table, len(self.hashes) * size, spare):
            return False
        for end in [*range(self.first + _SPANS_AT_ONCE, len(self.hashes), _SPANS_AT_ONCE), len(self.hashes)]:
            if not cache.extend(self.table, end * size):
                self.end()
                return False
            if cache.sliding is not None:
                cache.sliding.slide(self.table, end * size)
        return True

    def blocks(self, first: int, end: int) -> list[int]:
        """The places of these spans' blocks, span by span, but of sliding groups only what later tokens see."""
        spans = self._cache.groups.total
        return [block for block in self.table.blocks[first * spans : end * spans] if block != NO_BLOCK]

    def arrived(self, end: int) -> list[bytes]:
        """The content of all spans before `end` is in its place: from now on it is found. Their hashes."""
        fresh = self.hashes[self.table.committed : end]
        self._cache.commit(self.table, fresh)
        return fresh

    def place_state(self, write: Callable[[int], None]) -> bool:
        """Have `write` put the state after all of it into a snapshot, which is found from now on. False: there is no
        room for one."""
        states = self._cache.states
        place = None if states is None else states.reserve()
        if states is None or place is None:
            return False
        write(place)
        states.publish(place, self.hashes[-1])
        return True

    def end(self) -> None:
        """No more is to come: keep what did, and give the other places back."""
        arrived = self.hashes[: self.table.committed]
        self._cache.close(self.table)
        self.table = open_cached(self._cache, arrived)

    def close(self) -> None:
        """Its sequence shares it by now, or is gone."""
        self._cache.held_tables -= 1
        self._cache.close(self.table)
