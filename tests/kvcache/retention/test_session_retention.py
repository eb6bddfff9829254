"""Scopes retain what sessions asked for, within a budget, and nobody else's blocks are looked after otherwise."""

from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from charonia.core.retention import Retention, RetentionRange
from charonia.kvcache.block_table import BlockTable
from charonia.kvcache.manager import KVCacheManager
from charonia.kvcache.retention import session_retention as retention_module
from charonia.kvcache.retention.session_retention import RetentionBudget, SessionRetention

SIZE = 4
WHOLE = (RetentionRange(priority=50, seconds=10.0),)


class Sessions:
    """A cache of 16 blocks whose clock is set by hand; texts are told apart by their first token."""

    def __init__(self, retained: int = 8, blocks: int = 16, snapshots: int = 0, kept_snapshots: int = 0) -> None:
        budget = RetentionBudget(retained, kept_snapshots)
        self.cache = KVCacheManager(blocks, SIZE, snapshots=snapshots, retention=budget)
        self.now = 0.0
        self.retention.clock = lambda: self.now

    @property
    def retention(self) -> SessionRetention:
        assert self.cache.retention is not None
        return self.cache.retention

    def hashes(self, text: int, tokens: int) -> list[bytes]:
        return self.cache.digest(range(1000 * text, 1000 * text + tokens))

    def open(self, text: int, tokens: int) -> tuple[BlockTable, list[bytes]]:
        hashes = self.hashes(text, tokens)
        table = self.cache.open(hashes, tokens + 1)
        assert self.cache.extend(table, tokens)
        self.cache.commit(table, hashes[table.committed :])
        return table, hashes

    def compute(self, text: int, tokens: int, retention: Retention | None = None, tenant: str = "") -> int:
        """Let a sequence run to its end; how many of its tokens were cached."""
        table, hashes = self.open(text, tokens)
        cached = table.cached
        if retention is not None:
            self.retention.keep(table, hashes, tokens, tenant, retention)
        self.cache.close(table)
        self.cache.check_integrity()
        return cached

    def cached(self, text: int, tokens: int) -> int:
        """How much of a text can be found."""
        return self.cache.shareable(self.hashes(text, tokens), tokens + 1)


def test_what_a_scope_retains_outlives_any_number_of_prompts_that_come_once() -> None:
    plain, kept = Sessions(), Sessions()
    plain.compute(1, 24)
    kept.compute(1, 24, Retention("a", WHOLE))
    for sessions in (plain, kept):
        for text in range(2, 40):
            sessions.compute(text, 20)
    assert (plain.cached(1, 24), kept.cached(1, 24)) == (0, 24)


def test_what_nobody_retains_makes_room_in_its_usual_order() -> None:
    plain, kept = Sessions(blocks=14), Sessions(blocks=16)
    kept.compute(1, 8, Retention("a", WHOLE))
    for text in (2, 3, 4, 2, 5, 6, 2, 7, 3):
        assert plain.compute(text, 16) == kept.compute(text, 16)


def test_a_scope_whose_time_is_over_is_as_all_others() -> None:
    sessions = Sessions()
    sessions.compute(1, 24, Retention("a", WHOLE))
    sessions.now = 10.0
    sessions.retention.expire()
    assert (len(sessions.retention), sessions.retention.blocks) == (0, 0)
    for text in range(2, 6):
        sessions.compute(text, 20)
    assert sessions.cached(1, 24) == 0


def test_each_turn_renews_the_time() -> None:
    sessions = Sessions()
    for turn in range(5):
        sessions.now = 9.0 * turn
        assert sessions.compute(1, 8 + 4 * turn, Retention("a", WHOLE)) == (4 + 4 * turn if turn else 0)
        for text in range(2, 8):
            sessions.compute(10 * turn + text, 20)


def test_a_scope_that_is_released_makes_room_first_but_for_what_others_share() -> None:
    sessions = Sessions()
    sessions.compute(1, 8)
    for scope, text in (("a", 1), ("b", 2)):
        shared = sessions.cache.digest([*range(1000, 1008), *range(1000 * text, 1000 * text + 8)])
        table = sessions.cache.open(shared, 17)
        assert sessions.cache.extend(table, 16)
        sessions.cache.commit(table, shared[table.committed :])
        sessions.retention.keep(table, shared, 16, "", Retention(scope, WHOLE))
        sessions.cache.close(table)
    assert sessions.retention.release("", "a")
    assert not sessions.retention.release("", "a")
    assert not sessions.retention.release("other", "b")
    assert not sessions.retention.release("", ""), "what is shared is no scope of a client's"
    assert sessions.retention.blocks == 4, "two of b alone, two that both have"
    lone = sessions.cache.open([], 1)
    assert sessions.cache.extend(lone, 10 * SIZE)
    sessions.cache.check_integrity()
    assert sessions.cached(1, 8) == 8


