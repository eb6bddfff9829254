"""An analysis from beginning to end: models are opened, a space is searched through a server of ours, the best is told.

`analyze_models` searches; `measure_url` measures a server that somebody runs, and leaves it as it is.
"""

import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from typing import Self
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from ...bench.load.worker import WorkerOutcome, run_here
from ...bench.server_process import GRPC_PORT, parse_server_url
from ...core.errors import InvalidArgument, Unavailable
from ...core.model import RawConfig
from ...processes.host import processor_name, usable_cores
from ...repository.config_io import complete_fields
from ...repository.model_source import ModelSource
from .conclusion import Conclusion, conclude, conclude_levels, describe_settings, describe_trial, describe_value
from .configuration_meter import ConfigurationMeter, LoadPlan, measure_levels
from .load_levels import LoadLevel, LoadSubject, check_levels, plan_levels, plan_load
from .measured_server import MeasuredServer, ask_server
from .options import LevelOptions, SearchOptions, parse_budget
from .parameters import default_parameters, equivalence, parse_sweeps
from .ranking import rank
from .report import ReportOrigin, write_report
from .results_file import AnalysisSubject, ResultsFile
from .search import BudgetSpent, SearchEffort, require_optuna, search
from .search_goal import (
    ConfigurationTrial,
    ParameterValue,
    SearchGoal,
    parse_goal,
)
from .search_space import SearchSpace, TunedParameter
from .tuned_models import TunedModels, is_composed, is_language_model, open_models, streams_text, with_batching

_ANSWER_SECONDS = 30.0
"""Seconds for which a server that somebody runs may be silent."""


def analyze_models(source: str, search_for: SearchOptions, load: LevelOptions, console: Console) -> int:
    """Search, print what was found, and write the report; the exit status, 1 if nothing keeps the constraints.

    Raises:
        CharoniaError: there is nothing to analyze, or the options mean nothing.
    """
    began = time.perf_counter()
    budget = parse_budget(search_for.budget)
    levels = plan_levels(load)
    _check_report(search_for.report)
    least = _least_seconds(search_for, SearchEffort(search_for.full_seconds()), len(levels))
    check_levels(levels, load, least / len(levels))
    if search_for.search == "optuna":
        require_optuna()
    with ExitStack() as stack:
        models = stack.enter_context(open_models(source, search_for.model))
        goal = parse_goal(search_for.objective, search_for.constraint, streams=streams_text(models.loaded.config))
        plan = LoadPlan(_load_subject(models.loaded.name, models.loaded.config), levels, load, goal)
        parse_sweeps(search_for.sweep, models)  # what is wrong is told before anything is started
        server = MeasuredServer(models.repository, models.models, _server_flags(search_for, goal))
        stack.callback(server.close)
        subject = _results_subject(source, models, plan, search_for.full_seconds())
        results = ResultsFile(search_for.report.with_suffix(".jsonl"), subject)
        stack.callback(results.close)
        # One that goes on measures as long as it did, whatever its budget is now: else nothing would be there.
        seconds = results.seconds if search_for.seconds is None else search_for.seconds
        _ = server.address  # one that does not start is no fault of a configuration
        models = _completed(models, server)
        parameters = parse_sweeps(search_for.sweep, models) or default_parameters(
            models, plan.loop, usable_cores().threads
        )
        space = SearchSpace(parameters, equivalence(parameters, models, plan.loop))
        meter = ConfigurationMeter(models, server, plan, budget)
        meter.spent = time.perf_counter() - began
        console.print(_beginning(models, space, plan, results), soft_wrap=True)
        progress = AnalysisProgress(console, budget, meter, goal)
        try:
            effort = SearchEffort(seconds, budget=budget, named_values=bool(search_for.sweep))
            trials = search(search_for.search, space, goal, meter.meter(space, results), effort)
            ended = _run_search(trials, space, progress)
        except (KeyboardInterrupt, SystemExit):
            console.print(f"broken off; the same command goes on from {results.path}", soft_wrap=True)
            raise
        if not progress.trials:
            message = f"the budget was spent before a first measurement: after {meter.spent:.1f} s the models were"
            raise Unavailable(f"{message} loaded once, and one takes {least:g} s: give more --budget")
        conclusion = conclude(models, space, goal, progress.trials, ended)
    return _tell(conclusion, plan, search_for.report, console)


