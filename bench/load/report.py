"""The figures of a load: a table for the terminal, JSON for programs, a plot for documents."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from ...core.errors import Unavailable
from .driver import LoadRecord
from .figures import LoadFigures, Slo, Spread, inter_token_times, ttft


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
    table = Table(title="latency, ms")
    for column in ("", "count", "mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="right" if column else "left")
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
        return ["0", *["-"] * 5]
    times = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
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
        raise Unavailable("--plot needs matplotlib: pip install 'charonia[bench]'") from None
    return import_module("matplotlib.pyplot")


def write_plot(path: Path, result: LoadResult) -> None:
    """Distributions of TTFT and ITL, and output over time, side by side."""
    pyplot = require_matplotlib()
    figure, (first, between, output) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
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
