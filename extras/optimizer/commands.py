"""The commands `charonia analyze`, `calibrate` and `simulate`. Light to import: what they do is imported when it is
called."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from ...core.errors import InvalidArgument
from ...engine.options import EngineOptions
from .options import (
    CalibrationOptions,
    FleetLoad,
    FleetOptions,
    LevelOptions,
    SearchOptions,
    SimulatedEngineOptions,
)

if TYPE_CHECKING:
    from rich.console import Console

_FILE_WIDTH = 160
"""The width of what is written to a file, in characters."""


def _group(name: str, position: int) -> Parameter:
    return Parameter("*", group=Group(name, sort_key=position))


def analyze(
    model: str | None = None,
    /,
    *,
    search_for: Annotated[SearchOptions, Parameter("*")] = SearchOptions(),  # noqa: B008
    load: Annotated[LevelOptions, Parameter("*")] = LevelOptions(),  # noqa: B008
) -> int:
    """Find the best configuration of a model: start servers, put them under load, and write a report and the
    config.pbtxt, or the flags, of the best. The status is 1 if nothing keeps the constraints.

    Parameters
    ----------
    model
        A model repository, a checkpoint directory, a file in GGUF, or a hub id.
    """
    from ...bench.server_process import exit_on_signals
    from .analysis import analyze_models, measure_url

    if (model is None) == (not search_for.url):
        what = "nothing" if model is None else "two things"
        raise InvalidArgument(f"{what} to analyze: name a repository or a checkpoint, or a server by --url")
    if model is not None and (search_for.api_key or search_for.allow_remote):
        raise InvalidArgument("--api-key and --allow-remote are for a server: name it by --url")
    with exit_on_signals():
        if model is None:
            return measure_url(search_for, load, _table_console())
        return analyze_models(model, search_for, load, _table_console())


def calibrate(
    checkpoint: str = "",
    /,
    *,
    options: Annotated[CalibrationOptions, _group("Calibration", 1)] = CalibrationOptions(),  # noqa: B008
    engine: Annotated[EngineOptions, _group("Engine", 2)] = EngineOptions(),  # noqa: B008
) -> int:
    """Measure what the steps of an engine take on this machine, and what a server adds, for simulate.

    Parameters
    ----------
    checkpoint
        A checkpoint directory, a file in GGUF or a hub id. With --roofline config.json alone is enough.
    """
    from .calibrate import calibrate_machine

    calibrate_machine(checkpoint, options, engine, _table_console())
    return 0


def simulate(
    *,
    machine: Path,
    load: Annotated[FleetLoad, _group("Load", 1)] = FleetLoad(),  # noqa: B008
    engine: Annotated[SimulatedEngineOptions, _group("Engine", 2)] = SimulatedEngineOptions(),  # noqa: B008
    fleet: Annotated[FleetOptions, _group("Fleet", 3)] = FleetOptions(),  # noqa: B008
) -> int:
    """Say what a load would get from replicas of an engine, or how many replicas keep an objective.

    Parameters
    ----------
    machine
        What steps take: a file that `charonia calibrate` wrote.
    """
    from .simulate import simulate_fleets

    return simulate_fleets(machine, load, engine, fleet, _table_console())


def _table_console() -> "Console":
    """As wide as the terminal, and wide enough for any table where there is none. Text is printed as it is: names of
    models and tenants may look like markup."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _FILE_WIDTH, markup=False, highlight=False)