def _least_seconds(search_for: SearchOptions, effort: SearchEffort, levels: int) -> float:
    """The seconds of load of the first measurement. Raises `InvalidArgument` where the budget has no room for it."""
    least = (effort.short if search_for.search != "exhaustive" and not search_for.url else effort.seconds) * levels
    if least > (budget := parse_budget(search_for.budget)):
        message = f"the budget of {budget:g} s is too small for one measurement, which takes {least:g} s and the load"
        raise InvalidArgument(f"{message} of the models: give more --budget, or less --seconds", field="budget")
    return least


def _check_report(report: Path) -> None:
    """Raises `InvalidArgument` where the report could not be written when all is measured."""
    if report.suffix == ".jsonl":
        message = f"--report is a page of HTML, and {report} would be its results: name it otherwise"
        raise InvalidArgument(message, field="report")
    if not report.name or report.is_dir():
        raise InvalidArgument(f"cannot write the report to {report}: it is a directory", field="report")


def _tell(conclusion: Conclusion, plan: LoadPlan, report: Path, console: Console) -> int:
    conclusion.print_to(console)
    origin = ReportOrigin(shown_command(sys.argv[1:]), time.strftime("%Y-%m-%d %H:%M %z"), _machine())
    write_report(report, conclusion, [str(level) for level in plan.levels], origin)
    console.print(f"report: {report}", soft_wrap=True)
    return 0 if conclusion.best is not None and conclusion.best.feasible else 1


def shown_command(arguments: Sequence[str]) -> str:
    """The command line of these arguments, without the key that one of them may be."""
    words = [
        "--api-key=..." if word.startswith("--api-key=") else "..." if before == "--api-key" else word
        for before, word in zip(("", *arguments), arguments, strict=False)
    ]
    return shlex.join(["charonia", *words])


def _machine() -> str:
    return f"{processor_name() or 'a processor that tells no name'}, {usable_cores()}"


def _load_subject(model: str, config: RawConfig) -> LoadSubject:
    """The endpoint that a model's load goes to."""
    if is_language_model(config):
        return LoadSubject(model=model, door="completions")
    if streams_text(config):
        return LoadSubject(model=model, door="generate", counts_tokens=False)
    return LoadSubject(model=model)


def _server_flags(search_for: SearchOptions, goal: SearchGoal) -> list[str]:
    """What is given, and the bound on memory: models that cannot keep it are not even loaded."""
    limits = [f"--memory-limit={bound.limit:.0f}" for bound in goal.bounds if bound.metric == "memory"]
    try:
        return [*limits[:1], *shlex.split(search_for.server_args)]
    except ValueError as error:
        raise InvalidArgument(f"--server-args: {error}, in {search_for.server_args}", field="server_args") from None


def _results_subject(source: str, models: TunedModels, plan: LoadPlan, seconds: float) -> AnalysisSubject:
    described = {**msgspec.to_builtins(plan.options, enc_hook=str), "levels": [str(level) for level in plan.levels]}
    return AnalysisSubject(
        source=str(Path(source).resolve()) if Path(source).exists() else source,
        model=models.loaded.name,
        digest=models.digest(),
        # As it is read back from JSON.
        load=msgspec.json.decode(msgspec.json.encode(described)),
        machine=str(usable_cores()),
        seconds=seconds,
    )


def _completed(models: TunedModels, server: MeasuredServer) -> TunedModels:
    """The models with the largest batch and the batcher that the server finds where their configs are silent: by them
    the parameters are chosen. A model that does not load as it is may do so in another configuration."""
    silent = [
        source for source in models.models if not (is_language_model(source.config) or is_composed(source.config))
    ]
    completed: dict[str, ModelSource] = {}
    try:
        if silent:
            server.load({source.name: source.config for source in models.models})
        for source in silent:
            config = complete_fields(ask_server(server.address, f"/v2/models/{quote(source.name, safe='')}/config"))
            completed[source.name] = with_batching(source, config)
    except Unavailable:
        pass  # the search tells of what does not load
    return models._replace(models=tuple(completed.get(source.name, source) for source in models.models))


def _beginning(models: TunedModels, space: SearchSpace, plan: LoadPlan, results: ResultsFile) -> str:
    parameters = ", ".join(
        f"{parameter.name} ({', '.join(map(str, parameter.values))})" for parameter in space.parameters
    )
    levels = ", ".join(map(str, plan.levels))
    again = f"; {results.count} results are there already" if results.count else ""
    count = (
        f"{space.size} configurations"
        if space.size == space.combinations
        else (f"{space.size} configurations that can differ, of {space.combinations}")
    )
    return f"{models.loaded.name}: {count} of {parameters}\nunder {levels}{again}"


