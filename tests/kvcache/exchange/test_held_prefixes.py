"""Prefixes that no sequence has: held for others, or on their way here; in any order beside sequences of all kinds."""

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from charonia.kvcache.block_table import NO_BLOCK, BlockTable
from charonia.kvcache.exchange.held_prefixes import ArrivingPrefix, HeldPrefixes
from charonia.kvcache.layer_groups import ONE_GROUP, LayerGroups
from charonia.kvcache.manager import KVCacheManager

SIZE = 2
SLIDING = LayerGroups(1, 2, window=5, in_flight=8)


def hashes_of(cache: KVCacheManager, stream: int, blocks: int) -> list[bytes]:
    return cache.digest(range(1000 * stream, 1000 * stream + blocks * SIZE))


def computed(cache: KVCacheManager, hashes: list[bytes]) -> BlockTable:
    """The table of a sequence that has computed all of these, block by block."""
    table = cache.open(hashes, len(hashes) * SIZE + 1)
    cache.restore(table, len(hashes) * SIZE + 1)
    cache.take_block_copies()
    if cache.states is not None:
        cache.states.plan_is_made()
    for end in range(table.committed + 1, len(hashes) + 1):
        if not cache.extend(table, end * SIZE):
            break
        cache.commit(table, hashes[table.committed : end])
        if cache.sliding is not None:
            cache.sliding.slide(table, end * SIZE)
    return table


@pytest.mark.parametrize("groups", [ONE_GROUP, SLIDING])
def test_what_is_held_stays_whatever_comes_after(groups: LayerGroups) -> None:
    cache = KVCacheManager(30, SIZE, groups=groups)
    held = HeldPrefixes(cache, 20, 1)
    hashes = hashes_of(cache, 0, 6)
    cache.close(computed(cache, hashes))
    assert held.hold("a", hashes, until=10.0) == 0
    free = cache.free_blocks
    for stream in range(1, 6):
        cache.close(computed(cache, hashes_of(cache, stream, 5)))
    assert cache.free_blocks == free == 30 - held.blocks
    assert cache.shareable(hashes, 13) == 12
    assert cache.open_tables == 0
    assert held.expire(9.9) == 0
    assert held.expire(10.0) == 1
    assert cache.free_blocks == 30
    cache.check_integrity()


def test_the_oldest_make_room_and_what_is_too_large_is_not_held() -> None:
    cache = KVCacheManager(40, SIZE)
    held = HeldPrefixes(cache, 10, 1)
    for stream, name in enumerate("abc"):
        hashes = hashes_of(cache, stream, 4)
        cache.close(computed(cache, hashes))
        assert held.hold(name, hashes, 1.0) == (name == "c")
    assert held.held.get("a") is None
    assert held.blocks == 8
    long = hashes_of(cache, 7, 11)
    cache.close(computed(cache, long))
    assert held.hold("d", long, 1.0) is None
    assert held.hold("b", hashes, 1.0) is None, "a handle is one prefix's"
    assert held.release("b")
    assert not held.release("b")
    assert held.release_oldest()
    assert not held.release_oldest()
    assert cache.free_blocks == 40


def test_a_held_state_makes_no_room() -> None:
    cache = KVCacheManager(40, SIZE, snapshots=2)
    assert cache.states is not None
    held = HeldPrefixes(cache, 20, 1)
    hashes = hashes_of(cache, 0, 3)
    cache.close(computed(cache, hashes))
    cache.states.publish(_reserved(cache), hashes[-1])
    held.hold("a", hashes, 1.0)
    for stream in (1, 2, 3):
        cache.states.publish(_reserved(cache), hashes_of(cache, stream, 1)[0])
    assert hashes[-1] in cache.states
    held.release("a")
    cache.states.publish(_reserved(cache), hashes_of(cache, 4, 1)[0])
    assert hashes[-1] not in cache.states


def test_held_states_leave_room_for_others() -> None:
    cache = KVCacheManager(40, SIZE, snapshots=4)
    assert cache.states is not None
    held = HeldPrefixes(cache, 20, 2)
    for stream in range(4):
        hashes = hashes_of(cache, stream, 2)
        cache.close(computed(cache, hashes))
        cache.states.publish(_reserved(cache), hashes[-1])
        assert held.hold(str(stream), hashes, 1.0) == (2 if stream > 1 else 0)
        assert held.hold(f"{stream} again", hashes, 1.0) == 0, "of one snapshot there is one"
    assert cache.states.pinned == 2
    assert held.held.get("2") is not None
    _reserved(cache)


def _reserved(cache: KVCacheManager) -> int:
    assert cache.states is not None
    place = cache.states.reserve()
    assert place is not None
    return place


