"""Searches for the best configuration of a space: quick, exhaustive, or by optuna's sampler.

Pure logic over a function that measures. Every search yields its trials as they come, so that what is found so far
can be told at any time; the same trials lead to the same search, which is how one that was broken off goes on.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...core.errors import Unsupported
from .ranking import are_told_apart, rank
from .search_goal import Configuration, ConfigurationTrial, SearchGoal, expected_wall
from .search_space import SearchSpace
from .surrogate import Surrogate

Measure: TypeAlias = Callable[[Configuration, float], ConfigurationTrial]
"""Measures a configuration under so many seconds of load at each level. Raises `BudgetSpent`."""

_NOISE = 0.04
"""What short measurements of one configuration differ by, as a share: a standard deviation."""
_NEGLIGIBLE = 0.001
"""An expected improvement, as a share, that is not worth a measurement."""
_RIGHT_HINT = 0.03
"""By so much a larger value must be better than a smaller one for the search to go on believing that it is."""
_SEMIFINALISTS, _FINALISTS = 3, 2
_SPREAD_OUT, _FEWEST = 0.25, 2
"""Configurations far apart take so much of the exploration at most, but are so many: where few measurements are to be
had, each is chosen better by what was learnt from those before."""
_SMALL = 40
"""Configurations of a space, of fewer of which a quick search takes more than its share."""
_FLOOR = 3.0
"""How far below the best, in logarithms, what does not work at all is taken to be."""


class BudgetSpent(Exception):
    """There is no time for another measurement."""


class SearchEffort(NamedTuple):
    """How long a search may measure. A quick one measures for a quarter of `seconds` until it has finalists, then for
    half, in turns."""

    seconds: float = 8.0
    """The load of a full measurement."""
    share: float = 0.18
    """What a quick search takes of an exhaustive one's time: a fifth, less what an estimate of that may be wrong by."""
    rounds: int = 2
    """The turns that each finalist has."""
    budget: float = float("inf")
    """Seconds of a quick search together."""
    named_values: bool = False
    """Whether somebody named the values: then of a small space all configurations are measured within the budget."""

    @property
    def short(self) -> float:
        return self.seconds / 4

    @property
    def turn(self) -> float:
        return self.seconds / 2


