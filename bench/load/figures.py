"""Figures of a load, computed from its records alone; a table of them for the terminal, JSON for programs, a plot."""

from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from ...core.errors import Unavailable
from ..command import table_of
from .driver import OK, LoadRecord


class Spread(msgspec.Struct, frozen=True):
    """The distribution of values, in their unit; percentiles interpolate between the two nearest values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None where there are none."""
        if not values:
            return None
        p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
        return cls(len(values), float(np.mean(values)), p50, p90, p95, p99, max(values))


class Slo(msgspec.Struct, frozen=True):
    """The objective of a request: milliseconds to the first token, and between tokens on average (TPOT). None for no
    bound."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def kept_by(self, record: LoadRecord) -> bool:
        """Whether the request ended well, and in time."""
        if record.status != OK:
            return False
        first = self.ttft_ms is None or ttft(record) * 1e3 <= self.ttft_ms
        pace = tpot(record)
        return first and (self.itl_ms is None or pace is None or pace * 1e3 <= self.itl_ms)


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A load in figures; times in seconds. Latencies are of requests that ended well, and count from when they were
    due."""

    requests: int
    good: int
    """Requests that kept the objective."""
    statuses: dict[str, int]
    """Requests by how they ended."""
    seconds: float
    """From the start to the last end."""
    output_tokens: int
    prompt_tokens: int
    """Of requests that ended well."""
    frames: int
    """Messages with tokens."""
    size: int
    """Bytes of the answers."""
    ttft: Spread | None
    """To the first token."""
    itl: Spread | None
    """The gaps between successive frames with tokens."""
    tpot: Spread | None
    """A request's mean time per token after the first."""
    end_to_end: Spread | None
    lateness: Spread | None
    """Between when requests were due and when they were sent."""

    @property
    def succeeded(self) -> int:
        return self.statuses.get(OK, 0)

    @property
    def errors(self) -> dict[str, int]:
        """Requests that failed, by what went wrong."""
        return {status: count for status, count in self.statuses.items() if status != OK}

    def per_second(self, count: float) -> float:
        return count / self.seconds if self.seconds else 0.0


_NO_SLO = Slo()


def compute_figures(records: Sequence[LoadRecord], slo: Slo = _NO_SLO) -> LoadFigures:
    """Every figure of these records."""
    well = [record for record in records if record.status == OK]
    return LoadFigures(
        requests=len(records),
        good=sum(slo.kept_by(record) for record in records),
        statuses=dict(Counter(record.status for record in records).most_common()),
        seconds=max((record.ended for record in records), default=0.0),
        output_tokens=sum(record.tokens for record in records),
        prompt_tokens=sum(record.prompt_tokens for record in well),
        frames=sum(record.frames for record in records),
        size=sum(record.size for record in records),
        ttft=Spread.of([ttft(record) for record in well]),
        itl=Spread.of([gap for record in well for gap in inter_token_times(record)]),
        tpot=Spread.of(_known(tpot(record) for record in well)),
        end_to_end=Spread.of([record.ended - record.due for record in well]),
        lateness=Spread.of([record.sent - record.due for record in records]),
    )


def ttft(record: LoadRecord) -> float:
    """Seconds from when it was due to its first token."""
    return record.times[0] - record.due


def inter_token_times(record: LoadRecord) -> list[float]:
    """Seconds between successive frames with tokens."""
    return [later - earlier for earlier, later in zip(record.times, record.times[1:], strict=False)]


def tpot(record: LoadRecord) -> float | None:
    """Seconds per token after the first frame; None with a single token."""
    if record.tokens < 2:
        return None
    return (record.times[-1] - record.times[0]) / (record.tokens - 1)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """Cores used on average: by each generator process, and by the server's frontend and its engine cores where
    the server is ours to watch."""

    generator: list[float]
    frontend: float | None = None
    engine: float | None = None


class LoadResult(NamedTuple):
    """Everything there is to tell of one load. `asked`: the settings, for the record."""

    asked: dict[str, Any]
    figures: LoadFigures
    slo: Slo
    cpu: Cpu
    records: Sequence[LoadRecord]


_BUSY = 0.85
"""From this share of a core on, a generator may be what was measured."""


def show(console: Console, result: LoadResult) -> None:
    """Print the tables, and a warning where the generator was the bottleneck."""
    console.print(_latencies(result.figures))
    console.print(_totals(result))
    for status, count in result.figures.errors.items():
        console.print(f"[red]{count} failed:[/red] {status}", highlight=False)
    if max(result.cpu.generator, default=0) > _BUSY:
        console.print("[yellow]the generator was busy itself: give it more --processes, or believe less[/yellow]")


