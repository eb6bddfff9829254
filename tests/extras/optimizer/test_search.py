"""Searches over surfaces that are known: what they find, what they spend, and what they leave out."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.errors import Unsupported
from charonia.extras.optimizer import search as searches
from charonia.extras.optimizer.ranking import are_told_apart, rank
from charonia.extras.optimizer.search import BudgetSpent, SearchEffort, search
from charonia.extras.optimizer.search_goal import (
    Bound,
    Configuration,
    ConfigurationTrial,
    LevelFigures,
    SearchGoal,
    expected_wall,
)
from charonia.extras.optimizer.search_space import SearchSpace, TunedParameter

EFFORT = SearchEffort(seconds=8.0)
SETUP = 0.5
GOAL = SearchGoal()


class Bench:
    """Measures a surface: the longer, the less noise. Counts the seconds that it would have taken."""

    def __init__(
        self, truth: Callable[[Configuration], float], noise: float = 0.0, setup: float = SETUP, **more: Any
    ) -> None:
        self.truth, self.noise, self.setup, self.more = truth, noise, setup, more
        self.random = np.random.default_rng(5)
        self.spent = 0.0
        self.asked: list[Configuration] = []

    def __call__(self, configuration: Configuration, seconds: float) -> ConfigurationTrial:
        self.spent += self.setup + seconds
        self.asked.append(configuration)
        value = self.truth(configuration) * math.exp(self.noise * self.random.normal() * (2 / seconds) ** 0.5)
        figures = {name: of(configuration) for name, of in self.more.items()}
        level = LevelFigures(level="any", requests=1, throughput=value, **figures)
        return ConfigurationTrial(
            configuration=configuration, seconds=seconds, setup=self.setup, loading=seconds, levels=(level,)
        )


def space_of(*sizes: int, **more: Any) -> SearchSpace:
    return SearchSpace(
        [TunedParameter(name=f"k{i}", values=tuple(range(size)), **more) for i, size in enumerate(sizes)]
    )


def surface(seed: int, shape: tuple[int, ...]) -> Any:
    """A hill somewhere, whose axes are not those of the parameters, with a wave over it: [indices] -> value."""
    random, count = np.random.default_rng(seed), len(shape)
    axes = np.meshgrid(*(np.linspace(0, 1, size) for size in shape), indexing="ij")
    points = np.stack([axis.ravel() for axis in axes], axis=1)
    turned = (points - random.random(count)) @ (0.8 * random.normal(size=(count, count)) + 0.6 * np.eye(count))
    heights = 0.5 * random.normal() * np.sin(3 * points @ random.normal(size=count)) - (turned**2).sum(axis=1)
    heights -= heights.max()
    return 1000 * np.exp(heights / max(1e-9, -heights.min()) * random.uniform(0.7, 2.0)).reshape(shape)


@pytest.mark.parametrize(
    ("strategy", "setup", "seeds", "share"),
    [("quick", 0.5, 40, 0.92), ("quick", 4.0, 40, 0.8), ("optuna", 0.5, 4, 0.75)],
)
def test_a_fifth_of_the_time_finds_what_is_within_five_percent_of_the_best(
    strategy: str, setup: float, seeds: int, share: float
) -> None:
    shape, good = (4, 4, 3), []
    for seed in range(seeds):
        truth = surface(seed, shape)
        bench, space = Bench(lambda places, truth=truth: truth[places], noise=0.04, setup=setup), space_of(*shape)
        trials = list(search(strategy, space, GOAL, bench, EFFORT))
        assert bench.spent <= 0.2 * space.size * (setup + EFFORT.seconds)
        good.append(truth[rank(trials, GOAL)[0].configuration] / truth.max())
    assert np.mean(np.array(good) >= 0.95) >= share, sorted(good)[:5]


@given(setup=st.floats(0.0, 60.0), sizes=st.lists(st.integers(2, 6), min_size=2, max_size=3))
@settings(max_examples=15, deadline=None)
def test_the_time_is_never_more_than_its_share_or_the_budget(setup: float, sizes: list[int]) -> None:
    bench, space = Bench(lambda places: 1.0 + sum(places), setup=setup), space_of(*sizes)
    share = 0.2 * max(40, space.size) * (setup + EFFORT.seconds)
    list(search("quick", space, GOAL, bench, EFFORT._replace(budget=0.7 * share)))
    assert bench.spent <= 0.7 * share


def test_what_each_measurement_takes_beside_its_load_does_not_grow_with_the_load() -> None:
    level = LevelFigures(level="any", requests=1, throughput=1.0)
    short = ConfigurationTrial(configuration=(0,), seconds=1.0, setup=2.0, loading=5.0, levels=(level,))
    failed = ConfigurationTrial(configuration=(1,), seconds=1.0, setup=2.0, failure="no room")
    assert expected_wall([short, failed], 4.0) == 2.0 + 4.0 + 4.0
    two = msgspec.structs.replace(short, loading=10.0, levels=(level, level))
    assert expected_wall([two], 4.0) == 2.0 + 2 * 4.0 + 8.0
    assert expected_wall([], 4.0, levels=3) == 12.0


def test_an_exhaustive_search_measures_everything_and_repeats_the_best() -> None:
    truth = surface(3, (4, 3))
    bench, space = Bench(lambda places: truth[places], noise=0.01), space_of(4, 3)
    trials = list(search("exhaustive", space, GOAL, bench, EFFORT))
    assert set(bench.asked) == {(one, two) for one in range(4) for two in range(3)}
    assert {trial.seconds for trial in trials} == {EFFORT.seconds}
    best = rank(trials, GOAL)[0]
    assert truth[best.configuration] >= 0.98 * truth.max()
    assert len(best.scores) == 4
    *_, one, two, three, four = bench.asked
    assert (one, two) == (three, four)
    assert one != two


def test_what_holds_now_has_as_many_turns_as_the_best_while_there_is_time() -> None:
    """It is what the best is compared with."""
    truth = surface(3, (4, 3))
    bench, space = Bench(lambda places: truth[places], noise=0.01, setup=0.1), space_of(4, 3)
    trials = list(search("quick", space, GOAL, bench, EFFORT._replace(share=1.0)))
    ranked = {each.configuration: len(each.scores) for each in rank(trials, GOAL)}
    best = rank(trials, GOAL)[0].configuration
    assert best != space.start
    assert ranked[space.start] == ranked[best] > 1


@pytest.mark.parametrize(("budget", "all_of_them"), [(600.0, True), (30.0, False)])
def test_all_that_was_asked_for_is_measured_while_the_budget_lasts(budget: float, all_of_them: bool) -> None:
    bench, space = Bench(lambda places: 100.0 - sum(places), setup=0.5), space_of(5, 4)
    list(search("quick", space, GOAL, bench, EFFORT._replace(budget=budget, named_values=True)))
    assert (len(set(bench.asked)) == space.size) == all_of_them
    assert bench.spent <= budget
    guessed = Bench(lambda places: 100.0 - sum(places), setup=0.5)
    list(search("quick", space, GOAL, guessed, EFFORT._replace(budget=budget)))
    assert len(set(guessed.asked)) < space.size


def test_finalists_take_turns_and_are_told_apart_or_not() -> None:
    def final(difference: float) -> bool:
        bench = Bench(lambda places: 100 * (1 + difference * places[0]), noise=0.02)
        first, second, *_ = rank(list(search("quick", space_of(2), GOAL, bench, EFFORT)), GOAL)
        assert min(len(first.scores), len(second.scores)) >= 3
        return are_told_apart(first, second)

    assert final(0.5)
    assert not final(0.0)


def test_two_measurements_tell_nothing_apart() -> None:
    trials = [Bench(lambda places: 100.0 + 50 * places[0])((place,), 4.0) for place in (0, 1, 0, 1, 0, 1)]
    assert not are_told_apart(*rank(trials[:4], GOAL))
    assert are_told_apart(*rank(trials, GOAL))


def test_a_short_measurement_does_not_beat_a_finalist() -> None:
    flattered = Bench(lambda _: 200.0)((0,), 2.0)
    finalist = [Bench(lambda _: 150.0)((1,), 4.0) for _ in range(3)]
    assert rank([flattered, *finalist], GOAL)[0].configuration == (1,)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    failing=st.integers(0, 7),
    calls=st.integers(1, 30),
)
@settings(max_examples=30, deadline=None)
def test_any_search_ends_and_says_what_it_has(sizes: list[int], seed: int, failing: int, calls: int) -> None:
    """Whatever fails, whenever the budget ends, and always the same."""
    truth = surface(seed, tuple(sizes)) if max(sizes) > 1 else np.ones(sizes)

    def run() -> list[ConfigurationTrial]:
        bench, trials = Bench(lambda places: truth[places], noise=0.03), []

        def measure(configuration: Configuration, seconds: float) -> ConfigurationTrial:
            if len(bench.asked) == calls:
                raise BudgetSpent
            if sum(map(int, configuration)) % 8 < failing:
                bench.asked.append(configuration)
                return ConfigurationTrial(
                    configuration=configuration, seconds=seconds, setup=SETUP, failure="does not load"
                )
            return bench(configuration, seconds)

        try:
            trials.extend(search("quick", space_of(*sizes), GOAL, measure, EFFORT))
        except BudgetSpent:
            assert len(trials) == calls
        return trials

    trials = run()
    assert trials == run()
    assert len(rank(trials, GOAL)) == len({trial.configuration for trial in trials})
    assert all(not each.scores for each in rank(trials, GOAL) if sum(map(int, each.configuration)) % 8 < failing)


def test_what_needs_more_memory_than_what_had_too_little_is_not_tried() -> None:
    space = SearchSpace([TunedParameter(name="instances", values=(1, 2, 4, 8, 16), monotone_metrics=("memory",))])
    goal = SearchGoal(bounds=(Bound("memory", 3.0),))
    bench = Bench(lambda places: float(places[0]), memory=lambda places: float(places[0]))
    trials = list(search("quick", space, goal, bench, EFFORT))
    assert rank(trials, goal)[0].configuration == (2,)
    broken = [each for each in dict.fromkeys(bench.asked) if each[0] > 3]
    assert len(broken) < 3
    assert broken == sorted(broken, reverse=True), "more was tried after less had been too much"


def test_smaller_values_of_a_knob_that_only_helps_are_dominated() -> None:
    parameters = [
        TunedParameter(name="more", values=(1, 2, 4, 8), monotone_metrics=("throughput",)),
        TunedParameter(name="other", values=(0, 1, 2)),
    ]
    truth = {(more, other): more * (3 + other) for more in (1, 2, 4, 8) for other in (0, 1, 2)}
    bench = Bench(lambda places: float(truth[places]))
    trials = list(search("quick", SearchSpace(parameters), GOAL, bench, EFFORT))
    assert rank(trials, GOAL)[0].configuration == (8, 2)
    # What holds now, what was not dominated, and the one that had to be worse for the hint to be believed.
    assert len([each for each in set(bench.asked) if each[0] < 8]) <= 2


def test_a_wrong_hint_is_found_out() -> None:
    parameters = [
        TunedParameter(name="more", values=(1, 2, 4, 8), now=3, monotone_metrics=("throughput",)),
        TunedParameter(name="other", values=(0, 1, 2)),
    ]
    bench = Bench(lambda places: 100.0 / places[0] + places[1])
    trials = list(search("quick", SearchSpace(parameters), GOAL, bench, EFFORT))
    assert rank(trials, GOAL)[0].configuration[0] == 1


def test_latency_is_bettered_within_bounds_of_throughput() -> None:
    from charonia.bench.load.figures import Spread

    goal = SearchGoal("e2e_p99", (Bound("throughput", 350.0, at_least=True),))
    latency = lambda places: Spread.of([0.01 * (1 + places[0])])  # noqa: E731
    bench = Bench(lambda places: 100.0 * (1 + places[0]), e2e=latency)
    best = rank(list(search("quick", space_of(8), goal, bench, EFFORT)), goal)[0]
    assert best.configuration == (3,)
    assert best.feasible


def test_the_nearest_is_first_where_nothing_keeps_the_bounds() -> None:
    goal = SearchGoal(bounds=(Bound("memory", 0.5),))
    bench = Bench(lambda places: 100.0, memory=lambda places: 5.0 - places[0])
    best = rank(list(search("quick", space_of(4), goal, bench, EFFORT)), goal)[0]
    assert best.configuration == (3,)
    assert not best.feasible


def test_a_large_space_is_searched_without_being_listed() -> None:
    space = space_of(*[6] * 7)
    assert space.size == 6**7
    assert len(space.configurations) < 1100
    bench = Bench(lambda places: math.exp(-0.05 * sum((place - 2) ** 2 for place in places)))
    effort = SearchEffort(seconds=8.0, share=25 / 6**7)
    best = rank(list(search("quick", space, GOAL, bench, effort)), GOAL)[0]
    assert bench.truth(best.configuration) > 0.6


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(searches, "import_module", missing)
    with pytest.raises(Unsupported, match=r"pip install '\.\[analyze\]'"):
        list(search("optuna", space_of(2), GOAL, Bench(lambda _: 1.0), EFFORT))