def test_a_beginning_is_retained_where_the_budget_has_no_room_for_all() -> None:
    sessions = Sessions(retained=3)
    sessions.compute(1, 24, Retention("a", WHOLE))
    assert (sessions.retention.blocks, sessions.retention.refused_blocks) == (3, 3)
    for text in range(2, 9):
        sessions.compute(text, 20)
    assert sessions.cached(1, 24) == 12


def test_a_scope_stands_back_for_one_of_more_priority_only() -> None:
    sessions = Sessions(retained=4)
    sessions.compute(1, 16, Retention("a", WHOLE))
    sessions.compute(2, 16, Retention("b", WHOLE))
    assert sessions.retention.refused_blocks == 4
    sessions.compute(3, 16, Retention("c", (RetentionRange(priority=60, seconds=1.0),)))
    assert (sessions.retention.displaced, sessions.retention.refused_blocks) == (1, 4)
    assert not sessions.retention.release("", "a")


def test_a_tenant_with_all_of_the_budget_stands_back_until_it_has_its_share() -> None:
    sessions = Sessions(retained=8, blocks=32)
    for scope in range(4):
        ranges = (RetentionRange(priority=100),)
        sessions.compute(scope, 8, Retention(str(scope), ranges), tenant="greedy")
    for scope in range(10, 14):
        sessions.compute(scope, 8, Retention(str(scope), WHOLE), tenant="modest")
    assert (sessions.retention.displaced, sessions.retention.refused_blocks) == (2, 4)
    for text in range(20, 40):
        sessions.compute(text, 40)
    assert [sessions.cached(text, 8) for text in range(4)] == [0, 0, 8, 8]
    assert [sessions.cached(text, 8) for text in range(10, 14)] == [8, 8, 0, 0]


def test_ranges_say_what_is_kept_and_what_is_not_worth_it() -> None:
    sessions = Sessions(retained=8)
    ranges = (RetentionRange(0, 8, 80, 5.0), RetentionRange(0, None, 0))
    sessions.compute(1, 24, Retention("a", ranges))
    assert sessions.retention.blocks == 2
    assert sessions.cached(1, 24) == 24
    lone = sessions.cache.open([], 1)
    assert sessions.cache.extend(lone, 4 * SIZE)
    assert sessions.cached(1, 24) == 8


def test_generated_tokens_may_be_kept_otherwise() -> None:
    sessions = Sessions()
    table, hashes = sessions.open(1, 24)
    retention = Retention("a", WHOLE, RetentionRange(priority=35))
    sessions.retention.keep(table, hashes, 9, "", retention)
    sessions.cache.close(table)
    assert sessions.retention.blocks == 3, "a block is looked after as its first token"


def test_what_is_shared_with_others_is_not_given_up_first() -> None:
    sessions = Sessions()
    sessions.compute(1, 8)
    sessions.compute(1, 16, Retention("a", (RetentionRange(priority=0),)))
    lone = sessions.cache.open([], 1)
    assert sessions.cache.extend(lone, 14 * SIZE)
    assert sessions.cached(1, 16) == 8


def test_nothing_is_pinned() -> None:
    sessions = Sessions(retained=16)
    for text in range(3):
        sessions.compute(text, 20, Retention(str(text), (RetentionRange(priority=100),)))
    assert sessions.cache.free_blocks == 16
    lone = sessions.cache.open([], 1)
    assert sessions.cache.extend(lone, 16 * SIZE)
    sessions.cache.check_integrity()
    assert sessions.retention.blocks == 0
    sessions.cache.close(lone)
    assert sessions.compute(1, 20, Retention("1", WHOLE)) == 0, "a record whose blocks were taken gets another list"
    assert sessions.retention.blocks == 5


