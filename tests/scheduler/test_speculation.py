"""Drafts in plans: what is verified, what is accepted, and what it costs others."""

from collections.abc import Sequence
from itertools import count
from math import inf

import numpy as np
import pytest

from charonia.engine.worker.fake_executor import FakeExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.constraints.constrained_rows import ForcedTokens, with_forced_tokens
from charonia.scheduler.drafts import speculation
from charonia.scheduler.drafts.draft_costs import PROBE_STEPS, DecodeCosts, DraftCosts
from charonia.scheduler.drafts.speculation import GRAMMAR, PREDICTION, DraftRequest, Speculation
from charonia.scheduler.plan import StepPlan, StepUpdates
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

RIGHT = 2
"""Tokens of each draft that are what the executor says, the last one and one more each time."""


class Counting:
    """Drafts RIGHT tokens that are right, and then wrong ones."""

    def __init__(self, right: int = RIGHT) -> None:
        self.right = right

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        lasts = [int([*request.prompt, *request.outputs][-1]) for request in requests]
        return [[last + 1 + at if at < self.right else 7 for at in range(9)] for last in lasts]


EXTRAS = ("", "", "")
"""Of a sequence without adapter, tenant and salt."""


class Loop:
    """A scheduler that speculates over the fake executor, step by step."""

    def __init__(
        self,
        right: int = RIGHT,
        most: int = 4,
        blocks: int = 64,
        vocab_size: int = 32_000,
        speculation: Speculation | None = None,
        **config: int,
    ) -> None:
        self.cache, self.drafter = KVCacheManager(blocks, 4), Counting(right)
        drafters = {"counting" if most else PREDICTION: self.drafter}
        self.speculation = speculation or Speculation(drafters, most, vocab_size)
        self.scheduler = Scheduler(
            SchedulerConfig(**config),  # type: ignore[arg-type]
            self.cache,
            speculation=self.speculation,
        )
        self.executor = FakeExecutor(block_size=4, threaded=False)
        self.executor.allocate(blocks)

    def add(self, key: int, prompt: int, new: int, **asked: object) -> None:
        tokens = np.arange(100, 100 + prompt, dtype=np.int32)
        self.scheduler.add(SequenceSpec(key=key, prompt=tokens, max_tokens=new, **asked))  # type: ignore[arg-type]

    def step(self) -> tuple[StepPlan, StepUpdates]:
        plan = self.scheduler.schedule()
        assert plan is not None
        updates = self.scheduler.apply(self.executor.execute(plan).result())
        self.scheduler.check_integrity()
        return plan, updates


def test_a_step_brings_the_drafts_that_are_right_and_one_token_more() -> None:
    loop = Loop()
    loop.add(1, prompt=3, new=20)
    loop.step()
    plan, updates = loop.step()
    assert (plan.starts.tolist(), plan.counts.tolist(), plan.drafts.tolist()) == ([3], [5], [4])
    assert plan.drafted.tolist() == [104, 105, 7, 7]
    assert plan.num_logits.tolist() == [5]
    assert updates.tokens == [104, 105, 106]
    assert updates.drafts == [(1, 4, 2)]
    plan, updates = loop.step()
    assert (plan.starts.tolist(), updates.tokens) == ([6], [107, 108, 109])
    totals = loop.speculation.totals["counting"]
    assert (totals.drafts, totals.draft_tokens, totals.accepted_tokens) == (2, 8, 4)
    assert totals.accepted_by_place == [2, 2, 0, 0]
    assert totals.seconds > 0


