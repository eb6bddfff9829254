"""The dynamic batcher beside the plainest writing of Triton's rules, and the rules one by one, over a clock of ours."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.classic_backends.batching.batching_config import BatchingConfig, QueuePolicy, read_batching_config
from charonia.classic_backends.batching.dynamic_batcher import BatchDecision, DynamicBatcher, RequestQueue
from charonia.classic_backends.batching.queued_request import QueuedRequest
from charonia.core.errors import InvalidArgument
from charonia.telemetry.model_metrics import CloseReason

from ..asking import queued_request as one


def batching(max_size: int = 8, **fields: Any) -> BatchingConfig:
    fields["preferred_sizes"] = tuple(sorted(fields.get("preferred_sizes", (max_size,))))
    return BatchingConfig(combine_requests=True, max_batch_size=max_size, **fields)


def queued(rules: BatchingConfig, *requests: QueuedRequest, now: int = 0) -> DynamicBatcher:
    batcher: DynamicBatcher = DynamicBatcher(rules)
    for request in requests:
        assert batcher.add(request, now)
    return batcher


def names(turn: BatchDecision) -> list[str]:
    return [] if turn.batch is None else [request.request_id for request in turn.batch.requests]


def test_without_batching_each_request_leaves_alone_in_order() -> None:
    batcher = queued(BatchingConfig(), one("a"), one("b", batch_size=3))
    assert [names(batcher.take_batch(0)) for _ in range(3)] == [["a"], ["b"], []]


def test_what_queued_up_leaves_together() -> None:
    batcher = queued(batching(), one("a"), one("b", batch_size=3), one("c"))
    turn = batcher.take_batch(0)
    assert names(turn) == ["a", "b", "c"]
    assert turn.batch is not None
    assert turn.batch.close_reason is CloseReason.IDLE
    assert turn.batch.size == 5


def test_a_batch_is_never_too_large() -> None:
    batcher = queued(batching(), one("a", batch_size=5), one("b", batch_size=4), one("c"))
    turn = batcher.take_batch(0)
    assert names(turn) == ["a"]
    assert turn.batch is not None
    assert turn.batch.close_reason is CloseReason.FULL


def test_another_shape_ends_a_batch_at_once() -> None:
    batcher = queued(
        batching(max_delay_ns=100),
        one("a", batch_key=1),
        one("b", batch_key=2),
        one("c", batch_key=2),
    )
    turn = batcher.take_batch(0)
    assert names(turn) == ["a"]
    assert turn.batch is not None
    assert turn.batch.close_reason is CloseReason.DIFFERS
    assert names(batcher.take_batch(0)) == []


def test_the_oldest_waits_for_the_delay_and_no_longer() -> None:
    batcher = queued(batching(max_delay_ns=100), one("a"))
    assert batcher.take_batch(10) == (None, [], 100)
    assert batcher.add(one("b"), 60)
    assert batcher.take_batch(99) == (None, [], 100)
    turn = batcher.take_batch(100)
    assert names(turn) == ["a", "b"]
    assert turn.batch is not None
    assert turn.batch.close_reason is CloseReason.DELAY


def test_a_preferred_size_leaves_at_once_and_the_rest_stays() -> None:
    batcher = queued(
        batching(preferred_sizes=(2, 4), max_delay_ns=100),
        one("a"),
        one("b"),
        one("c"),
    )
    assert names(batcher.take_batch(0)) == ["a", "b"]
    assert batcher.take_batch(0) == (None, [], 100)


def test_the_largest_preferred_size_is_not_passed() -> None:
    batcher = queued(
        batching(preferred_sizes=(4,), max_delay_ns=100),
        one("a", batch_size=3),
        one("b", batch_size=2),
    )
    assert names(batcher.take_batch(0)) == ["a"]


def test_priorities_come_first_and_share_a_batch() -> None:
    rules = batching(priority_levels=3, default_level=2)
    low, middle, high = (
        one("low", priority=3),
        one("middle", priority=9),
        one("high", priority=1),
    )
    assert names(queued(rules, low, middle, high).take_batch(0)) == ["high", "middle", "low"]


def test_time_runs_out_in_the_queue() -> None:
    batcher = queued(batching(policy=QueuePolicy(timeout_ns=50), max_delay_ns=100), one("a"))
    assert batcher.take_batch(10).ask_again_at == 50
    turn = batcher.take_batch(50)
    assert turn.batch is None
    assert [request.request_id for request in turn.expired] == ["a"]
    assert batcher.take_batch(50).ask_again_at is None


def test_a_request_may_only_shorten_its_time() -> None:
    policy = QueuePolicy(timeout_ns=50, allow_override=True)
    batcher = queued(batching(policy=policy), one("short", timeout_ns=20), one("long", timeout_ns=90))
    assert [request.request_id for request in batcher.expire_requests(20).expired] == ["short"]
    assert [request.request_id for request in batcher.expire_requests(50).expired] == ["long"]
    assert QueuePolicy(timeout_ns=0, allow_override=True).queue_deadline(0, 20) is None
    assert QueuePolicy(timeout_ns=50).queue_deadline(7, 20) == 57


def test_postponed_requests_come_after_those_in_time() -> None:
    rules = batching(max_size=1, policy=QueuePolicy(timeout_ns=50, postpone=True))
    batcher = queued(rules, one("late"))
    assert batcher.expire_requests(50).expired == []
    assert batcher.add(one("in time"), 60)
    assert [names(batcher.take_batch(60)) for _ in range(2)] == [["in time"], ["late"]]


def test_a_request_set_aside_leaves_a_preferred_size_that_goes_at_once() -> None:
    policy = QueuePolicy(timeout_ns=50, postpone=True, allow_override=True)
    batcher = queued(
        batching(preferred_sizes=(2, 6), max_delay_ns=100, policy=policy),
        one("a", timeout_ns=20),
        one("b", batch_size=2),
    )
    assert batcher.take_batch(0) == (None, [], 20)
    assert names(batcher.take_batch(20)) == ["b"]
    assert names(batcher.take_batch(20)) == []
    assert names(batcher.take_batch(100)) == ["a"]


def test_a_request_of_a_higher_level_makes_a_preferred_size_that_goes_at_once() -> None:
    batcher = queued(
        batching(preferred_sizes=(2, 6), max_delay_ns=100, priority_levels=2, default_level=2),
        one("a"),
        one("b", batch_size=2),
    )
    assert batcher.take_batch(0) == (None, [], 100)
    assert batcher.add(one("c", priority=1), 10)
    assert names(batcher.take_batch(10)) == ["c", "a"]


def test_a_full_level_takes_nobody_else() -> None:
    rules = batching(priority_levels=2, default_level=1, policies={2: QueuePolicy(max_size=1)})
    batcher = queued(rules, one(priority=2))
    assert not batcher.add(one(priority=2), 0)
    assert batcher.add(one(priority=1), 0)
    assert len(batcher) == 2


def test_deadlines_of_those_who_left_are_not_kept() -> None:
    queue: RequestQueue = RequestQueue(batching(policy=QueuePolicy(timeout_ns=10**12)))
    for _ in range(1000):
        request = one()
        queue.add(request, 0)
        queue.remove(request)
        queue.check_integrity()


@dataclass
class Plain:
    """Triton's rules over lists, looked through from the start each time."""

    rules: BatchingConfig
    waiting: list[QueuedRequest] = field(default_factory=list)
    late: list[QueuedRequest] = field(default_factory=list)

    def expire(self, now: int) -> set[str]:
        due = [each for each in self.waiting if each.queue_deadline is not None and each.queue_deadline <= now]
        due.sort(key=lambda each: (each.queue_deadline, each.arrived_at))
        refused = set()
        for request in due:
            self.waiting.remove(request)
            if self.rules.policy_of(request.level).postpone:
                self.late.append(request)
            else:
                refused.add(request.request_id)
        return refused

    def order(self) -> list[QueuedRequest]:
        waiting = [each for part in (self.waiting, self.late) for each in part]
        return sorted(waiting, key=lambda each: each.level)

    def take(self, now: int) -> list[str]:
        order = self.order()
        if not self.rules.combine_requests or not order:
            return self._leave(order[:1])
        chosen, marked, send_now = [order[0]], 0, False
        marked = 1 if order[0].batch_size in self.rules.preferred_sizes else 0
        for request in order[1:]:
            size = sum(each.batch_size for each in chosen)
            if size + request.batch_size > self.rules.target_size and not marked:
                marked = len(chosen)
            if size + request.batch_size > self.rules.max_batch_size or request.batch_key != chosen[0].batch_key:
                send_now = True
                break
            chosen.append(request)
            if size + request.batch_size in self.rules.preferred_sizes:
                marked = len(chosen)
        waited = now - min(each.arrived_at for each in chosen)
        exceeded = self.rules.max_delay_ns > 0 and waited >= self.rules.max_delay_ns
        if marked and not exceeded:
            return self._leave(chosen[:marked])
        full = sum(each.batch_size for each in chosen) >= self.rules.target_size
        return self._leave(chosen if send_now or full or exceeded or not self.rules.max_delay_ns else [])

    def _leave(self, requests: list[QueuedRequest]) -> list[str]:
        for request in requests:
            (self.late if request in self.late else self.waiting).remove(request)
        return [request.request_id for request in requests]


