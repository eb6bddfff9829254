"""What goes into a step: budget, chunks, order, and never one token too many."""

import pytest

from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.plan import StepPlan

from ..fuzz.scheduler_trial import SchedulerTrial, SchedulerWorld


def trial(
    *, rows: int = 4, budget: int = 8, ahead: int = 0, in_flight: int | None = None, ageing: int = 4
) -> SchedulerTrial:
    """Nothing is scarce but the budget."""
    config = SchedulerConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_model_len=200,
        ahead=ahead,
        in_flight_per_sequence=in_flight,
        ageing_steps=ageing,
    )
    return SchedulerTrial(SchedulerWorld(blocks=64, block_size=4, live=100, prefix_caching=False, scheduler=config))


def step(trial: SchedulerTrial) -> dict[int, int]:
    """One step; the tokens it computed, by row."""
    plan = planned(trial)
    trial.apply()
    return dict(zip(plan.rows.tolist(), plan.counts.tolist(), strict=True))


def planned(trial: SchedulerTrial) -> StepPlan:
    plan = trial.schedule()
    assert plan is not None
    return plan


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    one = trial(budget=8)
    one.arrive(family=0, prompt=20, new=2)
    assert [step(one) for _ in range(4)] == [{0: 8}, {0: 8}, {0: 4}, {0: 1}]
    assert not one.scheduler.has_work


def test_only_the_last_chunk_samples() -> None:
    one = trial(budget=8)
    one.arrive(family=0, prompt=20, new=2)
    sampled = []
    for _ in range(3):
        sampled.append(planned(one).samples.tolist())
        one.apply()
    assert sampled == [[False], [False], [True]]


def test_decoding_rows_come_first_and_prompts_take_what_remains() -> None:
    one = trial(budget=8)
    one.arrive(family=0, prompt=4, new=10)
    assert step(one) == {0: 4}
    one.arrive(family=1, prompt=30, new=10)
    assert step(one) == {0: 1, 1: 7}
    assert step(one) == {0: 1, 1: 7}


def test_what_remains_of_the_budget_is_shared_by_several_prompts() -> None:
    one = trial(budget=12)
    for family, prompt in enumerate((3, 5, 6)):
        one.arrive(family=family, prompt=prompt, new=3)
    assert step(one) == {0: 3, 1: 5, 2: 4}
    assert step(one) == {0: 1, 1: 1, 2: 2}


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    one = trial(budget=8)
    one.arrive(family=0, prompt=100, new=1)
    step(one)
    one.arrive(family=1, prompt=4, new=5)
    assert step(one) == {0: 4, 1: 4}


def test_a_long_prompt_is_not_overtaken_forever() -> None:
    one = trial(rows=8, budget=8)
    long = one.arrive(family=0, prompt=100, new=1)
    for _ in range(40):
        one.arrive(family=1, prompt=8, new=1)
        step(one)
    assert long not in one.expected


def test_arrivals_of_a_class_are_admitted_in_order() -> None:
    one = trial(rows=1)
    keys = [one.arrive(family=0, prompt=3, new=2) for _ in range(5)]
    assert one.drain() == keys


def test_an_urgent_class_goes_first() -> None:
    one = trial(rows=1)
    low, middle, urgent = (one.arrive(family=0, prompt=3, new=2, priority=priority) for priority in (2, 1, 0))
    assert one.drain() == [urgent, middle, low]


def test_waiting_makes_up_for_a_class_every_ageing_steps() -> None:
    """A stream of urgent arrivals that would fill every step: class 2 still starts, 2 x ageing steps later."""
    one = trial(rows=1, budget=8, ageing=5)
    patient = one.arrive(family=0, prompt=8, new=1, priority=2)
    while patient in one.expected:
        one.arrive(family=1, prompt=7, new=1)
        step(one)
    assert one.plans == 2 * 5 + 2, "overtaken in as many steps; the prompt itself ranks one step later"


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_plans_ahead_and_not_one_token_too_far(ahead: int) -> None:
    one = trial(ahead=ahead)
    one.arrive(family=0, prompt=4, new=6)
    computed = 0
    while one.scheduler.has_work:
        while (plan := one.schedule()) is not None:
            computed += plan.tokens
        assert one.in_flight <= ahead + 1
        one.apply()
    assert computed == 4 + 6 - 1, "the last token is sampled, never computed"


def test_a_plan_ahead_counts_on_the_token_that_is_being_sampled() -> None:
    one = trial(ahead=1)
    one.arrive(family=0, prompt=4, new=6)
    first, second = planned(one), planned(one)
    assert (first.starts.tolist(), first.counts.tolist(), first.samples.tolist()) == ([0], [4], [True])
    assert (second.starts.tolist(), second.counts.tolist(), second.samples.tolist()) == ([4], [1], [True])
    assert one.schedule() is None


