"""A machine's formula from measured steps, and the least squares below it."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from charonia.core.errors import InvalidArgument
from charonia.extras.optimizer.simulated_machine import SimulatedMachine, StepLoad, StepSpread
from charonia.extras.optimizer.step_fit import LEAST_STEPS, StepSample, fit_machine, solve_least_squares
from charonia.scheduler.plan import StepWork

KNOWN = SimulatedMachine(
    weights=0.0,
    products=((1, 10e-3), (2, 11e-3), (4, 11.5e-3), (8, 14e-3), (512, 400e-3)),
    heads=((0, 0.0), (1, 3e-3), (64, 9e-3)),
    decode_context=0.8e-6,
    prompt_context=0.3e-6,
    chunk_context=2e-6,
    rest=0.0,
    between=0.5e-3,
    between_token=20e-6,
)


def loads(count: int, seed: int = 0) -> list[StepLoad]:
    """Steps that decode, that compute prompts, and that do both."""
    random, found = Random(seed), []
    for number in range(count):
        rows = random.choice((0, 1, 2, 3, 6, 12, 24, 48)) if number % 3 else 0
        chunk = 0 if rows and number % 2 else round(2 ** random.uniform(0, 8.9))
        context, sampled = random.randrange(1000), rows + (chunk > 0 and random.random() < 0.3)
        work = StepWork(rows, rows * context, chunk, chunk * (context + chunk // 2))
        found.append(StepLoad(work, sampled, context + chunk if chunk else 0))
    return found


def measured(count: int = 300) -> list[StepSample]:
    return [StepSample(load, KNOWN.seconds(load), KNOWN.seconds_between(7), 7) for load in loads(count)]


def test_a_formula_is_found_again() -> None:
    machine, error = fit_machine(measured())
    assert error < 0.005
    for load in loads(100, seed=1):
        assert machine.seconds(load) == pytest.approx(KNOWN.seconds(load), rel=0.03)
    assert machine.decode_context == pytest.approx(KNOWN.decode_context, rel=0.05)
    assert machine.seconds_between(7) == pytest.approx(KNOWN.seconds_between(7))


def test_neighbours_who_hold_steps_up_change_the_spread_and_not_the_formula() -> None:
    held = [each._replace(seconds=each.seconds * (9 if at % 12 == 5 else 1)) for at, each in enumerate(measured())]
    machine, _ = fit_machine(held)
    for load in loads(100, seed=1):
        assert machine.seconds(load) == pytest.approx(KNOWN.seconds(load), rel=0.06)
    for spread in machine.spread:
        assert spread.factors[50] == pytest.approx(1, abs=0.02)
        assert spread.factors[-1] == pytest.approx(9, rel=0.1)


def test_what_holds_short_steps_up_is_little_of_long_ones() -> None:
    held = [each._replace(seconds=each.seconds + (10e-3 if at % 5 == 2 else 0)) for at, each in enumerate(measured())]
    machine, _ = fit_machine(held)
    short, *_, long = machine.spread
    assert short.seconds < 0.03
    assert short.factors[95] > 1.25
    assert long.seconds > 0.15
    assert long.factors[95] < 1.1
    short_step, long_step = StepLoad.of_decoding(1, 40), StepLoad.of_prompt(400)
    for load, at_least, at_most in ((short_step, 1.5, 2.2), (long_step, 1.0, 1.1)):
        drawn = [machine.draw_seconds(load, random) for random in [Random(0)] for _ in range(400)]
        assert at_least <= np.quantile(drawn, 0.97) / machine.seconds(load) < at_most


def test_more_work_never_takes_less_time() -> None:
    random = Random(3)
    noisy = [each._replace(seconds=each.seconds * random.uniform(0.5, 2)) for each in measured(300)]
    machine, _ = fit_machine(noisy)
    for table in (machine.products, machine.heads):
        seconds = [each for _, each in table]
        assert seconds == sorted(seconds)
    assert min(machine.decode_context, machine.prompt_context, machine.chunk_context) >= 0


def test_steps_that_sample_all_their_rows_tell_nothing_of_a_head() -> None:
    decoding = [StepLoad.of_decoding(rows, context) for rows in (1, 2, 4, 8, 16) for context in range(20, 500, 40)]
    machine, error = fit_machine([StepSample(load, KNOWN.seconds(load)) for load in decoding], heads=False)
    assert machine.heads == ((0, 0.0),)
    assert error < 0.01
    assert (machine.between, machine.between_token) == (0.0, 0.0)


def test_what_never_varied_is_taken_for_no_cause() -> None:
    machine, _ = fit_machine([StepSample(StepLoad.of_decoding(1, 40), 0.05)] * 30, heads=False)
    assert machine.seconds(StepLoad.of_decoding(1, 4000)) == pytest.approx(0.05)


def test_few_steps_say_too_little() -> None:
    with pytest.raises(InvalidArgument, match=f"23 steps were measured, and {LEAST_STEPS} are needed"):
        fit_machine(measured(LEAST_STEPS - 1))


@given(st.integers(1, 6), st.integers(6, 20), st.integers(0, 10_000))
def test_least_squares_keep_the_conditions_of_a_minimum(columns: int, rows: int, seed: int) -> None:
    """Nothing below 0; no slope where there is something, and none downwards where there is nothing."""
    random = np.random.default_rng(seed)
    features, target = random.normal(size=(rows, columns)), random.normal(size=rows)
    found = solve_least_squares(features, target)
    slope = features.T @ (target - features @ found)
    assert (found >= 0).all()
    assert np.abs(slope[found > 0]).max(initial=0) < 1e-6
    assert slope.max(initial=0) < 1e-6


def test_a_slower_machine_is_slower_by_that() -> None:
    load, random = StepLoad.of_prompt(100), Random(0)
    assert KNOWN.slowed(1.5).draw_seconds(load, random) == pytest.approx(1.5 * KNOWN.seconds(load))
    assert replace(KNOWN, spread=(StepSpread(1.0, (0.5, 2.0)),)).slowed(2).spread == (StepSpread(1.0, (1.0, 4.0)),)


def test_between_two_lengths_a_step_varies_as_between_their_spreads() -> None:
    seconds = KNOWN.seconds(load := StepLoad.of_prompt(100))
    short, long = StepSpread(seconds / 2, (2.0,)), StepSpread(seconds * 2, (1.0,))
    for spread, factor in (((short, long), 1.5), ((long,), 1.0), ((short,), 2.0)):
        drawn = replace(KNOWN, spread=spread).draw_seconds(load, Random(0))
        assert drawn == pytest.approx(factor * seconds)