POLICIES = st.builds(
    QueuePolicy,
    timeout_ns=st.sampled_from([0, 0, 5, 20]),
    postpone=st.booleans(),
    allow_override=st.booleans(),
    max_size=st.sampled_from([0, 0, 3]),
)


@st.composite
def all_rules(draw: st.DrawFn) -> BatchingConfig:
    max_size, levels = draw(st.integers(1, 8)), draw(st.sampled_from([1, 2, 3, 2**64 - 1]))
    return BatchingConfig(
        combine_requests=draw(st.sampled_from([True, True, True, False])),
        max_batch_size=max_size,
        preferred_sizes=sorted(draw(st.frozensets(st.integers(1, max_size), max_size=3))),
        max_delay_ns=draw(st.sampled_from([0, 4, 15])),
        priority_levels=levels,
        default_level=draw(st.integers(1, levels)),
        policy=draw(POLICIES),
        policies=draw(st.dictionaries(st.integers(1, levels), POLICIES, max_size=2)),
    )


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 4), st.integers(0, 1), st.integers(0, 4), st.sampled_from([0, 3])),
        st.tuples(st.just("pass"), st.integers(1, 6)),
        st.tuples(st.just("take")),
        st.tuples(st.just("expire")),
        st.tuples(st.just("remove"), st.integers(0, 30)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=200)