class SearchRun:
    """A search while it goes on: what was measured, and what it may still take."""

    def __init__(self, space: SearchSpace, goal: SearchGoal, measure: Measure, effort: SearchEffort) -> None:
        self.space = space
        self.goal = goal
        self.effort = effort
        self._measure = measure
        self.trials: list[ConfigurationTrial] = []
        self.measured: set[Configuration] = set()
        self.broken: list[Configuration] = []
        """The configurations that did not load, or took more memory than they may."""

    def measure(self, configuration: Configuration, seconds: float) -> ConfigurationTrial:
        trial = self._measure(configuration, seconds)
        self.trials.append(trial)
        self.measured.add(configuration)
        if trial.failure or any(
            bound.metric == "memory" for level in trial.levels for bound in self.goal.missed(level)
        ):
            self.broken.append(configuration)
        return trial

    @property
    def short(self) -> float:
        """Seconds of load of a short measurement: not so few that most of the time goes into loading models."""
        setup = self.trials[0].setup if self.trials else 0.0
        return min(self.effort.seconds, max(self.effort.short, setup / 4))

    @property
    def turn(self) -> float:
        """Seconds of load of a finalist's turn in a quick search."""
        return max(self.effort.turn, self.short)

    def cost(self, seconds: float) -> float:
        """What a measurement under so many seconds of load takes."""
        return expected_wall(self.trials, seconds)

    @property
    def measures_all(self) -> bool:
        """Whether somebody named the values, and so few that all of them are measured."""
        return self.effort.named_values and self.space.size < _SMALL

    @property
    def limit(self) -> float:
        """Seconds that a quick search may take: a share of the exhaustive sweep's, and no more than the budget. A small
        space gets what a larger one would: a share of it would be nothing."""
        if self.measures_all:
            return self.effort.budget
        sweep = max(self.space.size, _SMALL) * self.cost(self.effort.seconds)
        return min(self.effort.share * sweep, self.effort.budget)

    def has_room(self, seconds: float) -> bool:
        """Whether a quick search may still take so many seconds."""
        return sum(trial.wall for trial in self.trials) + seconds <= self.limit

    def may_explore(self, part: float = 1.0) -> bool:
        """Whether there is room for one more short measurement in this part of the time beside the finals, which get a
        third of it if they need as much."""
        if not self.trials:
            return True
        finals = (_SEMIFINALISTS + _FINALISTS * self.effort.rounds) * self.cost(self.turn)
        finals = min(finals, self.limit / 3)
        return self.has_room(self.cost(self.short) + finals + (1 - part) * (self.limit - finals))

    def fit(self) -> Surrogate | None:
        """A surrogate of the utility; None while nothing has any."""
        scores = [self.goal.score(trial) for trial in self.trials]
        known = [self.goal.utility(score) for score in scores if score is not None]
        if not known:
            return None
        floor = max(known) - _FLOOR
        values = [floor if score is None else max(floor, self.goal.utility(score)) for score in scores]
        noise = [_NOISE * (self.effort.short / trial.seconds) ** 0.5 for trial in self.trials]
        return Surrogate(self.space.points([trial.configuration for trial in self.trials]), values, noise)

    def contenders(self) -> list[Configuration]:
        """What was measured and keeps the bounds, or if nothing does, comes close; the most promising first."""
        surrogate = self.fit()
        ranked = [candidate for candidate in rank(self.trials, self.goal) if candidate.scores]
        feasible = [candidate for candidate in ranked if candidate.feasible] or ranked
        if surrogate is None or not feasible:
            return []
        configurations = [candidate.configuration for candidate in feasible]
        means, _ = surrogate.predict(self.space.points(configurations))
        return [configurations[index] for index in np.argsort(-means, kind="stable").tolist()]


def search(
    strategy: str, space: SearchSpace, goal: SearchGoal, measure: Measure, effort: SearchEffort
) -> Iterator[ConfigurationTrial]:
    """Explore the space, then repeat the best, in turns. `strategy`: quick, exhaustive or optuna.

    Raises:
        BudgetSpent: as `measure` does; what was yielded until then stands.
        Unsupported: optuna is asked for and not installed.
    """
    run = SearchRun(space, goal, measure, effort)
    yield from _EXPLORERS[strategy](run)
    if run.measures_all:
        yield from _measure_the_rest(run)
    yield from _play_finals(run, is_quick=strategy != "exhaustive")


def _measure_the_rest(run: SearchRun) -> Iterator[ConfigurationTrial]:
    """A short measurement of each configuration that the exploration left out, but for those that cannot work."""
    for configuration in run.space.configurations:
        is_left = configuration not in run.measured
        if is_left and run.may_explore() and not any(run.space.asks_as_much(configuration, it) for it in run.broken):
            yield run.measure(configuration, run.short)


def _play_finals(run: SearchRun, is_quick: bool) -> Iterator[ConfigurationTrial]:
    """One turn of each semifinalist, then of two finalists A B A B: their machine is not equally fast all the time."""
    seconds = run.turn if is_quick else run.effort.seconds

    def take_turns(players: Sequence[Configuration]) -> Iterator[ConfigurationTrial]:
        for configuration in players:
            if not is_quick or run.has_room(run.cost(seconds)):
                yield run.measure(configuration, seconds)

    all_turns = (_SEMIFINALISTS + _FINALISTS * run.effort.rounds) * run.cost(seconds) if run.trials else 0.0
    fits = not is_quick or run.has_room(all_turns)
    semifinalists = run.contenders()[: _SEMIFINALISTS if fits else _FINALISTS]
    yield from take_turns(semifinalists)
    finalists = [
        candidate.configuration for candidate in rank(run.trials, run.goal) if candidate.configuration in semifinalists
    ]
    for number in range(2 * run.effort.rounds):
        if number < run.effort.rounds or (is_quick and not _are_ranked(run, finalists[:_FINALISTS])):
            yield from take_turns(finalists[:_FINALISTS])
    if is_quick:  # another search had a full measurement of it
        yield from take_turns(_turns_of_start(run, seconds))