@pytest.mark.parametrize("groups", [ONE_GROUP, SLIDING])
def test_what_arrives_has_the_places_that_what_is_held_has(groups: LayerGroups) -> None:
    """The two servers cut a prefix into the same places, or their bytes would go astray."""
    here, there = (KVCacheManager(80, SIZE, groups=groups) for _ in range(2))
    hashes = hashes_of(here, 0, 9)
    here.close(computed(here, hashes))
    held = HeldPrefixes(here, 60, 1)
    held.hold("a", hashes, 1.0)
    prefix = held.held.get("a")
    assert prefix is not None
    arriving = ArrivingPrefix(there, hashes)
    assert arriving.reserve(0)
    spans = groups.total
    for span in range(9):
        sent = [block for block in prefix.table.blocks[span * spans : (span + 1) * spans] if block != NO_BLOCK]
        assert len(sent) == len(arriving.blocks(span, span + 1))
    arriving.arrived(9)
    arriving.close()
    there.check_integrity()
    assert there.shareable(hashes, 19) == 18
    assert there.open(hashes, 19).cached == 18


def test_an_arrival_that_breaks_off_keeps_what_came() -> None:
    cache = KVCacheManager(12, SIZE)
    hashes = hashes_of(cache, 0, 8)
    arriving = ArrivingPrefix(cache, hashes)
    assert not arriving.reserve(5)
    assert arriving.reserve(4)
    assert cache.free_blocks == 4
    arriving.arrived(3)
    arriving.end()
    assert cache.free_blocks == 9
    assert cache.shareable(hashes, 17) == 6
    arriving.close()
    assert cache.free_blocks == 12
    cache.check_integrity()


class PrefixMachine(RuleBasedStateMachine):
    """Sequences, held prefixes and arriving ones of three streams, over one cache."""

    @initialize(blocks=st.integers(8, 60), sliding=st.booleans(), snapshots=st.integers(0, 3))
    def begin(self, blocks: int, sliding: bool, snapshots: int) -> None:
        groups = SLIDING if sliding else ONE_GROUP
        self.cache = KVCacheManager(blocks, SIZE, groups=groups, snapshots=snapshots)
        self.held = HeldPrefixes(self.cache, blocks // 2, max(snapshots - 1, 1))
        self.tables: list[BlockTable] = []
        self.arriving: list[ArrivingPrefix] = []
        self.handles = count()

    @rule(stream=st.integers(0, 2), blocks=st.integers(1, 12), ends=st.booleans())
    def compute(self, stream: int, blocks: int, ends: bool) -> None:
        hashes = hashes_of(self.cache, stream, blocks)
        if not self.cache.room_for(probe := self.cache.open(hashes, 1), blocks * SIZE):
            self.cache.close(probe)
            return
        self.cache.close(probe)
        table = computed(self.cache, hashes)
        states = self.cache.states
        if states is not None and table.committed == blocks and (place := states.reserve()) is not None:
            states.publish(place, hashes[-1])
        if ends:
            self.cache.close(table)
        else:
            self.tables.append(table)

    @rule(stream=st.integers(0, 2), blocks=st.integers(1, 12), until=st.integers(0, 5))
    def hold(self, stream: int, blocks: int, until: int) -> None:
        self.held.hold(str(next(self.handles)), hashes_of(self.cache, stream, blocks), until)

    @rule(now=st.integers(0, 5))
    def expire(self, now: int) -> None:
        self.held.expire(now)

    @rule(stream=st.integers(0, 2), blocks=st.integers(1, 12), spare=st.integers(0, 4))
    def reserve(self, stream: int, blocks: int, spare: int) -> None:
        arriving = ArrivingPrefix(self.cache, hashes_of(self.cache, stream, blocks))
        free = self.cache.free_blocks
        if arriving.reserve(spare):
            self.arriving.append(arriving)
        else:
            assert self.cache.free_blocks == free, "what finds no room takes none"
            arriving.close()

    @precondition(lambda self: getattr(self, "arriving", None))
    @rule(data=st.data(), how=st.sampled_from(("part", "all", "end", "state")))
    def arrive(self, data: st.DataObject, how: str) -> None:
        arriving = data.draw(st.sampled_from(self.arriving))
        total, committed = len(arriving.hashes), arriving.table.committed
        if how == "end":
            arriving.end()
        elif how == "part" and self.cache.begins_anywhere and arriving.blocks(committed, committed + 1):
            arriving.arrived(min(committed + 1, total))
        elif how != "part" and len(arriving.table.blocks) == total * self.cache.groups.total:
            arriving.arrived(total)
            if how == "state":
                arriving.place_state(lambda place: None)

    @precondition(lambda self: getattr(self, "arriving", None) or getattr(self, "tables", None))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if self.arriving and data.draw(st.booleans()):
            self.arriving.pop().close()
        elif self.tables:
            self.cache.close(self.tables.pop(0))

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()
            assert self.cache.open_tables == len(self.tables)
            assert self.held.blocks <= self.cache.blocks // 2
            if self.cache.states is not None:
                self.cache.states.check_integrity([], [])


PrefixMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestPrefixMachine = PrefixMachine.TestCase
