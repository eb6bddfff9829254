"""`charonia simulate`: what a load gets from engines whose step times a file has, and how many keep an objective."""

import sys
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from ...bench.load.figures import Spread
from ...core.errors import InvalidArgument
from .fleet_figures import (
    FleetFigures,
    Objective,
    SimulatedTraffic,
    compute_fleet_figures,
    find_fleet,
    keeps,
    parse_slo,
)
from .fleet_load import make_requests
from .line_chart import ChartLine, LineChart, draw_chart, write_page
from .machine_file import MachineFile, MachineOrigin, read_machine_file, require_writable
from .options import FleetLoad, FleetOptions, SimulatedEngineOptions
from .simulated_request import SimulatedRequest, SimulatedResult
from .simulation import EngineShape, Simulation

_MUCH, _LITTLE = 100.0, 0.01
"""Shares of what is allowed: of anything where nothing is, and the least that is drawn."""


class SimulatedFleet(NamedTuple):
    """A fleet that was simulated, and the `wall` seconds that it took."""

    figures: FleetFigures
    results: Sequence[SimulatedResult]
    wall: float

    @property
    def speed(self) -> float:
        """Seconds of one replica simulated in a second."""
        return self.figures.replicas * self.figures.seconds / self.wall


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. `replicas`: the answer to --slo, None if none of those tried keeps it. `speed`: seconds of
    one replica simulated in a second."""

    origin: MachineOrigin
    engine: EngineShape
    load: FleetLoad
    speed: float
    fleets: list[FleetFigures]
    slo: list[Objective] = []
    replicas: int | None = None


def simulate_fleets(
    machine: Path, load: FleetLoad, engine: SimulatedEngineOptions, fleet: FleetOptions, console: Console
) -> int:
    """Simulate, and print what is found; the exit status is 1 if no fleet keeps the objectives.

    Raises:
        InvalidArgument: a file cannot be read, or an option means nothing.
    """
    _check_fleet(fleet)
    file = read_machine_file(machine)
    shape = resolve_engine(file, engine)
    slo = parse_slo(fleet.slo) if fleet.slo else []
    requests = make_requests(load, shape.scheduler.max_model_len)
    run = _runner(file, shape, requests, fleet.slower)
    tried: list[SimulatedFleet] = []

    def try_fleet(replicas: int) -> FleetFigures:
        tried.append(run(replicas))
        return tried[-1].figures

    figures = list(find_fleet(try_fleet, slo, fleet.most_replicas)) if slo else [try_fleet(fleet.replicas)]
    figures.sort(key=lambda fleet_figures: fleet_figures.replicas)
    tried.sort(key=lambda attempt: attempt.figures.replicas)
    sufficient = next((attempt for attempt in tried if keeps(attempt.figures, slo)), None)
    wall = sum(attempt.wall for attempt in tried)
    report = SimulationReport(
        origin=file.origin,
        engine=shape,
        load=load,
        speed=sum(attempt.speed * attempt.wall for attempt in tried) / wall,
        fleets=figures,
        slo=slo,
        replicas=None if sufficient is None or not slo else sufficient.figures.replicas,
    )
    if fleet.json:
        print(msgspec.json.encode(report, enc_hook=str).decode())
    else:
        _print_report(console, report, sufficient or tried[-1], wall)
    if fleet.plot is not None:
        _write_plot(fleet.plot, report, sufficient or tried[-1], wall)
    return 0 if sufficient is not None else 1


def _check_fleet(fleet: FleetOptions) -> None:
    default = FleetOptions()
    if fleet.slo and fleet.replicas != default.replicas:
        raise InvalidArgument("--slo looks for the number of replicas: leave --replicas out", field="replicas")
    if not fleet.slo and fleet.most_replicas != default.most_replicas:
        raise InvalidArgument("--most-replicas is of --slo, which is not given", field="most_replicas")
    if fleet.plot is not None:
        if fleet.plot.suffix not in (".svg", ".html"):
            raise InvalidArgument(f"--plot draws .svg or .html, got {fleet.plot}", field="plot")
        require_writable(fleet.plot, "plot")


def resolve_engine(file: MachineFile, options: SimulatedEngineOptions) -> EngineShape:
    """The engine that was calibrated, with what the options change. Bytes of the cache are also those of the states of
    its rows, and of as many snapshots as were calibrated.

    Raises:
        InvalidArgument: the numbers do not go together.
    """
    changes = {name: value for name in options.__slots__ if (value := getattr(options, name)) is not None}
    if len({"kv_cache_bytes", "kv_cache_blocks"} & changes.keys()) == 2:
        raise InvalidArgument("give one of --kv-cache-bytes and --kv-cache-blocks", field="kv_cache_blocks")
    blocks = changes.pop("kv_cache_blocks", None) or file.engine.blocks
    if (size := changes.pop("kv_cache_bytes", None)) is not None:
        if not file.block_bytes:
            message = "a block's size was not seen when the machine was measured: give --kv-cache-blocks"
            raise InvalidArgument(message, field="kv_cache_bytes")
        rows = changes.get("max_num_seqs", file.engine.scheduler.max_num_seqs)
        states = (rows + file.engine.snapshots) * file.state_bytes
        blocks = (size - states) // file.block_bytes
        if blocks < 1:
            message = f"kv_cache_bytes {size} has no room for a block of {file.block_bytes} bytes"
            message += f" beside {states} bytes of states" if states else ""
            raise InvalidArgument(message, field="kv_cache_bytes")
    own = {name: changes.pop(name) for name in list(changes) if name in EngineShape.__struct_fields__}
    scheduler = msgspec.structs.replace(file.engine.scheduler, **changes)
    return msgspec.structs.replace(file.engine, scheduler=scheduler, blocks=blocks, **own)


def _runner(
    file: MachineFile, shape: EngineShape, requests: Sequence[SimulatedRequest], slower: float
) -> Callable[[int], SimulatedFleet]:
    machine = file.machine if slower == 1 else file.machine.slowed(slower)

    def run(replicas: int) -> SimulatedFleet:
        began = perf_counter()
        simulation = Simulation(machine, shape, replicas)
        print(f"simulating {replicas} replica{'s' if replicas > 1 else ''} ...", file=sys.stderr)
        results = simulation.run(requests)
        simulation.check_integrity()
        return SimulatedFleet(compute_fleet_figures(simulation, results), results, perf_counter() - began)

    return run


def _print_report(console: Console, report: SimulationReport, shown: SimulatedFleet, wall: float) -> None:
    if report.slo:
        console.print(_fleets_table(report))
        console.print(f"{_slo_text(report.slo)}: {_answer(report)}")
    console.print(_latency_table(shown.figures))
    console.print(_totals_table(shown.figures))
    origin = report.origin
    about = ", ".join(filter(None, (origin.how, origin.checkpoint, origin.processor or None)))
    console.print(f"step times: {about}")
    console.print(f"{wall:.1f} s: a replica is simulated {report.speed:.0f} times as fast as it runs")


def _answer(report: SimulationReport) -> str:
    if report.replicas is not None:
        return f"{report.replicas} replica{'s' if report.replicas > 1 else ''}"
    largest = report.fleets[-1]
    return f"not kept by {largest.replicas} replicas, which compute {largest.busy:.0%} of the time"


def _slo_text(slo: Sequence[Objective]) -> str:
    return ", ".join(f"{objective.name} {_value(objective, objective.limit)}" for objective in slo)


def _value(objective: Objective, value: float) -> str:
    if objective.metric == "rejected":
        return f"{value:.1%}"
    return f"{value * 1e3:,.0f} ms" if value >= 0.01 or not value else f"{value * 1e3:.3g} ms"


def _fleets_table(report: SimulationReport) -> Table:
    table = Table(title="fleets that were tried")
    for name in ("replicas", "busy", "tokens/s", *(objective.name for objective in report.slo), ""):
        table.add_column(name, justify="right")
    for figures in report.fleets:
        values = (_value(objective, objective.found_in(figures)) for objective in report.slo)
        kept = "kept" if keeps(figures, report.slo) else ""
        speed = f"{figures.all.output_tokens_per_s:,.0f}"
        table.add_row(str(figures.replicas), f"{figures.busy:.0%}", speed, *values, kept)
    return table


def _latency_table(figures: FleetFigures) -> Table:
    replicas = f"{figures.replicas} replica{'s' if figures.replicas > 1 else ''}"
    table = Table(title=f"{replicas}, {figures.seconds:,.1f} s; latencies in ms")
    table.add_column("", overflow="fold")
    table.add_column("", no_wrap=True)
    for name in ("count", "mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, traffic in (("all", figures.all), *figures.tenants.items()):
        for label, spread in (("TTFT", traffic.ttft), ("ITL", traffic.itl), ("e2e", traffic.e2e)):
            table.add_row(name if label == "TTFT" else "", label, *_cells(spread), end_section=label == "e2e")
    return table


def _cells(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["0", *["-"] * 6]
    times = spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max
    return [str(spread.count), *(f"{seconds * 1e3:.{1 if seconds < 1 else 0}f}" for seconds in times)]


def _totals_table(figures: FleetFigures) -> Table:
    table = Table(show_header=False)
    tenants = {f", {name}": traffic for name, traffic in figures.tenants.items()}
    for suffix, traffic in ({"": figures.all} | tenants).items():
        for label, text in _traffic_rows(traffic):
            table.add_row(label + suffix, text)
    table.add_row("replicas compute", f"{figures.busy:.1%} of the time, {figures.steps:,} steps")
    table.add_row("cache in use", f"{figures.cache_mean:.1%} on average, {figures.cache_most:.1%} at most")
    table.add_row("prefix cache hits", f"{figures.prefix_hit_rate:.1%} of prompt tokens")
    table.add_row("preemptions", f"{figures.preemptions:,}")
    return table


def _traffic_rows(traffic: SimulatedTraffic) -> Iterator[tuple[str, str]]:
    refused = "".join(f"; {count:,} refused: {reason}" for reason, count in traffic.rejected.items())
    yield "requests", f"{traffic.requests:,}{refused}"
    tokens = f"{traffic.prompt_tokens:,} prompt ({traffic.cached_tokens:,} cached), {traffic.output_tokens:,} new"
    yield "tokens", f"{tokens}; {traffic.output_tokens_per_s:,.1f} new ones a second"


def _write_plot(path: Path, report: SimulationReport, shown: SimulatedFleet, wall: float) -> None:
    """The picture, with the figures of the terminal below it."""
    chart = _slo_chart(report) if report.slo else _latency_chart(shown.results)
    console = Console(width=110, record=True, file=StringIO(), markup=False, highlight=False)
    _print_report(console, report, shown, wall)
    text = console.export_text()
    content = draw_chart(chart, text) if path.suffix == ".svg" else write_page(chart, text)
    try:
        path.write_text(content)
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}", field="plot") from None


def _slo_chart(report: SimulationReport) -> LineChart:
    """What each fleet comes to, over what is allowed, on a logarithmic axis: one that is overloaded comes to hundreds
    of times that. Where nothing is allowed, anything is `_MUCH`."""

    def points(objective: Objective) -> list[tuple[float, float]]:
        values = (objective.found_in(figures) for figures in report.fleets)
        shares = (value / objective.limit if objective.limit else _MUCH * (value > 0) for value in values)
        return [(replicas, max(share, _LITTLE)) for (replicas, _), share in zip(bound, shares, strict=True)]

    bound = [(figures.replicas, 1.0) for figures in report.fleets]
    lines = [ChartLine(objective.name, points(objective), dots=True) for objective in report.slo]
    lines.append(ChartLine("allowed", bound, dashed=True))
    return LineChart(_slo_text(report.slo), "replicas", "times what is allowed", lines, log_y=True)


def _latency_chart(results: Sequence[SimulatedResult]) -> LineChart:
    served = [result for result in results if result.tokens]
    gaps = [b - a for result in served for a, b in zip(result.tokens, result.tokens[1:], strict=False)]
    values = {
        "TTFT": [result.ttft for result in served],
        "ITL": gaps,
        "e2e": [result.tokens[-1] - result.arrival.at for result in served],
    }
    lines = [ChartLine(name, _distribution(seconds)) for name, seconds in values.items() if seconds]
    if not lines:
        raise InvalidArgument("no request was served: there is nothing to draw", field="plot")
    return LineChart("latency", "ms", "share", lines, log_x=True)


def _distribution(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """At most a few hundred points (milliseconds, the share of `seconds` that are no longer), up to the longest."""
    ordered = sorted(seconds)
    step = max(1, len(seconds) // 300)
    points = [(1e3 * max(source, 1e-6), (at + 1) / len(ordered)) for at, source in enumerate(ordered)]
    return points[::-step][::-1]