class Predicting:
    """Drafts what requests bring."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [[] if request.prediction is None else request.prediction.tolist()[: request.k] for request in requests]


def test_each_drafter_has_totals_of_its_own() -> None:
    """The one that a request brings is asked first, and only for that request; the next where it has no guess."""
    drafting = Speculation({PREDICTION: Predicting(), "counting": Counting()}, 4, 32_000)
    loop = Loop(speculation=drafting)
    loop.add(1, prompt=3, new=20, prediction=np.arange(104, 110, dtype=np.int32))
    loop.add(2, prompt=3, new=20)
    loop.add(3, prompt=3, new=20, prediction=np.array([], np.int32))
    loop.step()
    loop.step()
    counted = {name: (each.drafts, each.draft_tokens, each.accepted_tokens) for name, each in drafting.totals.items()}
    assert counted == {PREDICTION: (1, 6, 6), "counting": (2, 8, 4), GRAMMAR: (0, 0, 0)}


def test_what_a_grammar_forces_is_counted_apart_and_tells_nothing_of_the_drafter() -> None:
    """It replaces wrong drafts from their third place on; where nobody guesses, all is its own."""
    loop = Loop()
    forced = [107, 108, 109, 110, 111]
    loop.speculation.possible_drafts = lambda key, drafts, most: [*drafts[:2], 106, 107] if drafts else forced[:most]
    loop.add(1, prompt=3, new=30, constrained=True)
    loop.step()
    assert loop.step()[0].drafted.tolist() == [104, 105, 106, 107]
    own, forced_ones = loop.speculation.totals["counting"], loop.speculation.totals[GRAMMAR]
    assert (own.drafts, own.draft_tokens, own.accepted_tokens) == (1, 2, 2)
    assert (forced_ones.drafts, forced_ones.draft_tokens, forced_ones.accepted_by_place) == (0, 2, [0, 0, 1, 1])


def test_forced_tokens_leave_the_chance_of_drafts_as_it_is() -> None:
    loop = Loop(right=0)
    loop.drafter.propose = lambda requests: [[] for _ in requests]  # type: ignore[method-assign]
    loop.speculation.possible_drafts = lambda key, drafts, most: drafts or [7] * most
    loop.add(1, prompt=3, new=30, constrained=True)
    loop.step()
    rate = loop.speculation._acceptance_rate
    for _ in range(4):
        assert loop.step()[0].drafted.tolist() == [7, 7, 7, 7], "wrong, as the executor counts: and yet no drafter's"
    assert loop.speculation._acceptance_rate == rate
    assert loop.speculation.totals[GRAMMAR].drafts == 4
    assert loop.speculation.totals["counting"].drafts == 0


def test_no_draft_reaches_beyond_the_last_token() -> None:
    loop = Loop(right=9)
    loop.add(1, prompt=3, new=4)
    loop.step()
    plan, updates = loop.step()
    assert plan.counts.tolist() == [3]
    assert updates.tokens == [104, 105, 106]
    assert updates.finished == [(1, "length")]
    assert loop.cache.free_blocks == 64


def test_a_stop_token_ends_a_run_of_accepted_ones() -> None:
    loop = Loop(right=9)
    loop.add(1, prompt=3, new=40, stop_token_ids=frozenset([105]))
    loop.step()
    _, updates = loop.step()
    assert updates.tokens == [104, 105]
    assert updates.finished == [(1, "stop")]


def test_the_budget_of_a_step_bounds_drafts() -> None:
    loop = Loop(max_num_seqs=4, max_num_batched_tokens=6)
    for key in range(3):
        loop.add(key, prompt=1, new=30)
    loop.step()
    for _ in range(6):
        plan, _ = loop.step()
        assert 3 < plan.tokens <= 6


def test_drafts_take_no_block_that_others_may_need() -> None:
    """Eight blocks for two sequences: with drafts for both they need one each, and another in reserve."""
    loop = Loop(right=0, blocks=4)
    loop.add(1, prompt=4, new=4)
    loop.add(2, prompt=4, new=4)
    loop.step()
    preemptions = 0
    while loop.scheduler.has_work:
        loop.step()
        preemptions += loop.scheduler.totals.preemptions
    assert preemptions == 0


def test_a_request_may_want_fewer_drafts_or_none() -> None:
    loop = Loop(right=9, max_num_seqs=4)
    for key, wanted in enumerate((None, 2, 0, 9)):
        loop.add(key, prompt=3, new=20, drafts_wanted=wanted)
    loop.step()
    plan, _ = loop.step()
    assert plan.drafts.tolist() == [4, 2, 0, 4]


def test_a_prediction_may_have_more_drafts_where_memory_for_logits_is() -> None:
    loop = Loop(right=30, most=0)
    predicted = np.arange(104, 140, dtype=np.int32)
    loop.add(1, prompt=3, new=60, prediction=predicted)
    loop.add(2, prompt=3, new=60)
    loop.step()
    assert loop.step()[0].drafts.tolist() == [9, 0], "the drafter knows no more"
    loop.speculation.most_sampled = 7
    assert loop.step()[0].drafts.tolist() == [5, 0]


def test_what_the_host_appends_takes_the_place_of_rejected_drafts() -> None:
    """Two of four drafts are right, and three tokens follow unsampled: nothing that was computed is in their place."""
    loop = Loop()
    loop.speculation.possible_drafts = lambda key, drafts, most: drafts[:most]
    loop.add(1, prompt=3, new=20, constrained=True)
    loop.step()
    plan = loop.scheduler.schedule()
    assert plan is not None
    assert plan.drafted.tolist() == [104, 105, 7, 7]
    follows = {0: ForcedTokens([107, 108])}
    updates = loop.scheduler.apply(with_forced_tokens(loop.executor.execute(plan).result(), follows))
    assert updates.tokens == [104, 105, 106, 107, 108]
    loop.scheduler.check_integrity()
    plan, updates = loop.step()
    assert (plan.starts.tolist(), plan.counts.tolist(), plan.drafted.tolist()) == ([6], [7], [109, 110, 7, 7])
    assert updates.tokens == [109, 110, 111]


def test_a_token_that_there_is_not_ends_a_draft() -> None:
    loop = Loop(vocab_size=105)
    loop.add(1, prompt=3, new=9)
    loop.step()
    plan, _ = loop.step()
    assert plan.drafted.tolist() == [104]


def test_only_accepted_tokens_are_found_by_others() -> None:
    loop = Loop(right=0)
    loop.add(1, prompt=4, new=9)
    while loop.scheduler.has_work:
        loop.step()
    said = np.arange(100, 112, dtype=np.int32)
    wrong = np.concatenate([said[:5], [7, 7, 7]]).astype(np.int32)
    assert loop.cache.shareable(loop.cache.digest(said, EXTRAS), 12) == 8
    assert loop.cache.shareable(loop.cache.digest(wrong, EXTRAS), 9) == 4


def test_with_plans_ahead_a_sequence_that_drafts_is_in_one_at_a_time() -> None:
    loop = Loop(ahead=1)
    loop.add(1, prompt=3, new=9)
    first = loop.scheduler.schedule()
    assert first is not None
    assert loop.scheduler.schedule() is None
    loop.scheduler.apply(loop.executor.execute(first).result())
    plan, _ = loop.step()
    assert plan.drafts.tolist() == [4]


def test_a_tenant_pays_for_what_was_rejected() -> None:
    """Two tenants with the same prompts and the same number of tokens, in turns: wrong drafts cost the one its turn."""
    services = []
    for right in (4, 0):
        loop = Loop(right=right)
        loop.add(1, prompt=3, new=6, tenant="a")
        loop.add(2, prompt=3, new=6, tenant="b")
        while loop.scheduler.has_work:
            loop.step()
        services.append(loop.scheduler._fairness.service[:2].tolist())
    assert services[0] == [3 + 2 * 6] * 2
    assert all(paid > 3 + 2 * 6 for paid in services[1])


def timed(seconds: dict[int, float], accuracy: int, steps: int = 300) -> list[int]:
    """Drafted tokens of each step of a lone sequence, where steps take so long by their tokens."""
    loop, drafted = Loop(right=accuracy, blocks=1000, max_model_len=2000), list[int]()
    loop.add(1, prompt=3, new=1900)
    for _ in range(steps):
        plan = loop.scheduler.schedule()
        assert plan is not None
        loop.scheduler.apply(loop.executor.execute(plan).result(), seconds[plan.tokens])
        drafted.append(len(plan.drafted))
    return drafted[100:]


def test_right_drafts_are_verified_while_that_is_faster() -> None:
    cheap = {1: 1.0, 2: 1.0, 3: 1.1, 4: 1.3, 5: 1.6}
    assert timed(cheap, accuracy=9).count(4) > 190
    assert set(timed(cheap, accuracy=9)) == {0, 4}  # some have none, to time that too
    dear = {1: 1.0, 2: 2.1, 3: 3.2, 4: 4.3, 5: 5.4}
    assert timed(dear, accuracy=9).count(0) > 195  # now and then they are tried again


def test_larger_steps_are_tried_one_after_the_other() -> None:
    costs = DecodeCosts()
    costs.observe(16, 1.0)
    assert [costs.seconds(tokens) for tokens in (3, 20, 21)] == [1.0, 1.0, inf]
    costs.observe(20, 1.4)
    assert costs.seconds(18) == pytest.approx(1.2)
    assert costs.seconds(22) == pytest.approx(1.6)  # they grow as at the end
    assert costs.seconds(40) == inf


def test_a_step_that_was_disturbed_once_is_tried_again() -> None:
    costs = DecodeCosts()
    costs.observe(2, 50.0)
    for _ in range(4 * PROBE_STEPS):
        costs.observe(1, 1.0)
    assert 2 not in costs
    assert costs.seconds(2) == 1.0
    costs.observe(1, 50.0)
    assert costs.seconds(1) < 1.1


def test_what_seems_to_take_longer_than_more_tokens_was_disturbed() -> None:
    costs = DecodeCosts()
    for tokens, seconds in ((1, 3.0), (2, 1.1), (6, 2.1)):
        costs.observe(tokens, seconds)
    assert [costs.seconds(tokens) for tokens in (1, 2, 4, 6)] == pytest.approx([1.1, 1.1, 1.6, 2.1])


def test_a_drafter_that_is_wrong_costs_nothing_after_a_while_and_is_believed_again() -> None:
    costs = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3, 5: 1.4}
    assert timed(costs, accuracy=0).count(0) > 190
    loop = Loop(right=0, blocks=1000, max_model_len=2000)
    loop.add(1, prompt=3, new=1900)
    loop.drafter.right = 0
    drafts = []
    for step in range(140):
        loop.drafter.right = 9 if step > 80 else 0
        plan = loop.scheduler.schedule()
        assert plan is not None
        loop.scheduler.apply(loop.executor.execute(plan).result(), costs[plan.tokens])
        drafts.append(len(plan.drafted))
    assert drafts[40:80] == [0] * 40
    assert drafts[-10:].count(4) >= 9


def test_a_sequence_without_drafts_hardly_waits_for_those_with() -> None:
    """One of two drafts: its drafts may not slow the other one down."""
    loop = Loop(right=9, blocks=1000, max_model_len=2000)
    loop.add(1, prompt=3, new=900)
    loop.add(2, prompt=3, new=900, drafts_wanted=0)
    drafts = []
    for _ in range(100):
        plan = loop.scheduler.schedule()
        assert plan is not None
        loop.scheduler.apply(loop.executor.execute(plan).result(), 1.0 + 0.02 * max(plan.tokens - 2, 0))
        drafts.append(len(plan.drafted))
    assert max(drafts[50:]) == 2


def test_drafters_rest_while_drafts_for_many_bring_nothing() -> None:
    speculation, asked = Speculation({"counting": (drafter := Counting(9))}, 4, 32_000), list[int]()
    loop = Loop(blocks=2000, speculation=speculation, max_num_seqs=8, max_model_len=2000)
    propose, dear = drafter.propose, True
    drafter.propose = lambda requests: asked.append(len(drafts)) or propose(requests)  # type: ignore[method-assign, func-returns-value]
    for key in range(8):
        loop.add(key, prompt=3, new=1000)
    drafts = list[int]()
    for step in range(240):
        dear = step < 120
        plan = loop.scheduler.schedule()
        assert plan is not None
        loop.scheduler.apply(loop.executor.execute(plan).result(), float(plan.tokens) if dear else 1.0)
        drafts.append(len(plan.drafted))
    assert len([at for at in asked if 40 <= at < 120]) == 10
    assert len([at for at in asked if at >= 200]) > 36


def test_drafting_takes_no_longer_than_it_saves_and_what_it_may_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter takes half a step each time, for nothing, and then for right drafts."""
    for right, calls in ((0, range(5, 40)), (9, range(270, 301))):
        loop, now, asked = Loop(right=right, blocks=1000, max_model_len=3000), [0.0], [0]

        def passing(now: list[float] = now, asked: list[int] = asked) -> float:
            now[0], asked[0] = now[0] + 0.005 / 3, asked[0] + 1
            return now[0]

        monkeypatch.setattr(speculation, "perf_counter", passing)
        loop.add(1, prompt=3, new=1800)
        for _ in range(300):
            plan = loop.scheduler.schedule()
            assert plan is not None
            loop.scheduler.apply(loop.executor.execute(plan).result(), 0.01 + 0.0001 * plan.tokens)
        assert asked[0] // 4 in calls, "the clock is read twice for the step, and twice for the drafter"