def _turns_of_start(run: SearchRun, seconds: float) -> list[Configuration]:
    """As many turns of what holds now as the best had: it is what the best is compared with."""
    ranked = rank(run.trials, run.goal)
    best = ranked[0] if ranked else None
    start = run.space.start
    if best is None or not best.scores or start in run.broken:
        return []
    turns = Counter(trial.configuration for trial in run.trials if trial.seconds == seconds and not trial.failure)
    return [start] * max(0, turns[best.configuration] - turns[start])


def _are_ranked(run: SearchRun, finalists: Sequence[Configuration]) -> bool:
    """Whether more turns would tell nothing new: the two are told apart, or there is only one."""
    ranked = [candidate for candidate in rank(run.trials, run.goal) if candidate.configuration in finalists]
    return len(ranked) < 2 or are_told_apart(*ranked[:2])


def _sweep(run: SearchRun) -> Iterator[ConfigurationTrial]:
    """A trial of each configuration, in no order, so that no value of a parameter has the slow hours of the machine."""
    order = np.random.default_rng(0).permutation(len(run.space.configurations))
    for index in order.tolist():
        yield run.measure(run.space.configurations[index], run.effort.seconds)


def _explore_by_surrogate(run: SearchRun) -> Iterator[ConfigurationTrial]:
    """What is there now, a few configurations far apart, and then always the one that promises most."""
    pruning = Pruning(run)
    for configuration in pruning.spread_out(2 + len(run.space.parameters)):
        part = _SPREAD_OUT if len(run.measured) >= _FEWEST else 1.0
        if run.may_explore(part) and not pruning.is_pruned(configuration):  # by what was learnt meanwhile
            yield run.measure(configuration, run.short)
    checked = False
    while run.may_explore():
        chosen = [] if not checked else pruning.most_promising()
        if not chosen:
            checked = True
            chosen = pruning.unchecked_hints()
            if not chosen and pruning.most_promising() == []:
                return
        for configuration in chosen:
            yield run.measure(configuration, run.short)
        pruning.check_hints()


