"""Measures a configuration: loads it into a server of ours, and puts one level of load after the other to it."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import msgspec

from ...bench.load.worker import Watch, WorkerOutcome
from ...core.errors import Unavailable
from .load_levels import LoadLevel, LoadSubject, level_figures, plan_load
from .measured_server import MeasuredServer
from .options import LevelOptions
from .parameters import ClosedLoop, configured
from .results_file import ResultsFile
from .search import BudgetSpent
from .search_goal import (
    Configuration,
    ConfigurationTrial,
    LevelFigures,
    ParameterValue,
    SearchGoal,
    expected_wall,
)
from .search_space import SearchSpace
from .tuned_models import TunedModels


class LoadPlan(msgspec.Struct, frozen=True):
    """What configurations are measured under, and by."""

    subject: LoadSubject
    levels: list[LoadLevel]
    options: LevelOptions
    goal: SearchGoal

    @property
    def loop(self) -> ClosedLoop:
        most = max(level.concurrency for level in self.levels)
        return ClosedLoop(most or None, self.options.batch)


Put: TypeAlias = Callable[[LoadLevel, float], tuple[WorkerOutcome, float | None]]
"""Puts so many seconds of a level's load to a server; what came of it, and the memory it took if that is known."""


def measure_levels(plan: LoadPlan, put: Put, seconds: float) -> Iterator[LevelFigures]:
    """The figures of each level, up to the first beyond which the bounds cannot be kept."""
    for level in plan.levels:
        outcome, memory = put(level, seconds)
        figures = level_figures(level, plan.subject, plan.options, outcome, seconds, memory)
        yield figures
        if plan.goal.ends_levels(figures):
            return


class ConfigurationMeter:
    """Measures the configurations of a space through a server, within a budget, as long as the results of an earlier
    run do not tell. `spent`: seconds of all trials, those of earlier runs included, and of what came before them."""

    def __init__(self, models: TunedModels, server: MeasuredServer, plan: LoadPlan, budget: float) -> None:
        self._models = models
        self._server = server
        self._plan = plan
        self._budget = budget
        self.spent = 0.0
        self._trials: list[ConfigurationTrial] = []
        self.watch: Watch = lambda progress: None
        self.on_begin: Callable[[Mapping[str, ParameterValue]], None] = lambda settings: None

    def meter(self, space: SearchSpace, results: ResultsFile) -> Callable[[Configuration, float], ConfigurationTrial]:
        """The function that a search calls."""

        def measure(configuration: Configuration, seconds: float) -> ConfigurationTrial:
            settings = space.settings(configuration)
            known = results.take(settings, seconds)
            if known is not None:
                trial = msgspec.structs.replace(known, configuration=configuration)
            elif self.spent + self._estimate(seconds) > self._budget:
                raise BudgetSpent
            else:
                self.on_begin(settings)
                trial = self._measure(configuration, settings, seconds)
                results.add(settings, trial)
            self.spent += trial.wall
            self._trials.append(trial)
            return trial

        return measure

    def _estimate(self, seconds: float) -> float:
        return expected_wall(self._trials, seconds, len(self._plan.levels))

    def _measure(
        self, configuration: Configuration, settings: Mapping[str, ParameterValue], seconds: float
    ) -> ConfigurationTrial:
        began = loaded = time.perf_counter()
        levels: list[LevelFigures] = []
        failure = ""
        try:
            config = self._server.load(configured(self._models, settings))
            loaded = time.perf_counter()

            def put(level: LoadLevel, seconds: float) -> tuple[WorkerOutcome, float | None]:
                plan = self._plan
                load = plan_load(plan.subject, self._server.address, level, plan.options, seconds, config)
                return self._server.put(load, self.watch)

            levels += measure_levels(self._plan, put, seconds)
        except Unavailable as error:
            failure = error.message.strip()
            loaded = loaded if loaded > began else time.perf_counter()
        return ConfigurationTrial(
            configuration=configuration,
            seconds=seconds,
            setup=loaded - began,
            loading=time.perf_counter() - loaded,
            levels=tuple(levels),
            failure=failure,
        )