def test_a_drafter_that_learns_is_told_what_a_text_became() -> None:
    loop, told = Loop(right=9), list[DraftRequest]()
    loop.drafter.finished = told.append  # type: ignore[attr-defined]
    loop.add(1, prompt=3, new=4, tenant="a", salt="salt")
    while loop.scheduler.has_work:
        loop.step()
    (request,) = told
    assert (list(request.outputs), request.tenant) == ([103, 104, 105, 106], "a")
    assert request.extras == ("", "a", "salt")


def test_a_sequence_whose_drafts_are_wrong_rests_and_is_in_plans_ahead_meanwhile() -> None:
    loop, asked = Loop(right=0, blocks=1000, max_model_len=2000, ahead=1), list[int]()
    propose = loop.drafter.propose
    loop.drafter.propose = lambda requests: asked.append(1) or propose(requests)  # type: ignore[method-assign, func-returns-value]
    loop.add(1, prompt=3, new=400)
    together, plans, tokens = 0, list[StepPlan](), list[int]()
    while loop.scheduler.has_work:
        while (plan := loop.scheduler.schedule()) is not None:
            plans.append(plan)
        together += loop.scheduler.in_flight == 2
        updates = loop.scheduler.apply(loop.executor.execute(plans.pop(0)).result(), 1.0)
        loop.scheduler.check_integrity()
        tokens += updates.tokens
        loop.drafter.right = 9 if len(tokens) > 300 else 0
    assert tokens == list(range(103, 503))
    assert 150 < together < 350
    assert 30 < len(asked) < 120


