"""Prompts whose tokens are to be scored: each token once and in order, whatever is cached, cut or preempted.

The machine's trials ask for scores too; here stands what they cannot see.
"""

import numpy as np
import pytest

from charonia.core.logprobs import PromptLogprobs
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.worker.fake_executor import FakeExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.plan import StepPlan, StepUpdates
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

BLOCK = 4
SCORED = ResolvedSampling(prompt_logprobs=2)


class Loop:
    """A scheduler over a cache, an executor that counts, and everything they said."""

    def __init__(self, blocks: int = 32, budget: int = 64, rows: int = 4) -> None:
        self.cache = KVCacheManager(blocks, BLOCK)
        config = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=budget, max_model_len=64)
        self.scheduler = Scheduler(config, self.cache)
        self.executor = FakeExecutor(block_size=BLOCK, threaded=False)
        self.executor.allocate(blocks)
        self.plans: list[StepPlan] = []
        self.cached: dict[int, int] = {}
        self.scored: dict[int, list[int]] = {}

    def add(self, key: int, tokens: list[int], new: int = 2, sampling: ResolvedSampling = SCORED) -> None:
        prompt = np.array(tokens, np.int32)
        hashes = self.cache.digest(prompt)
        self.scheduler.add(SequenceSpec(key=key, prompt=prompt, max_tokens=new, hashes=hashes, sampling=sampling))

    def step(self) -> StepUpdates:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.plans.append(plan)
        updates = self.scheduler.apply(self.executor.execute(plan).result())
        self.scheduler.check_integrity()
        self.cached.update(updates.started)
        for key, scores in updates.prompt_logprobs:
            self.scored.setdefault(key, []).extend(range(scores.start, scores.end))
        return updates

    def drain(self) -> None:
        while self.scheduler.has_work:
            self.step()


def test_chunks_bring_scores_as_they_come() -> None:
    loop = Loop(budget=5)
    loop.add(0, list(range(10, 22)))
    assert [[(key, scores.start, scores.end) for key, scores in loop.step().prompt_logprobs] for _ in range(4)] == [
        [(0, 1, 6)],
        [(0, 6, 11)],
        [(0, 11, 12)],
        [],
    ]


def test_ranks_and_likeliest_tokens_are_those_of_the_tokens() -> None:
    loop = Loop()
    loop.add(0, [10, 11, 15, 16])
    [(_, scores)] = loop.step().prompt_logprobs
    assert [score.rank for score in scores.to_list()] == [1, 4, 1]
    assert [score.logprobs.ids for score in scores.to_list()] == [[11, 12], [12, 13], [16, 17]]


def test_what_is_cached_is_computed_again_to_be_scored() -> None:
    loop, tokens = Loop(), list(range(10, 23))
    loop.add(0, tokens, sampling=ResolvedSampling())
    loop.drain()
    loop.add(1, tokens)
    loop.add(2, tokens, sampling=ResolvedSampling())
    loop.drain()
    assert loop.cached == {0: 0, 1: 0, 2: 12}
    assert loop.scored == {1: list(range(1, 13))}
    assert (loop.scheduler.totals.prefix_queries, loop.scheduler.totals.prefix_hits) == (26, 12)


def test_a_scored_prompt_is_cached_for_others() -> None:
    loop, tokens = Loop(), list(range(10, 23))
    loop.add(0, tokens)
    loop.drain()
    loop.add(1, tokens, sampling=ResolvedSampling())
    loop.drain()
    assert loop.cached[1] == 12


def test_after_a_preemption_nothing_is_scored_twice_and_what_was_may_be_cached() -> None:
    """The second one is preempted while it decodes: its prompt is scored, and comes from the cache."""
    loop = Loop(blocks=8)
    loop.add(0, list(range(10, 23)), new=12)
    loop.add(1, list(range(40, 51)), new=12)
    loop.drain()
    assert loop.scheduler.totals.preemptions == 1
    assert loop.scored == {0: list(range(1, 13)), 1: list(range(1, 11))}
    entries = [new for plan in loop.plans for new in plan.new]
    assert [(new.computed > 0, new.sampling.prompt_logprobs) for new in entries] == [
        (False, 2),
        (False, 2),
        (True, None),
    ]


def test_a_half_scored_prompt_goes_on_where_its_scores_end() -> None:
    """Preempted in the middle of its prompt, it shares its own blocks, and none that its scores do not reach."""
    loop, tokens = Loop(blocks=10, budget=4), list(range(40, 66))
    loop.add(0, [10, 11, 12], new=20, sampling=ResolvedSampling())
    loop.step()
    loop.step()
    loop.add(1, tokens, new=1)
    loop.drain()
    *_, again = [new for plan in loop.plans for new in plan.new]
    assert (len(again.tokens), again.computed, again.sampling.prompt_logprobs) == (26, 16, 2)
    assert loop.scored == {1: list(range(1, 26))}


def test_no_new_token_wanted() -> None:
    loop = Loop()
    loop.add(0, [10, 11, 12], new=0)
    updates = loop.step()
    assert (updates.finished, [scores.end for _, scores in updates.prompt_logprobs]) == ([(0, "length")], [3])
    assert not loop.scheduler.has_work


def test_a_prompt_as_long_as_the_model_is_computed_alone() -> None:
    loop = Loop()
    loop.add(0, list(range(64)), new=0)
    assert loop.step().finished == [(0, "length")]


def test_one_token_alone_has_no_score() -> None:
    loop = Loop()
    loop.add(0, [10])
    loop.drain()
    assert loop.scored == {}


def test_who_left_hears_nothing() -> None:
    loop = Loop(budget=5)
    loop.add(0, list(range(10, 22)))
    plan = loop.scheduler.schedule()
    assert plan is not None
    result = loop.executor.execute(plan).result()
    loop.scheduler.abort([0])
    assert result.prompt_logprobs
    assert not loop.scheduler.apply(result).prompt_logprobs


def test_a_gap_between_scores_is_refused() -> None:
    loop = Loop()
    loop.add(0, [10, 11, 12])
    plan = loop.scheduler.schedule()
    assert plan is not None
    result = loop.executor.execute(plan).result()
    none = np.zeros((1, 0), np.int32)
    late = PromptLogprobs.from_arrays(2, np.zeros(1, np.float32), np.ones(1, np.int32), none, none.astype(np.float32))
    with pytest.raises(RuntimeError, match="log-probabilities from position 2 on, where 1 is next"):
        loop.scheduler.apply(result._replace(prompt_logprobs=[(int(plan.rows[0]), late)]))