class Pruning:
    """What of a space is not worth a measurement, given what was measured."""

    def __init__(self, run: SearchRun) -> None:
        self._run = run
        self._trusts_hints = True
        self._random = np.random.default_rng(0)

    def is_pruned(self, configuration: Configuration) -> bool:
        """Whether it was measured, asks for as much memory as one that had too little, or is dominated: a larger value
        of a parameter that only ever raises the objective is there to be had."""
        run = self._run
        return configuration in run.measured or self._is_broken(configuration) or self._is_dominated(configuration)

    def _is_broken(self, configuration: Configuration) -> bool:
        return any(self._run.space.asks_as_much(configuration, broken) for broken in self._run.broken)

    def _hints(self) -> list[int]:
        objective = self._run.goal.objective
        parameters = self._run.space.parameters
        raised = [index for index, parameter in enumerate(parameters) if objective in parameter.monotone_metrics]
        return raised if self._trusts_hints and self._run.goal.maximises else []

    def _is_dominated(self, configuration: Configuration) -> bool:
        larger = [self._run.space.stepped(configuration, index, 1) for index in self._hints()]
        return any(
            other is not None and other != configuration and not self._is_broken(other) and not self._misses(other)
            for other in larger
        )

    def _misses(self, configuration: Configuration) -> bool:
        scores = [self._run.goal.score(trial) for trial in self._run.trials if trial.configuration == configuration]
        return bool(scores) and not any(score is not None and score.feasible for score in scores)

    def spread_out(self, count: int) -> list[Configuration]:
        """The start, and further configurations, each as far from all before it as can be."""
        space = self._run.space
        free = [
            configuration
            for configuration in space.configurations
            if configuration == space.start or not self.is_pruned(configuration)
        ]
        chosen = [space.start]
        points = space.points(free)
        order = self._random.permutation(len(free))  # of those equally far, not always the first
        while len(chosen) < min(count, len(free)):
            taken = space.points(chosen)
            distances = ((points[:, None] - taken[None]) ** 2).sum(axis=2).min(axis=1)
            chosen.append(free[order[int(np.argmax(distances[order]))]])
        return chosen

    def most_promising(self) -> list[Configuration]:
        """The one with the largest expected improvement; none where none is worth it, as soon as enough was measured to
        say so."""
        run = self._run
        surrogate = self._run.fit()
        beside = [neighbour for best in run.contenders()[:3] for neighbour in run.space.neighbours(best)]
        free = [
            configuration
            for configuration in dict.fromkeys([*run.space.configurations, *beside])
            if not self.is_pruned(configuration)
        ]
        if not free:
            return []
        if surrogate is None:
            return [free[int(self._random.integers(len(free)))]]
        best = float(surrogate.predict(run.space.points(sorted(run.measured, key=repr)))[0].max())
        gains = surrogate.expected_improvement(run.space.points(free), best)
        chosen = int(np.argmax(gains))
        is_young = len(run.measured) < 4 + 3 * len(run.space.parameters)
        return [free[chosen]] if is_young or gains[chosen] >= _NEGLIGIBLE else []

    def unchecked_hints(self) -> list[Configuration]:
        """Configurations that must be worse than the best if metrics are as monotone as is said, not measured yet."""
        best = self._run.contenders()[:1]
        below = [self._run.space.stepped(parameters, index, -1) for parameters in best for index in self._hints()]
        return [
            configuration
            for configuration in below
            if configuration is not None and configuration not in self._run.measured
        ]

    def check_hints(self) -> None:
        """Believe in no hint any more if one is wrong, or says little."""
        run = self._run
        utilities = {candidate.configuration: candidate.middle for candidate in rank(run.trials, run.goal)}
        for configuration, middle in utilities.items():
            for index in self._hints():
                lower = run.space.stepped(configuration, index, -1)
                beside = utilities.get(lower) if lower is not None and lower != configuration else None
                if middle is not None and beside is not None:
                    gain = run.goal.utility(middle) - run.goal.utility(beside)
                    self._trusts_hints &= gain >= _RIGHT_HINT


def require_optuna() -> Any:
    """The module. Raises `Unsupported` where it is not installed."""
    try:
        return import_module("optuna")
    except ModuleNotFoundError:
        message = "--search optuna needs the package optuna, which is not installed: pip install '.[analyze]'"
        raise Unsupported(message) from None


def _explore_by_optuna(run: SearchRun) -> Iterator[ConfigurationTrial]:
    """Short measurements of what optuna's sampler of trees of Parzen estimators asks for, the start first."""
    optuna = require_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = run.space
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=6))
    study.enqueue_trial(space.settings(space.start))
    choices = {
        parameter.name: optuna.distributions.CategoricalDistribution(parameter.values) for parameter in space.parameters
    }
    known: dict[Configuration, float] = {}
    suggestions = 0
    while run.may_explore() and len(known) < space.size and suggestions < 20 * space.size:
        suggestions += 1
        suggestion = study.ask(choices)
        chosen = space.canonical(tuple(suggestion.params[parameter.name] for parameter in space.parameters))
        if chosen not in known:
            trial = run.measure(chosen, run.short)
            score = run.goal.score(trial)
            known[chosen] = min(known.values(), default=0.0) - 1 if score is None else run.goal.utility(score)
            yield trial
        study.tell(suggestion, known[chosen])


_EXPLORERS: dict[str, Callable[[SearchRun], Iterator[ConfigurationTrial]]] = {
    "quick": _explore_by_surrogate,
    "exhaustive": _sweep,
    "optuna": _explore_by_optuna,
}