def test_no_drafts_are_verified_because_they_slow_what_they_are_held_against() -> None:
    """Beside the steps that follow drafts those with drafts seem to be worth it, beside others they are not."""
    loop, plans, before = Loop(right=9, blocks=1000, max_model_len=3000), list[int](), 0
    loop.add(1, prompt=3, new=2500)
    for _ in range(400):
        plan = loop.scheduler.schedule()
        assert plan is not None
        drafted = len(plan.drafted)
        seconds = 4.8 if drafted else 2.0 if before else 1.0
        loop.scheduler.apply(loop.executor.execute(plan).result(), seconds)
        plans.append(drafted)
        before = drafted
    assert plans[200:].count(0) > 180


def test_the_step_after_drafts_says_nothing_about_those_without() -> None:
    """It takes twice as long as they do, and is not learnt from."""
    costs = DraftCosts()
    for drafted, seconds in [(0, 1.0), (4, 3.0), (0, 2.0), (0, 1.0)] * 20:
        costs.observe_step(1 + drafted, seconds, drafted, drafted)
    assert costs.expected_seconds(1) == pytest.approx(1.0)
    assert costs.expected_seconds(5) == pytest.approx(3.0)


def test_sequences_that_rest_are_asked_together() -> None:
    loop, asked = Loop(right=0, blocks=2000, max_num_seqs=4, max_model_len=2000), list[int]()
    propose = loop.drafter.propose
    loop.drafter.propose = lambda requests: asked.append(len(requests)) or propose(requests)  # type: ignore[method-assign, func-returns-value]
    for key in range(4):
        loop.add(key, prompt=3 + key, new=500 + 7 * key)
    for step in range(400):
        if step == 300:
            asked.clear()
        plan = loop.scheduler.schedule()
        assert plan is not None
        loop.scheduler.apply(loop.executor.execute(plan).result(), 1.0 + 0.1 * plan.tokens)
    assert asked == [4] * len(asked)
    assert 2 <= len(asked) <= 5


@pytest.mark.parametrize(("host", "worth"), [(3.0, True), (9.0, False)])
def test_what_the_loop_takes_beside_drafts_is_a_cost_of_theirs(
    monkeypatch: pytest.MonkeyPatch, host: float, worth: bool
) -> None:
    """A draft that is right saves what the loop takes around another step, too; around drafts it may take more. To
    draft takes as long on a busy machine as on another."""
    monkeypatch.setattr(speculation, "perf_counter", count(step=1e-5).__next__)
    loop, plans = Loop(right=1, blocks=1000, max_model_len=3000), list[int]()
    loop.add(1, prompt=3, new=2900)
    for _ in range(500):
        plan = loop.scheduler.schedule()
        assert plan is not None
        drafted = len(plan.drafted)
        result = loop.executor.execute(plan).result()
        loop.scheduler.apply(result, 3.6 if drafted else 1.0, host_seconds=host if drafted else 3.0)
        plans.append(drafted)
    assert (plans[250:].count(0) < 125) is worth