def _latencies(figures: LoadFigures) -> Table:
    table = table_of(("",), ("count", "mean", "p50", "p90", "p95", "p99", "max"), "latency, ms")
    spreads = {
        "to the first token (TTFT)": figures.ttft,
        "between tokens (ITL)": figures.itl,
        "per token (TPOT)": figures.tpot,
        "end to end": figures.end_to_end,
        "sent after it was due": figures.lateness,
    }
    for name, spread in spreads.items():
        table.add_row(name, *_cells(spread))
    return table


def _cells(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["0", *["-"] * 6]
    times = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max)
    return [str(spread.count), *(f"{time * 1e3:.2f}" for time in times)]


def _totals(result: LoadResult) -> Table:
    figures, cpu = result.figures, result.cpu
    table = Table(show_header=False)
    table.add_row("requests", f"{figures.requests} in {figures.seconds:.2f} s, {figures.succeeded} ended well")
    table.add_row("requests/s", f"{figures.per_second(figures.succeeded):.2f}")
    table.add_row("output tokens/s", f"{figures.per_second(figures.output_tokens):.1f}")
    table.add_row("total tokens/s", f"{figures.per_second(figures.output_tokens + figures.prompt_tokens):.1f}")
    table.add_row("frames/s", f"{figures.per_second(figures.frames):.1f}")
    table.add_row("goodput", f"{figures.per_second(figures.good):.2f} requests/s {_slo(result.slo)}")
    table.add_row("generator CPU", ", ".join(f"{share:.0%}" for share in cpu.generator) + " of a core each")
    if cpu.frontend is not None and cpu.engine is not None:
        table.add_row("server CPU", f"frontend {cpu.frontend:.0%}, engine {cpu.engine:.0%} of a core")
    return table


def _slo(slo: Slo) -> str:
    parts = {"TTFT": slo.ttft_ms, "ITL": slo.itl_ms}
    kept = [f"{name} within {value:g} ms" for name, value in parts.items() if value is not None]
    return "with " + ", ".join(kept) if kept else "(no SLO given)"


def write_json(path: Path, result: LoadResult) -> None:
    """Settings, figures, and every request with the times of its tokens."""
    figures = result.figures
    rates = {
        "requests_per_s": figures.per_second(figures.succeeded),
        "output_tokens_per_s": figures.per_second(figures.output_tokens),
        "total_tokens_per_s": figures.per_second(figures.output_tokens + figures.prompt_tokens),
        "frames_per_s": figures.per_second(figures.frames),
        "goodput_per_s": figures.per_second(figures.good),
    }
    content = {
        "asked": result.asked,
        "slo": result.slo,
        "rates": rates,
        "figures": figures,
        "cpu": result.cpu,
        "requests": sorted(result.records, key=lambda record: record.index),
    }
    path.write_bytes(msgspec.json.encode(content))


def require_matplotlib() -> Any:
    """Its pyplot, drawing to files only.

    Raises:
        Unavailable: it is not installed; the message says how to.
    """
    try:
        import_module("matplotlib").use("agg")
    except ImportError:
        raise Unavailable("--plot needs matplotlib: pip install '.[bench]'") from None
    return import_module("matplotlib.pyplot")


def write_plot(path: Path, result: LoadResult) -> None:
    """Distributions of TTFT and ITL, and output over time, side by side."""
    pyplot = require_matplotlib()
    figure, (first, between, output) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    figure.suptitle(f"{len(result.records)} requests to {result.asked.get('model') or 'the first model'}")
    for axes, title in ((first, "Time to first token"), (between, "Time between tokens"), (output, "Output")):
        axes.set_title(title)
    well = [record for record in result.records if record.times]
    _distribution(first, [ttft(record) for record in well], "time to first token, ms")
    _distribution(between, [gap for record in well for gap in inter_token_times(record)], "time between tokens, ms")
    times = np.array([time for record in well for time in record.times])
    if times.size:
        counts, edges = np.histogram(times, bins=60)
        output.stairs(counts / np.diff(edges), edges, fill=True)
    output.set(xlabel="seconds", ylabel="frames with tokens per second", ylim=(0, None))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _distribution(axes: Any, seconds: Sequence[float], label: str) -> None:
    values = np.sort(np.array(seconds)) * 1e3
    axes.plot(values, np.linspace(0, 1, values.size), drawstyle="steps-post")
    axes.set(xlabel=label, ylabel="share of requests" if "first" in label else "share of gaps", ylim=(0, 1))
    axes.grid(alpha=0.3)