def test_the_last_snapshots_of_a_scope_are_kept_with_its_blocks() -> None:
    sessions = Sessions(snapshots=2, kept_snapshots=1)
    states = sessions.cache.states
    assert states is not None
    table, hashes = sessions.open(1, 16)
    for end in (1, 3):
        states.publish(states.reserve() or 0, hashes[end])
    sessions.retention.keep(table, hashes, 16, "", Retention("a", WHOLE))
    sessions.cache.close(table)
    other = sessions.hashes(2, 40)
    for digest in other:
        states.publish(states.reserve() or 0, digest)
    assert hashes[3] in states
    assert hashes[1] not in states
    sessions.retention.release("", "a")
    assert states.reserve() is not None
    assert hashes[3] not in states


class RetentionMachine(RuleBasedStateMachine):
    """Any order of calls; integrity after each."""

    tables = Bundle("tables")

    @initialize(
        blocks=st.integers(2, 40),
        retained=st.integers(1, 40),
        host=st.sampled_from((0, 4)),
        states=st.integers(0, 6),
        lists=st.sampled_from((1, 2, 3, 1024)),
    )
    def begin(self, blocks: int, retained: int, host: int, states: int, lists: int) -> None:
        budget = RetentionBudget(min(retained, blocks), states // 2)
        with mock.patch.object(retention_module, "MOST_SCOPES", lists):
            self.cache = KVCacheManager(blocks, 2, host_blocks=host, snapshots=states, retention=budget)
        assert self.cache.retention is not None
        self.now = 0.0
        self.cache.retention.clock = lambda: self.now
        self.retention = self.cache.retention
        self.hashes: dict[BlockTable, list[bytes]] = {}

    @rule(target=tables, stream=st.integers(0, 3), common=st.integers(0, 8), known=st.integers(1, 30))
    def open(self, stream: int, common: int, known: int) -> BlockTable:
        """Streams share a beginning."""
        tokens = [*range(min(common, known)), *range(1000 * stream, 1000 * stream + max(known - common, 0))]
        hashes = self.cache.digest(tokens)
        table = self.cache.open(hashes, known)
        if self.cache.room_for(table, known):
            self.cache.restore(table, known)
            assert self.cache.extend(table, known)
            end = max((known - 1) // 2, table.committed)
            self.cache.commit(table, hashes[table.committed : end])
        if self.cache.states is not None:
            self.cache.states.plan_is_made()
            if table.committed and (snapshot := self.cache.states.reserve()) is not None:
                self.cache.states.publish(snapshot, hashes[table.committed - 1])
        self.cache.take_block_copies()
        self.cache.take_state_copies()
        self.hashes[table] = hashes[: table.committed]
        return table

    @rule(
        table=consumes(tables),
        tenant=st.sampled_from(("", "b")),
        scope=st.sampled_from("xyz"),
        start=st.integers(0, 20),
        length=st.sampled_from((0, 3, 30, None)),
        priority=st.sampled_from((0, 35, 50, 100)),
        seconds=st.sampled_from((0.0, 1.0, 5.0, None)),
        generated=st.sampled_from((None, 0, 90)),
    )
    def close(
        self,
        table: BlockTable,
        tenant: str,
        scope: str,
        start: int,
        length: int | None,
        priority: int,
        seconds: float | None,
        generated: int | None,
    ) -> None:
        ranges = (RetentionRange(start, None if length is None else start + length, priority, seconds),)
        own = None if generated is None else RetentionRange(priority=generated)
        self.retention.keep(table, self.hashes.pop(table), 10, tenant, Retention(scope, ranges, own))
        self.cache.close(table)

    @rule(table=consumes(tables))
    def close_without_a_wish(self, table: BlockTable) -> None:
        self.cache.close(table)
        del self.hashes[table]

    @rule(tenant=st.sampled_from(("", "b")), scope=st.sampled_from("xyz"))
    def release(self, tenant: str, scope: str) -> None:
        self.retention.release(tenant, scope)

    @rule(seconds=st.sampled_from((0.5, 2.0, 5000.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.retention.expire()
        if seconds > 3600:
            assert len(self.retention) == 0

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()
            if self.cache.states is not None:
                self.cache.states.check_integrity([], [])


RetentionMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestRetentionMachine = RetentionMachine.TestCase


def test_there_are_no_more_records_than_lists() -> None:
    with mock.patch.object(retention_module, "MOST_SCOPES", 6):
        sessions = Sessions()
        for number in range(60):
            sessions.compute(number, 16, Retention(str(number), WHOLE))
            sessions.compute(1000 + number, 60)  # needs every block: the pool dissolves the list
            assert len(sessions.retention) <= 6
            assert len(sessions.retention._due) <= 4 * 6 + 1