@given(all_rules(), STEPS)
def test_it_does_what_the_rules_say(rules: BatchingConfig, steps: list[tuple[Any, ...]]) -> None:
    batcher: DynamicBatcher = DynamicBatcher(rules)
    plain, now, everybody = Plain(rules), 0, list[QueuedRequest]()
    for number, (verb, *arguments) in enumerate(steps):
        if verb == "add":
            size, kind, priority, timeout = arguments
            size = min(size, rules.max_batch_size)
            request = one(str(number), batch_size=size, batch_key=kind, priority=priority, timeout_ns=timeout)
            if batcher.add(request, now):
                plain.waiting.append(request)
                everybody.append(request)
            else:
                level = rules.level_of(priority)
                assert len([each for each in plain.order() if each.level == level]) == rules.policy_of(level).max_size
        elif verb == "pass":
            now += arguments[0]
        elif verb == "remove" and everybody:
            request = everybody[arguments[0] % len(everybody)]
            waited = batcher.remove(request)
            assert waited == (request in plain.order())
            if waited:
                plain._leave([request])
        elif verb in ("take", "expire"):
            seen = batcher.peek_batch(now) if verb == "take" else batcher.expire_requests(now)
            assert {request.request_id for request in seen.expired} == plain.expire(now)
            assert len(batcher) == len(plain.order())
            turn = batcher.take_batch(now) if verb == "take" else seen
            if verb == "take":
                assert names(seen) == names(turn) == plain.take(now)
                assert turn.batch is None or turn.batch.size <= rules.max_batch_size
                # Whoever waits is looked at again, or needs nobody to.
                assert turn.batch is not None or turn.ask_again_at is not None or not plain.order()
        batcher.check_integrity()
        assert len(batcher) == len(plain.order())


OVERTAKING = st.builds(
    BatchingConfig,
    combine_requests=st.just(True),
    max_batch_size=st.just(8),
    preferred_sizes=st.frozensets(st.integers(2, 8), min_size=1, max_size=2).map(sorted),
    max_delay_ns=st.just(15),
    priority_levels=st.integers(1, 2),
    policy=st.builds(
        QueuePolicy, timeout_ns=st.just(9), postpone=st.booleans(), allow_override=st.just(True), max_size=st.just(0)
    ),
)


