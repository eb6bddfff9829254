"""A machine's formula out of measured steps, by least squares. Knows neither clocks nor engines."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidArgument
from ...telemetry.roofline import SecondsTable
from .simulated_machine import SimulatedMachine, StepLoad, StepSpread

FloatArray: TypeAlias = NDArray[np.float64]

LEAST_STEPS = 24
"""Fewer measured steps say too little."""

_SPREAD_STEPS, _SPREAD_SPAN, _QUANTILES = 40, 2.0, 101
"""A spread is of so many steps at least, the longest of which are expected to take so many times the shortest."""

_TAIL = 1e-3
"""The shortest and the longest step in so many are not looked at: one that a neighbour held up for a second would
otherwise make a hundredth of all steps as long."""

_LEAST_BETWEEN = 50e-6
"""Seconds between steps at least: no loop turns sooner."""

_ROUNDS, _USUAL = 8, 2.0
"""How often errors are weighed, and the most that a usual one is, over the median."""


class StepSample(NamedTuple):
    """A measured step. `between`: the seconds from the end of the step before until this one began, where it followed
    at once, and `brought`: the tokens that that one brought."""

    load: StepLoad
    seconds: float
    between: float | None = None
    brought: int = 0


class MachineFit(NamedTuple):
    """`error`: mean of what steps differ by from the formula, as a share of it."""

    machine: SimulatedMachine
    error: float


def fit_machine(samples: Sequence[StepSample], heads: bool = True) -> MachineFit:
    """The formula whose errors, as shares of each usual step, have the smallest sum of squares; `spread` has what it
    does not tell.

    No coefficient is below 0: more work never takes less time. Without `heads` those are among the products, as where
    all steps sample as many places as they have rows. Raises `InvalidArgument` if steps are too few.
    """
    if len(samples) < LEAST_STEPS:
        raise InvalidArgument(f"{len(samples)} steps were measured, and {LEAST_STEPS} are needed: give it more time")
    rows = _knots(sample.load.rows for sample in samples)
    sampled = [0, *_knots(sample.load.samples for sample in samples)] if heads else [0]
    seconds = np.array([sample.seconds for sample in samples])
    features = np.array([[1.0, *_features(sample.load, rows, sampled)] for sample in samples])
    features[:, 1:] *= np.ptp(features[:, 1:], axis=0) > 0  # what is alike in all steps is part of the constant
    coefficients = solve_robust(features, seconds)
    expected = features @ coefficients
    ratios = seconds / expected
    intercept, *slopes = coefficients.tolist()
    products = slopes[: len(rows) - 1]
    head_slopes = slopes[len(rows) - 1 : -3]
    decode, prompt, chunk = slopes[-3:]
    between = [sample for sample in samples if sample.between is not None]
    constant, each_token = _fit_between(between) if between else (0.0, 0.0)
    machine = SimulatedMachine(
        weights=0.0,
        token=0.0,
        head=0.0,
        decode_context=decode,
        prompt_context=prompt,
        chunk_context=chunk,
        rest=0.0,
        products=_table(rows, intercept, products),
        heads=_table(sampled, 0.0, head_slopes),
        spread=_find_spreads(expected, ratios),
        between=constant,
        between_token=each_token,
    )
    return MachineFit(machine, float(np.mean(np.abs(ratios - 1))))


def _find_spreads(expected: FloatArray, ratios: FloatArray) -> tuple[StepSpread, ...]:
    """The spreads of groups of steps, by the seconds that are expected. Long steps are few: the groups begin with
    them."""
    order = np.argsort(-expected)
    begins = [0]
    longest = expected[order[0]]
    for index in range(_SPREAD_STEPS, len(order) - _SPREAD_STEPS + 1):
        if index - begins[-1] >= _SPREAD_STEPS and longest > _SPREAD_SPAN * expected[order[index]]:
            begins, longest = [*begins, index], expected[order[index]]
    levels = np.clip(np.linspace(0, 1, _QUANTILES), _TAIL, 1 - _TAIL)
    return tuple(
        StepSpread(float(np.exp(np.log(expected[group]).mean())), tuple(np.quantile(ratios[group], levels).tolist()))
        for group in reversed(np.split(order, begins[1:]))
    )


def _knots(counts: Iterable[int]) -> list[int]:
    """1, 2, 4, ... up to the largest count, which is the last if it is worth a knot of its own."""
    most = max([*counts, 2])
    knots = [1]
    while 2 * knots[-1] <= most:
        knots.append(2 * knots[-1])
    return knots if most < 1.25 * knots[-1] else [*knots, most]


def _features(load: StepLoad, rows: Sequence[int], sampled: Sequence[int]) -> Iterator[float]:
    """The features of a step: how much of each stretch between two knots a count covers, and what attention reads."""
    for knots, count in ((rows, load.rows), (sampled, load.samples)):
        for low, high in pairwise(knots):
            yield min(max(count - low, 0), high - low)
    yield from (load.work.decode_context, load.work.prefill_context, load.chunk_reads)


def _table(knots: Sequence[int], first: float, slopes: Sequence[float]) -> SecondsTable:
    seconds = [first]
    for low, high, slope in zip(knots, knots[1:], slopes, strict=False):
        seconds.append(seconds[-1] + slope * (high - low))
    return tuple(zip(knots, seconds, strict=True))


def _fit_between(samples: Sequence[StepSample]) -> tuple[float, float]:
    seconds = np.maximum([sample.between or 0.0 for sample in samples], _LEAST_BETWEEN)
    constant, each_token = solve_robust(np.array([[1.0, sample.brought] for sample in samples]), seconds).tolist()
    return constant, each_token


def solve_robust(features: FloatArray, seconds: FloatArray) -> FloatArray:
    """As `solve_least_squares`, of errors as shares of what was expected. One that is far from usual counts by its
    size and not by its square (Huber's loss): neighbours on a machine hold single steps up for many times their time.
    """
    scale = seconds
    weights = np.ones(len(seconds))
    for _ in range(_ROUNDS):
        scaling = (weights / scale)[:, None]
        solution = solve_least_squares(features * scaling, seconds * weights / scale)
        scale = np.maximum(features @ solution, 1e-3 * seconds)
        errors = np.abs(seconds / scale - 1)
        usual = max(_USUAL * float(np.median(errors)), 1e-9)
        weights = np.sqrt(np.minimum(1.0, usual / np.maximum(errors, 1e-12)))
    return solution


def solve_least_squares(features: FloatArray, target: FloatArray) -> FloatArray:
    """x >= 0 with the smallest sum of squares of `features` @ x - `target` (Lawson and Hanson, 1974)."""
    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0
    columns = features / scale
    x = np.zeros(len(scale))
    used = np.zeros(len(scale), np.bool_)
    for _ in range(10 * len(scale)):
        slope = columns.T @ (target - columns @ x)
        slope[used] = 0.0
        if slope.max() <= 1e-10 * np.linalg.norm(target):
            break
        used[slope.argmax()] = True
        while True:
            best = np.zeros(len(scale))
            best[used] = np.linalg.lstsq(columns[:, used], target, rcond=None)[0]
            if (best[used] >= 0).all():
                break
            low = used & (best < 0)
            x += (x[low] / (x[low] - best[low])).min() * (best - x)
            x[low & (x <= 1e-15)] = 0.0
            used &= x > 0
        x = best
    solved: FloatArray = x / scale
    return solved
