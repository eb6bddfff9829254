"""What ends a stay in a row is what a scope retains, whatever plans are in flight."""

from collections import deque

import numpy as np
import pytest

from charonia.core.retention import Retention, RetentionRange
from charonia.kvcache.manager import KVCacheManager
from charonia.kvcache.retention.session_retention import RetentionBudget, SessionRetention
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.plan import StepPlan, StepResult
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

BLOCK = 4
WISH = Retention("session", (RetentionRange(priority=80, seconds=60.0),))


class RetainingScheduler:
    """A scheduler whose steps bring the token 7 to every row that samples."""

    def __init__(self, ahead: int) -> None:
        self.cache = KVCacheManager(64, BLOCK, retention=RetentionBudget(32))
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=200, ahead=ahead)
        self.scheduler = Scheduler(config, self.cache)
        self.flights = deque[StepPlan]()

    @property
    def retention(self) -> SessionRetention:
        assert self.cache.retention is not None
        return self.cache.retention

    def add(self, key: int, tokens: int, new: int) -> None:
        prompt = np.arange(tokens, dtype=np.int32)
        hashes = self.cache.digest(prompt, ("", "team", ""))
        spec = SequenceSpec(
            key=key,
            prompt=prompt,
            max_tokens=new,
            hashes=hashes,
            tenant="team",
            retention=WISH,
            stop_token_ids=frozenset(),
        )
        self.scheduler.add(spec)

    def step(self) -> list[int]:
        """The keys of sequences that end."""
        while (plan := self.scheduler.schedule()) is not None:
            self.flights.append(plan)
        plan = self.flights.popleft()
        rows = plan.rows[plan.samples]
        offsets = (plan.starts + plan.counts)[plan.samples]
        ones = np.ones(len(rows), np.int32)
        updates = self.scheduler.apply(StepResult(plan.step, rows, offsets, ones, 7 * ones))
        return [key for key, _ in updates.finished]

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()
        self.scheduler.check_integrity()


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_scope_has_prompt_and_answer_when_its_sequence_ends(ahead: int) -> None:
    trial = RetainingScheduler(ahead)
    trial.add(1, 20, 10)
    trial.run()
    assert trial.retention.blocks == 29 // BLOCK, "the last token was not computed"
    trial.add(2, 23, 1)
    trial.run()
    assert trial.retention.blocks == 7, "a turn that goes on otherwise keeps what it shares, and both ends"


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_sequence_that_has_just_ended_retains_nothing_for_a_scope_that_is_released(ahead: int) -> None:
    trial = RetainingScheduler(ahead)
    trial.add(1, 20, 10)
    while not trial.step():
        pass
    trial.scheduler.release_scope("team", "session")
    trial.run()
    assert trial.retention.blocks == 0


def test_an_aborted_sequence_is_retained_as_far_as_it_came() -> None:
    trial = RetainingScheduler(1)
    trial.add(1, 20, 100)
    for _ in range(4):
        trial.step()
    trial.scheduler.abort([1])
    trial.run()
    assert trial.retention.blocks >= 5
