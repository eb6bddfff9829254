"""What steps cost, learnt: from exact times, noisy ones and wrong ones."""

from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.scheduler.pace.step_times import StepTimeModel, TimedSteps
from charonia.scheduler.plan import StepWork

DECODING, BESIDE, PROMPT = StepWork(8, 4000), StepWork(8, 4000, 32, 16_000), StepWork(0, 0, 256, 32_768)


def true_seconds(work: StepWork) -> float:
    return (
        0.03
        + 1e-3 * work.decode_tokens
        + 1e-6 * work.decode_context
        + 2e-3 * work.prefill_tokens
        + 3e-7 * work.prefill_context
    )


def taught(rounds: int, noise: float = 0.0, seed: int = 0) -> StepTimeModel:
    times, random = TimedSteps(), Random(seed)
    for _ in range(rounds):
        for work in (DECODING, BESIDE, PROMPT):
            times.observe(work, true_seconds(work) * random.uniform(1 - noise, 1 + noise))
    assert times.model is not None
    return times.model


def test_nothing_is_known_before_a_step_was_timed() -> None:
    times = TimedSteps()
    assert (times.model, times.prompt_seconds(1, 0)) == (None, inf)
    times.observe(DECODING, 0.5)
    assert times.model is not None
    assert times.model.step_seconds(DECODING) == pytest.approx(0.5), "the first step sets the scale"
    times.reset()
    assert times.model is None


@pytest.mark.parametrize("work", [DECODING, BESIDE, PROMPT])
def test_exact_times_are_learnt(work: StepWork) -> None:
    assert taught(60).step_seconds(work) == pytest.approx(true_seconds(work), rel=0.02)


@pytest.mark.parametrize("work", [DECODING, BESIDE, PROMPT])
def test_noise_leaves_a_tenth(work: StepWork) -> None:
    assert taught(200, noise=0.2).step_seconds(work) == pytest.approx(true_seconds(work), rel=0.15)


def test_the_few_steps_of_a_gpus_start_are_enough() -> None:
    """Whose decode step costs as much as some hundreds of a prompt's tokens."""
    times, prompts = TimedSteps(), (512, 2048, 8192)

    def seconds(work: StepWork) -> float:
        return 4.8e-3 + 27e-6 * work.prefill_tokens + 1e-9 * work.prefill_context

    for tokens in prompts:
        for work in (StepWork(0, 0, tokens, tokens**2 // 2), StepWork(1, tokens + 1), StepWork(1, tokens + 2)):
            times.observe(work, seconds(work))
    model = times.model
    assert model is not None
    before = model.step_seconds(StepWork(1, 600))
    times.repeat_observations()
    true = seconds(StepWork(0, 0, 1024, 1024**2 // 2)) - seconds(StepWork())
    assert times.prompt_seconds(1024, 0) == pytest.approx(true, rel=0.15)
    assert before != pytest.approx(4.8e-3, rel=0.2), "as nothing was to be learnt"
    assert model.step_seconds(StepWork(1, 600)) == pytest.approx(4.8e-3, rel=0.05)


def test_a_hiccup_is_no_news() -> None:
    cost = taught(60)
    before = cost.step_seconds(DECODING)
    cost.observe(DECODING, 100 * before)
    assert cost.step_seconds(DECODING) < 1.25 * before


def test_a_machine_that_became_slower_is_followed() -> None:
    cost = taught(60)
    for _ in range(30):
        cost.observe(DECODING, 3 * true_seconds(DECODING))
    assert cost.step_seconds(DECODING) == pytest.approx(3 * true_seconds(DECODING), rel=0.02)


def test_the_same_times_teach_the_same() -> None:
    assert taught(20, noise=0.3).step_seconds(BESIDE) == taught(20, noise=0.3).step_seconds(BESIDE)


@given(st.floats(1e-6, 10), st.integers(0, 100_000))
def test_so_many_tokens_of_a_prompt_and_not_one_more(seconds: float, context: int) -> None:
    cost = taught(20)
    tokens = cost.prompt_tokens_within(seconds, context)
    assert cost.prompt_seconds(tokens, context) <= seconds * (1 + 1e-9)
    assert cost.prompt_seconds(tokens + 1, context) > seconds * (1 - 1e-9)


@given(st.lists(st.tuples(st.sampled_from([DECODING, BESIDE, PROMPT, StepWork(1)]), st.floats(1e-7, 1e4)), max_size=60))
def test_whatever_is_told_costs_stay_positive_and_finite(told: list[tuple[StepWork, float]]) -> None:
    cost = StepTimeModel(DECODING, 0.01)
    for work, seconds in told:
        cost.observe(work, seconds)
    assert (
        0
        < cost.step_seconds(StepWork())
        < cost.step_seconds(StepWork(1))
        < cost.step_seconds(StepWork(1, 0, 100, 0))
        < float("inf")
    )