@settings(deadline=None, max_examples=100)
@given(OVERTAKING, st.lists(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(0, 9)), min_size=3, max_size=8))
def test_an_instance_woken_when_it_must_misses_nothing(
    rules: BatchingConfig, arrivals: list[tuple[int, int, int]]
) -> None:
    """It looks when a request comes and when it was told to; another looks all the time, and finds no more."""
    batcher: DynamicBatcher = DynamicBatcher(rules)
    plain, until = Plain(rules), 0
    for now in range(1, 40):
        for size, priority, timeout in arrivals[now - 1 : now]:
            request = one(str(now), batch_size=size, priority=priority, timeout_ns=timeout)
            batcher.add(request, now)
            plain.waiting.append(request)
            until = now
        turn = batcher.take_batch(now) if until <= now else BatchDecision(None, (), until)
        assert {request.request_id for request in turn.expired} == plain.expire(now)
        assert names(turn) == plain.take(now)
        until = now if turn.batch is not None else turn.ask_again_at or 40


def test_a_pause_ends_when_those_it_was_for_ran_out_of_time() -> None:
    policy = QueuePolicy(timeout_ns=5)
    batcher: DynamicBatcher = DynamicBatcher(
        BatchingConfig(combine_requests=True, max_batch_size=2, max_delay_ns=10, policies={1: policy})
    )
    batcher.add(one("late"), 0)
    assert batcher.take_batch(0).batch is None
    assert [request.request_id for request in batcher.expire_requests(6).expired] == ["late"]
    batcher.check_integrity()


def test_the_rules_are_read_from_a_config() -> None:
    raw = {
        "dynamic_batching": {
            "preferred_batch_size": [4, 8],
            "max_queue_delay_microseconds": 100,
            "priority_levels": 2,
            "default_priority_level": 2,
            "default_queue_policy": {"timeout_action": "DELAY", "default_timeout_microseconds": 7},
            "priority_queue_policy": {"1": {"max_queue_size": 3, "allow_timeout_override": True}},
        }
    }
    rules = read_batching_config(raw, 8, combines=True)
    assert (rules.combine_requests, rules.max_batch_size, rules.preferred_sizes) == (True, 8, (4, 8))
    assert (rules.max_delay_ns, rules.priority_levels, rules.level_of(0), rules.level_of(1)) == (100_000, 2, 2, 1)
    assert rules.policy_of(2) == QueuePolicy(timeout_ns=7000, postpone=True)
    assert rules.policy_of(1) == QueuePolicy(max_size=3, allow_override=True)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"preferred_batch_size": [9]}, "dynamic_batching.preferred_batch_size"),
        ({"priority_levels": 2}, "dynamic_batching.default_priority_level"),
        ({"priority_queue_policy": {"2": {}}}, "dynamic_batching.priority_queue_policy"),
        (
            {"preserve_ordering": True, "priority_levels": 2, "default_priority_level": 1},
            "dynamic_batching.preserve_ordering",
        ),
        (
            {"preserve_ordering": True, "default_queue_policy": {"timeout_action": "DELAY"}},
            "dynamic_batching.preserve_ordering",
        ),
    ],
)
def test_rules_that_contradict_each_other_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read_batching_config({"dynamic_batching": fields}, 8, combines=True)
    assert refused.value.field == field


def delay_of(turn: BatchDecision) -> int:
    assert turn.batch is not None
    return turn.batch.delay_ns


def test_what_requests_waited_for_others_is_told_and_not_what_they_waited_for_an_instance() -> None:
    batcher = queued(batching(max_delay_ns=100), one("a"), now=0)
    assert names(batcher.take_batch(30)) == []  # an instance is free from here on
    assert batcher.add(one("b"), 60)
    assert delay_of(batcher.take_batch(100)) == (100 - 30) + (100 - 60)
    assert batcher.add(one("c"), 200)
    assert delay_of(batcher.take_batch(350)) == 0  # no instance was free until its time was over
    gone = one("d")
    assert batcher.add(gone, 400)
    assert names(batcher.take_batch(400)) == []
    assert batcher.remove(gone)
    assert batcher.add(one("e"), 450)
    assert names(batcher.take_batch(460)) == []
    assert delay_of(batcher.take_batch(550)) == 550 - 460
