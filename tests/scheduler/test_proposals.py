"""A draft model in the executor: who is asked for proposals, what becomes of them, and what they may cost."""

import numpy as np
import pytest

from charonia.engine.core.drafters import ProposedDrafts
from charonia.engine.worker.fake_executor import FakeBehaviour, FakeExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.drafts.draft_costs import TRIAL_SHARE
from charonia.scheduler.drafts.speculation import Speculation
from charonia.scheduler.plan import StepPlan, StepUpdates
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

MOST = 4


class Loop:
    """A scheduler over the fake executor, whose proposals begin with `right` right tokens; a step takes a second, and a
    pass of the draft model `pass_seconds`, where there is a clock."""

    def __init__(self, right: int = 2, blocks: int = 64, pass_seconds: float | None = None, **config: object) -> None:
        self.cache = KVCacheManager(blocks, 4)
        speculation = Speculation({"draft_model": ProposedDrafts()}, MOST, 32_000, draft_model=True)
        self.scheduler = Scheduler(SchedulerConfig(**config), self.cache, speculation=speculation)  # type: ignore[arg-type]
        behaviour = FakeBehaviour(right=right, pass_seconds=pass_seconds or 0.0)
        self.executor = FakeExecutor(block_size=4, behaviour=behaviour, threaded=False)
        self.executor.allocate(blocks)
        self.clocked, self.seconds, self.drafting, self.proposed = pass_seconds is not None, 0.0, 0.0, 0
        self.tokens: dict[int, list[int]] = {}

    def add(self, key: int, prompt: int, new: int, **asked: object) -> None:
        tokens = np.arange(100 * key, 100 * key + prompt, dtype=np.int32)
        self.scheduler.add(SequenceSpec(key=key, prompt=tokens, max_tokens=new, **asked))  # type: ignore[arg-type]

    def step(self, lands_late: bool = False) -> tuple[StepPlan, StepUpdates]:
        """`lands_late`: the step was over long before the one before was taken in."""
        plan = self.scheduler.schedule()
        assert plan is not None
        result = self.executor.execute(plan).result()
        seconds = (1e-6 if lands_late else 1.0 + result.proposals.seconds) if self.clocked else None
        self.seconds += seconds or 0.0
        self.drafting += result.proposals.seconds
        self.proposed += len(result.proposals.tokens)
        updates = self.scheduler.apply(result, seconds)
        self.scheduler.check_integrity()
        stream = iter(updates.tokens)
        for key, count in zip(updates.keys, updates.counts, strict=True):
            self.tokens.setdefault(key, []).extend(next(stream) for _ in range(count))
        return plan, updates


def test_what_a_step_proposes_the_next_one_verifies() -> None:
    loop = Loop()
    loop.add(1, prompt=3, new=20)
    plan, _ = loop.step()
    assert plan.proposals.tolist() == [MOST]
    plan, updates = loop.step()
    assert (plan.drafted.tolist(), plan.proposals.tolist()) == ([104, 105, 7, 7], [MOST])
    assert updates.tokens == [104, 105, 106]
    plan, updates = loop.step()
    assert (plan.drafted.tolist(), updates.tokens) == ([107, 108, 7, 7], [107, 108, 109])


def test_the_draft_model_goes_along_with_prompts() -> None:
    loop = Loop(max_num_seqs=1, max_num_batched_tokens=8)
    loop.add(1, prompt=20, new=20)
    plans = [loop.step()[0] for _ in range(3)]
    assert [plan.samples.tolist() for plan in plans] == [[False], [False], [True]]
    assert [plan.proposals.tolist() for plan in plans] == [[MOST]] * 3


def test_nothing_is_proposed_that_could_not_be_followed() -> None:
    loop = Loop(right=9)
    loop.add(1, prompt=3, new=4)
    plan, _ = loop.step()
    assert plan.proposals.tolist() == [2]
    _, updates = loop.step()
    assert updates.finished == [(1, "length")]
    assert loop.tokens == {1: [103, 104, 105, 106]}
    assert loop.cache.free_blocks == 64


@pytest.mark.parametrize(
    "config", [{}, {"admission": "no_evict"}, {"ahead": 1}, {"max_num_batched_tokens": 9}], ids=str
)
def test_few_blocks_change_no_text(config: dict[str, object]) -> None:
    loop = Loop(blocks=14, max_num_seqs=6, **config)
    for key in range(1, 9):
        loop.add(key, prompt=3 + key, new=17)
    while loop.scheduler.has_work:
        loop.step()
    assert loop.tokens == {key: [*range(101 * key + 3, 101 * key + 20)] for key in range(1, 9)}
    assert loop.scheduler.speculation is not None
    assert loop.scheduler.speculation.totals["draft_model"].accepted_tokens > 20


def test_a_draft_model_that_is_too_slow_or_too_wrong_is_hardly_asked() -> None:
    for right, pass_seconds in ((9, 3.0), (0, 0.2)):
        loop = Loop(right, 500, pass_seconds)
        loop.add(1, prompt=3, new=700)
        while loop.scheduler.has_work:
            loop.step()
        assert loop.drafting < 2 * TRIAL_SHARE * loop.seconds + 40 * pass_seconds


def test_a_draft_model_that_pays_is_asked_for_as_much_as_pays() -> None:
    loop = Loop(2, 500, 0.2)
    loop.add(1, prompt=3, new=300)
    while loop.scheduler.has_work:
        loop.step()
    assert loop.seconds < 300 / 1.7


def test_a_step_that_lands_late_says_nothing_of_what_steps_take() -> None:
    """Its proposals took longer than it seems to have taken itself."""
    loop, steady = Loop(pass_seconds=0.25), Loop(pass_seconds=0.25)
    for number in range(6):
        for each in (loop, steady):
            each.add(number, prompt=4, new=30)
        loop.step(lands_late=number % 2 == 1)
        steady.step()
    expected = steady.scheduler.step_times.prompt_seconds(16, 0)
    assert loop.scheduler.step_times.prompt_seconds(16, 0) == pytest.approx(expected, rel=0.5)