def test_in_a_pipeline_a_sequence_is_in_one_plan_at_a_time() -> None:
    one = trial(ahead=2, in_flight=1, budget=4)
    one.arrive(family=0, prompt=4, new=6)
    one.arrive(family=1, prompt=4, new=6)
    assert planned(one).rows.tolist() == [0]
    assert planned(one).rows.tolist() == [1]
    assert one.schedule() is None
    one.apply()
    assert planned(one).rows.tolist() == [0]


def test_in_a_pipeline_those_who_decode_are_shared_out_among_the_plans() -> None:
    """They came together; were they to go on together, one stage at a time would have work."""
    one = trial(rows=26, ahead=2, in_flight=1, budget=64)
    for _ in range(26):
        one.arrive(family=0, prompt=2, new=6)
    assert [len(planned(one).rows), one.schedule()] == [26, None]
    one.apply()
    groups = [planned(one).rows.tolist() for _ in range(3)]
    assert [len(group) for group in groups] == [9, 9, 8]
    assert one.schedule() is None
    one.apply()
    assert planned(one).rows.tolist() == groups[0], "and so they stay"


def test_a_few_that_decode_go_through_a_pipeline_together() -> None:
    one = trial(rows=8, ahead=1, in_flight=1, budget=16)
    for _ in range(8):
        one.arrive(family=0, prompt=2, new=6)
    step(one)
    assert [len(planned(one).rows), one.schedule()] == [8, None]


def test_a_stop_token_ends_a_sequence_and_what_ran_ahead_is_dropped() -> None:
    one = trial(ahead=1)
    key = one.arrive(family=0, prompt=4, new=10, stop=2)
    heard, reasons = [], []
    while one.scheduler.has_work:
        while one.schedule() is not None:
            pass
        updates = one.apply()
        assert updates is not None
        heard += updates.tokens
        reasons += updates.finished
    assert (heard, reasons) == ([4, 5], [(key, "stop")])


def test_the_executor_hears_of_a_row_when_it_enters_grows_and_leaves() -> None:
    one = trial()
    one.arrive(family=0, prompt=4, new=2)
    entering = planned(one)
    assert [(new.row, new.tokens.tolist(), new.computed) for new in entering.new] == [(0, [0, 1, 2, 3], 0)]
    assert len(entering.appended) == 1
    one.apply()
    growing = planned(one)
    assert (growing.new, len(growing.appended), growing.closed.tolist()) == ((), 1, [])
    one.apply()
    assert one.schedule() is None, "nothing runs: the closed row rides with the next plan"
    one.arrive(family=0, prompt=4, new=2)
    again = planned(one)
    assert (again.closed.tolist(), again.new[0].row) == ([0], 0)


def test_several_tokens_a_step_are_the_same_case() -> None:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64)
    one = SchedulerTrial(SchedulerWorld(blocks=64, burst=(3, 3), scheduler=config))
    one.arrive(family=0, prompt=4, new=8)
    assert [step(one) for _ in range(3)] == [{0: 4}, {0: 3}, {0: 3}], "the last result has two tokens to give"
    assert not one.expected


def test_a_row_that_got_more_than_expected_waits_for_what_was_planned_on_the_old_count() -> None:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64, ahead=1)
    one = SchedulerTrial(SchedulerWorld(blocks=64, burst=(3, 3), scheduler=config))
    one.arrive(family=0, prompt=4, new=8)
    planned(one), planned(one)
    one.apply()
    assert one.schedule() is None, "held: the plan in flight counts on one token, and three came"
    one.apply()
    plan = planned(one)
    assert (plan.starts.tolist(), plan.counts.tolist(), plan.samples.tolist()) == ([5], [2], [True])


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_row_that_waits_for_its_results_keeps_no_other_from_running_ahead(ahead: int) -> None:
    both = trial(ahead=ahead)
    both.arrive(family=0, prompt=3, new=6, constrained=True)
    both.arrive(family=1, prompt=3, new=6)
    ran = [planned(both).rows.tolist() for _ in range(ahead + 1)]
    assert ran == [[0, 1]] + [[1]] * ahead
    both.apply()
    assert planned(both).rows.tolist() == [0, 1]
    while both.scheduler.has_work:
        both.apply()
        both.schedule()


def test_a_chunk_whose_tokens_are_scored_wants_logits_at_all_places() -> None:
    one = trial(budget=8)
    one.arrive(family=0, prompt=11, new=2, scored=True)
    one.arrive(family=1, prompt=1, new=3)
    wanted = []
    while one.scheduler.has_work:
        plan = planned(one)
        wanted.append(dict(zip(plan.rows.tolist(), plan.num_logits.tolist(), strict=True)))
        one.apply()
    assert wanted == [{0: 1, 1: 7}, {0: 1, 1: 4}, {0: 1, 1: 1}]