class AnalysisProgress:
    """A bar of the budget on a terminal, elsewhere a line for each trial."""

    def __init__(self, console: Console, budget: float, meter: ConfigurationMeter, goal: SearchGoal) -> None:
        self._console = console
        self._meter = meter
        self._goal = goal
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        columns = (
            SpinnerColumn(),
            BarColumn(bar_width=20),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.description}", markup=False, table_column=rest),
        )
        quiet = not console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, expand=True, disable=quiet)
        self._task = self._bar.add_task("", total=budget)
        self._now = ""
        self._began = time.perf_counter()
        self.trials: list[ConfigurationTrial] = []
        meter.on_begin = self._begin
        meter.watch = lambda progress: self._show()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _begin(self, settings: Mapping[str, ParameterValue]) -> None:
        self._now = describe_settings(settings)
        self._began = time.perf_counter()
        self._show()

    def _show(self) -> None:
        best = rank(self.trials, self._goal)[:1]
        best_text = f", best {describe_value(self._goal, best[0].value)}" if best and best[0].scores else ""
        description = f"{len(self.trials)} measurements{best_text}; {self._now}"
        spent = self._meter.spent + time.perf_counter() - self._began
        self._bar.update(self._task, completed=spent, description=description)

    def add(self, settings: Mapping[str, ParameterValue], trial: ConfigurationTrial) -> None:
        self.trials.append(trial)
        if not self._console.is_terminal:
            text = f"{len(self.trials):3} {trial.seconds:.3g} s  {describe_settings(settings)}"
            text += f": {describe_trial(self._goal, trial)}"
            self._console.print(text, soft_wrap=True)


def _run_search(trials: Iterator[ConfigurationTrial], space: SearchSpace, progress: AnalysisProgress) -> str:
    """Take the trials of a search as they come; how it ended, in words, if not by itself."""
    try:
        with progress:
            for trial in trials:
                progress.add(space.settings(trial.configuration), trial)
    except BudgetSpent:
        return "the budget ended it: with more, the same command goes on"
    return ""


def measure_url(search_for: SearchOptions, load: LevelOptions, console: Console) -> int:
    """Measure a server that somebody runs at every level, print the figures, and write the report; the exit status, 1
    if it keeps the constraints at no level.

    Raises:
        InvalidArgument: something is to be searched, or the options mean nothing.
        Unavailable: there is no such server or model, or requests fail.
    """
    _check_measured_only(search_for)
    seconds = search_for.full_seconds()
    levels = plan_levels(load)
    _check_report(search_for.report)
    _least_seconds(search_for, SearchEffort(seconds), len(levels))
    check_levels(levels, load, seconds)
    address = parse_server_url(search_for.url, GRPC_PORT, search_for.allow_remote)
    try:
        path = f"/v2/models/{quote(search_for.model, safe='')}/config"
        raw = ask_server(address, path, api_key=search_for.api_key, timeout=_ANSWER_SECONDS)
    except (OSError, HTTPException) as error:
        raise Unavailable(f"{search_for.url} does not answer: {error!r}") from None
    except Unavailable as error:
        raise Unavailable(f"{search_for.url}: {error.message}") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("input"), list):
        raise Unavailable(f"{search_for.url} does not tell the config of a model: it is no server of v2's protocol")
    config = complete_fields(raw)
    subject = msgspec.structs.replace(_load_subject(search_for.model, config), api_key=search_for.api_key)
    goal = parse_goal(search_for.objective, search_for.constraint, streams=subject.door is not None)
    if "memory" in (goal.objective, *(bound.metric for bound in goal.bounds)):
        raise InvalidArgument("memory is known of servers that are started here, and not of one by --url")
    plan = LoadPlan(subject, levels, load, goal)
    space = SearchSpace([TunedParameter(name="server", values=(search_for.url,))])

    def put(level: LoadLevel, seconds: float) -> tuple[WorkerOutcome, float | None]:
        return run_here(plan_load(subject, address, level, load, seconds, raw)), None

    began = time.perf_counter()
    figures = tuple(measure_levels(plan, put, seconds))
    trial = ConfigurationTrial(
        configuration=space.start, seconds=seconds, setup=0.0, loading=time.perf_counter() - began, levels=figures
    )
    return _tell(conclude_levels(search_for.model, space, goal, trial), plan, search_for.report, console)


def _check_measured_only(search_for: SearchOptions) -> None:
    default = SearchOptions()
    for name in ("sweep", "search", "server_args"):
        if getattr(search_for, name) != getattr(default, name):
            message = "--url measures a server that is in use, and changes nothing of it"
            raise InvalidArgument(f"{message}: --{name.replace('_', '-')} is for others", field=name)
    if not search_for.model:
        raise InvalidArgument("--url needs the name of the model that takes the load: --model", field="model")
