"""The fake counts, and believes no plan."""

from collections.abc import Iterator
from concurrent.futures import CancelledError

import numpy as np
import pytest

from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.worker.executor import Capacity
from charonia.engine.worker.fake_executor import FakeBehaviour, FakeExecutor
from charonia.scheduler.plan import NewSequence, StepPlan, StepResult


def plan(
    step: int,
    *rows: tuple[int, int, int],
    new: tuple[NewSequence, ...] = (),
    appended: tuple[tuple[int, int], ...] = (),
    closed: tuple[int, ...] = (),
) -> StepPlan:
    """`rows`: (row, start, count), all of which sample."""
    columns = np.array(rows, np.int32).reshape(-1, 3)
    return StepPlan(
        step,
        rows=columns[:, 0],
        starts=columns[:, 1],
        counts=columns[:, 2],
        samples=np.ones(len(rows), np.bool_),
        num_logits=np.ones(len(rows), np.int32),
        appended=np.array(appended, np.int32).reshape(-1, 2),
        new=new,
        closed=np.array(closed, np.int32),
    )


def entering(row: int, *tokens: int, computed: int = 0) -> NewSequence:
    return NewSequence(row, np.array(tokens, np.int32), computed, ResolvedSampling())


PLAIN = FakeBehaviour()


def fake(manner: FakeBehaviour = PLAIN, *, threaded: bool = False) -> FakeExecutor:
    executor = FakeExecutor(Capacity(10, 64, 1, 8), block_size=4, behaviour=manner, threaded=threaded)
    executor.load(lambda phase, fraction: None)
    executor.allocate(8)
    return executor


@pytest.fixture
def begun() -> Iterator[FakeExecutor]:
    """Row 0 holds 7, 8 in block 5 and has sampled 9."""
    executor = fake()
    result = run(executor, plan(0, (0, 0, 2), new=(entering(0, 7, 8),), appended=((0, 5),)))
    assert result.tokens.tolist() == [9]
    yield executor
    executor.close()


def run(executor: FakeExecutor, plan: StepPlan) -> StepResult:
    return executor.execute(plan).result(timeout=30)


def test_the_next_token_is_the_last_plus_one(begun: FakeExecutor) -> None:
    result = run(begun, plan(1, (0, 2, 1)))
    assert (result.rows.tolist(), result.offsets.tolist(), result.counts.tolist()) == ([0], [3], [1])
    assert result.tokens.tolist() == [0], "modulo the vocabulary"


def test_a_burst_is_several_tokens() -> None:
    executor = fake(FakeBehaviour(burst=(3, 3)))
    result = run(executor, plan(0, (0, 0, 1), new=(entering(0, 1),), appended=((0, 0),)))
    assert (result.counts.tolist(), result.tokens.tolist()) == ([3], [2, 3, 4])


def test_a_row_planned_on_a_token_that_did_not_come_yields_nothing() -> None:
    executor = fake(FakeBehaviour(burst=(0, 0)))
    assert run(executor, plan(0, (0, 0, 1), new=(entering(0, 1),), appended=((0, 0),))).counts.tolist() == [0]
    assert run(executor, plan(1, (0, 1, 1))).rows.tolist() == []


def test_results_come_from_its_thread_in_order() -> None:
    executor = fake(FakeBehaviour(step_seconds=0.01, token_seconds=0.001), threaded=True)
    first = executor.execute(plan(0, (0, 0, 1), new=(entering(0, 1),), appended=((0, 0),)))
    second = executor.execute(plan(1, (0, 1, 1)))
    assert [first.result(30).tokens.tolist(), second.result(30).tokens.tolist()] == [[2], [3]]
    executor.close()


def test_closing_cancels_what_has_not_begun() -> None:
    executor = fake(FakeBehaviour(step_seconds=0.1), threaded=True)
    executor.execute(plan(0, (0, 0, 1), new=(entering(0, 1),), appended=((0, 0),)))
    waiting = [executor.execute(plan(step, (0, step, 1))) for step in range(1, 100)]
    executor.close()
    with pytest.raises(CancelledError):
        waiting[-1].result(timeout=0)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(plan(2, (0, 2, 1)), id="a step is missing"),
        pytest.param(plan(1, (0, 2, 1), (0, 2, 1)), id="a row twice"),
        pytest.param(plan(1, (0, 2, 0)), id="a row without work"),
        pytest.param(plan(1, (0, 2, 1), new=(entering(0, 1),)), id="an occupied row"),
        pytest.param(plan(1, (0, 2, 1), appended=((0, 5),)), id="a block it has already"),
        pytest.param(plan(1, (1, 0, 2), new=(entering(1, 1, 2),)), id="no block for a token"),
        pytest.param(plan(1, (1, 0, 2), new=(entering(1, 1, 2),), appended=((1, 5),)), id="a block of somebody else"),
        pytest.param(
            plan(1, (1, 5, 1), new=(entering(1, 1, 2, 3, 4, 5, 6, computed=4),), appended=((1, 6), (1, 7))),
            id="a gap",
        ),
        pytest.param(
            plan(1, (1, 4, 1), new=(entering(1, 1, 2, 3, 4, 5, computed=4),), appended=((1, 6), (1, 7))),
            id="a prefix that nobody computed",
        ),
        pytest.param(plan(1, (0, 2, 1), new=(entering(1, 3, computed=1),)), id="nothing to compute"),
    ],
)
def test_a_plan_that_breaks_the_contract_fails(begun: FakeExecutor, broken: StepPlan) -> None:
    with pytest.raises(AssertionError):
        run(begun, broken)


def test_prompts_are_scored_and_what_follows_is_not() -> None:
    executor = fake()
    asked = NewSequence(0, np.array([1, 2, 5, 5], np.int32), 0, ResolvedSampling(prompt_logprobs=2), prompt=3)
    step = plan(0, (0, 0, 4), new=(asked,), appended=((0, 0),))
    [(row, scores)] = run(executor, step._replace(num_logits=step.counts)).prompt_logprobs
    assert (row, scores.start, scores.end) == (0, 1, 3)
    assert [(score.rank, score.logprobs.chosen) for score in scores.to_list()] == [(1, -1.0), (3, -3.0)]
    assert [score.logprobs.ids for score in scores.to_list()] == [[2, 3], [3, 4]]
    assert not run(executor, plan(1, (0, 4, 1), appended=((0, 1),))).prompt_logprobs


def test_a_closed_row_may_enter_again_with_its_old_blocks(begun: FakeExecutor) -> None:
    result = run(begun, plan(1, (0, 0, 1), closed=(0,), new=(entering(0, 3),), appended=((0, 5),)))
    assert result.tokens.tolist() == [4]
