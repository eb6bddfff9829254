"""Guided sequences in plans: not ahead of their tokens, and what no step sampled does not hold up others."""

import numpy as np

from charonia.engine.worker.fake_executor import FakeExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.constraints.constrained_rows import ForcedTokens, with_forced_tokens
from charonia.scheduler.plan import StepPlan
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

FREE, CONSTRAINED = 1, 2


class Loop:
    """A scheduler over the fake executor, with one free sequence and one constrained, step by step."""

    def __init__(self, ahead: int, free: bool = True) -> None:
        cache = KVCacheManager(64, 4)
        self.scheduler, self.executor = (
            Scheduler(SchedulerConfig(ahead=ahead), cache),
            FakeExecutor(block_size=4, threaded=False),
        )
        self.executor.allocate(64)
        for key in (FREE, CONSTRAINED) if free else (CONSTRAINED,):
            prompt, constrained = np.arange(3, dtype=np.int32) + 100 * key, key == CONSTRAINED
            self.scheduler.add(SequenceSpec(key=key, prompt=prompt, max_tokens=40, constrained=constrained))
        self.tokens: dict[int, list[int]] = {FREE: [], CONSTRAINED: []}

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def apply(self, plan: StepPlan, follows: int = 0) -> None:
        """The plan's result, and so many tokens that follow the constrained sequence's."""
        result, ways = self.executor.execute(plan).result(), {}
        for row, token in zip(result.rows.tolist(), result.tokens.tolist(), strict=True):
            if row in self.scheduler.constrained_rows and follows:
                ways[row] = ForcedTokens([token + step for step in range(1, follows + 1)])
        updates = self.scheduler.apply(with_forced_tokens(result, ways) if ways else result)
        self.scheduler.check_integrity()
        tokens = iter(updates.tokens)
        for key, count in zip(updates.keys, updates.counts, strict=True):
            self.tokens[key] += [next(tokens) for _ in range(count)]


def test_a_guided_row_is_not_planned_ahead_and_a_free_one_is() -> None:
    loop = Loop(ahead=1)
    first, second = loop.plan(), loop.plan()
    (constrained,) = loop.scheduler.constrained_rows
    assert constrained in first.rows
    assert len(second.rows) == 1
    assert constrained not in second.rows
    loop.apply(first)
    assert constrained in loop.plan().rows


def test_tokens_that_follow_are_told_to_the_executor_and_computed_a_few_at_a_time_beside_others() -> None:
    loop = Loop(ahead=0)
    loop.apply(loop.plan(), follows=6)
    assert loop.tokens[CONSTRAINED] == list(range(203, 210))
    (constrained,) = loop.scheduler.constrained_rows
    counts: list[int] = []
    given = np.zeros((0, 3), np.int32)
    while len(loop.tokens[CONSTRAINED]) == 7:
        plan = loop.plan()
        counts.append(int(plan.counts[plan.rows == constrained][0]))
        given = np.concatenate([given, plan.forced])
        assert plan.tokens <= len(plan.rows) + 1
        loop.apply(plan)
    assert given.tolist() == [[constrained, 4 + at, 204 + at] for at in range(6)]
    assert counts == [2, 2, 2, 1]
    assert loop.tokens[FREE] == list(range(103, 108))


def test_alone_they_are_computed_at_once() -> None:
    loop = Loop(ahead=0, free=False)
    loop.apply(loop.plan(), follows=6)
    plan = loop.plan()
    assert plan.counts.tolist() == [7]
    loop.apply(plan)
    assert loop.tokens[CONSTRAINED] == list(range(203, 211))
