"""Snapshots: which of them make room, and that none is lost."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from charonia.kvcache.manager import KVCacheManager
from charonia.kvcache.states.state_pool import StatePool
from charonia.kvcache.tiers.host_tier import HostTier


def keep(pool: StatePool, *names: str) -> None:
    """Keep the states of these hashes, one after the other."""
    for name in names:
        snapshot = pool.reserve()
        assert snapshot is not None
        pool.publish(snapshot, name.encode())


def found(pool: StatePool, names: str) -> str:
    return "".join(name for name in names if name.encode() in pool)


def use(pool: StatePool, name: str) -> int:
    snapshot = pool.restore(name.encode())
    pool.plan_is_made()
    return snapshot


def test_the_one_used_longest_ago_makes_room() -> None:
    pool = StatePool(3)
    keep(pool, *"abc")
    use(pool, "a")
    keep(pool, *"de")
    assert found(pool, "abcde") == "ade"
    assert pool.evicted == 2


def test_one_that_was_restored_twice_outlives_any_number_that_never_are() -> None:
    pool = StatePool(4)
    keep(pool, "a")
    use(pool, "a")
    use(pool, "a")
    for _ in range(3):
        keep(pool, *"bcdefghijk")
    assert found(pool, "ab") == "a"


def test_a_proven_one_that_is_not_used_any_more_makes_room_at_last() -> None:
    pool = StatePool(2)
    for name in "abc":
        keep(pool, name)
        use(pool, name)
        use(pool, name)
    keep(pool, "d")
    assert found(pool, "abcd") == "cd"


def test_what_the_plan_in_the_making_reads_is_not_reserved() -> None:
    pool = StatePool(2)
    keep(pool, *"ab")
    read = pool.restore(b"a")
    written = pool.reserve()
    assert written is not None
    assert written != read
    assert pool.reserve() is None
    pool.plan_is_made()
    assert pool.reserve() == read, "a later plan comes after it"


def test_of_two_equal_snapshots_the_first_stays() -> None:
    pool = StatePool(2)
    first, second = pool.reserve(), pool.reserve()
    assert first is not None
    assert second is not None
    pool.publish(second, b"a")
    pool.publish(first, b"a")
    assert pool.restore(b"a") == second
    pool.plan_is_made()
    pool.check_integrity([], [])


@pytest.mark.parametrize("uses", [0, 1, 2])
def test_a_demoted_one_is_the_next_to_make_room(uses: int) -> None:
    pool = StatePool(4)
    keep(pool, *"abcd")
    for _ in range(uses):
        use(pool, "d")
    pool.demote(b"d")
    pool.demote(b"never kept")
    keep(pool, "e")
    assert found(pool, "abcde") == "abce"


def filled(cache: KVCacheManager, tokens: int) -> list[bytes]:
    """A sequence that computed so many tokens and is gone; its hashes."""
    hashes = cache.digest(range(tokens))
    table = cache.open(hashes, tokens)
    assert cache.extend(table, tokens)
    cache.commit(table, hashes[table.committed :])
    cache.close(table)
    return hashes


def test_a_prefix_is_shared_up_to_a_state_that_is_kept() -> None:
    cache = KVCacheManager(16, 4, snapshots=4)
    assert cache.states is not None
    hashes = filled(cache, 24)
    table = cache.open(hashes, 24)
    cache.restore(table, 24)
    assert (table.cached, table.forked, table.snapshot) == (0, 20, -1)
    cache.close(table)
    for number in (2, 3):
        snapshot = cache.states.reserve()
        assert snapshot is not None
        cache.states.publish(snapshot, hashes[number - 1])
    table = cache.open(hashes, 24)
    cache.restore(table, 24)
    assert (table.cached, table.forked, table.snapshot) == (12, 20, snapshot)
    assert cache.open(hashes, 12).cached == 8, "the newest token has to run"
    assert cache.shareable(hashes, 24) == 12
    assert cache.forked(hashes, 24) == 20


def test_a_state_without_its_blocks_is_not_found_and_makes_room() -> None:
    cache = KVCacheManager(4, 4, snapshots=2)
    assert cache.states is not None
    hashes = filled(cache, 16)
    for number in (4, 1):
        snapshot = cache.states.reserve()
        assert snapshot is not None
        cache.states.publish(snapshot, hashes[number - 1])
    other = cache.open(cache.digest(range(100, 104)), 4)
    assert cache.extend(other, 4), "the last block of the first sequence is taken"
    assert cache.open(hashes, 17).cached == 4
    assert cache.states.reserve() is not None
    assert hashes[3] not in cache.states
    assert hashes[0] in cache.states


def test_what_made_room_comes_back_from_the_host() -> None:
    pool = StatePool(2, host_size=2)
    keep(pool, *"abc")
    assert found(pool, "abc") == "bc"
    assert [name for name in (b"a", b"b", b"c") if pool.is_kept(name)] == [b"a", b"b", b"c"]
    [away] = pool.host.take_copies()
    assert pool.bring_back(b"a", but=[b"b"])
    [other, back] = pool.host.take_copies()
    assert (away.back, other.back, back.back) == (False, False, True)
    assert back.slot == away.slot
    assert back.place == other.place == pool.restore(b"a")
    assert found(pool, "abc") == "ab", "not the oldest made room, for it was to stay"
    pool.plan_is_made()
    keep(pool, *"de")
    assert [copy.back for copy in pool.host.take_copies()] == [False], "what came back is on the host still"
    pool.check_integrity([], [])


def test_a_state_for_which_there_is_no_room_stays_on_the_host() -> None:
    pool = StatePool(1, host_size=2)
    keep(pool, *"ab")
    pool.restore(b"b")
    assert not pool.bring_back(b"a")
    pool.plan_is_made()
    assert pool.bring_back(b"a")
    one_slot = StatePool(1, host_size=1)
    keep(one_slot, *"ab")
    assert not one_slot.bring_back(b"a"), "what makes room for it takes its place"
    one_slot.check_integrity([], [])


def test_what_is_of_no_use_is_not_taken_to_the_host() -> None:
    pool = StatePool(2, host_size=2)
    keep(pool, *"ab")
    pool.demote(b"b")
    keep(pool, "c")
    assert not pool.is_kept(b"b")
    pool.demote(b"a")
    use(pool, "a")
    keep(pool, *"de")
    assert pool.is_kept(b"a"), "it was used after all"
    pool.demote(b"a")
    keep(pool, *"fg")
    assert not pool.is_kept(b"a"), "the first to be overwritten there"


@pytest.mark.parametrize("tokens", [24, 40])
def test_a_prefix_is_shared_up_to_a_state_whose_blocks_and_itself_are_on_the_device_or_the_host(tokens: int) -> None:
    cache = KVCacheManager(8, 4, host_blocks=20, snapshots=1, host_snapshots=9)
    assert cache.states is not None
    hashes = filled(cache, 24)
    for number in (5, 2, 6):
        snapshot = cache.states.reserve()
        assert snapshot is not None
        cache.states.publish(snapshot, hashes[number - 1])
    other = cache.open(cache.digest(range(100, 120)), 20)
    assert cache.extend(other, 20)
    cache.close(other)
    assert len(cache.take_block_copies()) == 3, "the last blocks of the first sequence"
    assert [copy.back for copy in cache.take_state_copies()] == [False, False]
    longer = cache.digest(range(tokens))
    assert cache.shareable(longer, tokens) == (20 if tokens == 24 else 24)
    assert cache.awaits(longer, tokens) is None
    table = cache.open(longer, tokens)
    assert table.cached == 0
    cache.restore(table, tokens)
    assert table.cached == table.restored == (20 if tokens == 24 else 24)
    assert sum(copy.back for copy in cache.take_block_copies()) == (2 if tokens == 24 else 3)
    copies = cache.take_state_copies()
    assert [copy.back for copy in copies] == ([False, True] if tokens == 24 else [])
    assert table.snapshot == 0
    cache.states.plan_is_made()
    cache.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """A plan is made of restores and reservations; each reservation is published or given back later."""

    names = st.integers(0, 12).map(lambda number: b"%d" % number)

    @initialize(size=st.integers(1, 9), host_size=st.sampled_from((0, 1, 3, 20)))
    def begin(self, size: int, host_size: int) -> None:
        self.pool = StatePool(size, host_size)
        self.reserved: list[int] = []
        self.contents: dict[int, bytes] = {}
        self.slots: dict[int, bytes] = {}
        self.read = set[int]()
        self.promises: list[bytes] = []

    @rule(name=names)
    def restore(self, name: bytes) -> None:
        brought = self.pool.is_kept(name) and self.pool.bring_back(name)
        self.copy()  # what made room for it may have been saved in vain
        if brought:
            snapshot = self.pool.restore(name)
            assert self.contents[snapshot] == name
            self.read.add(snapshot)

    @rule()
    def reserve(self) -> None:
        snapshot = self.pool.reserve()
        self.copy()
        if snapshot is not None:
            assert snapshot not in self.read
            assert snapshot not in self.reserved
            self.reserved.append(snapshot)
            self.contents.pop(snapshot, None)

    def copy(self) -> None:
        """As an executor does: what leaves the device is not there any more."""
        for snapshot, slot, back in self.pool.host.take_copies():
            if back:
                self.contents[snapshot] = self.slots[slot]
            else:
                self.slots[slot] = self.contents.pop(snapshot)

    @rule()
    def finish_plan(self) -> None:
        self.pool.plan_is_made()
        self.read.clear()

    @precondition(lambda self: self.reserved)
    @rule(name=names)
    def publish(self, name: bytes) -> None:
        snapshot = self.reserved.pop(0)
        new = name not in self.pool
        self.pool.publish(snapshot, name)
        assert name in self.pool
        if new:
            self.contents[snapshot] = name

    @precondition(lambda self: self.reserved)
    @rule()
    def give_back(self) -> None:
        self.pool.give_back(self.reserved.pop())

    @rule(name=names)
    def demote(self, name: bytes) -> None:
        self.pool.demote(name)

    @rule(name=names)
    def promise(self, name: bytes) -> None:
        self.pool.promise(name)
        self.promises.append(name)
        assert self.pool.is_promised(name)

    @precondition(lambda self: self.promises)
    @rule()
    def settle(self) -> None:
        self.pool.settle(self.promises.pop())

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "pool") and not self.read:
            self.pool.check_integrity(self.reserved, self.promises)
            assert {name for name in self.contents.values() if name in self.pool} == set(self.contents.values())
            assert len(self.pool) == len(self.contents)


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_a_prefix_that_comes_back_loses_its_end_first() -> None:
    tier = HostTier(3)
    prefix = [b"first", b"second", b"third"]
    for place, digest in enumerate(prefix):
        tier.save(digest, place)
    for digest in reversed(prefix):
        tier.use(digest)
    for place, digest in enumerate(prefix):
        tier.restore(digest, place)
    assert [tier.save(bytes([other]), other) for other in range(3)] == [b"third", b"second", b"first"]
