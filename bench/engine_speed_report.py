"""The figures of a comparison of engines without a server: a table for the terminal, JSON for programs, a plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
from rich.console import Console

from .command import table_of
from .load.figures import require_matplotlib
from .peer_process import OURS
from .roofline import MachinePeaks, OfflineJob, Precision


class OfflineRun(msgspec.Struct, frozen=True, kw_only=True):
    """One contender once, beside the limit of the machine as it was measured next to it."""

    name: str
    precision: Precision
    job: OfflineJob
    speed: float
    """Output tokens a second."""
    machine: MachinePeaks
    limit: float
    """Output tokens a second."""
    agreement: float
    """Share of the prompts whose first new token is ours in this precision."""


@dataclass(frozen=True, slots=True)
class OfflineCell:
    """Several turns at one job, by their medians."""

    turns: Sequence[OfflineRun]

    @property
    def speed(self) -> float:
        return median(turn.speed for turn in self.turns)

    @property
    def limit(self) -> float:
        return median(turn.limit for turn in self.turns)

    @property
    def share(self) -> float:
        """The share of the limit, which is measured for each turn."""
        return median(turn.speed / turn.limit for turn in self.turns)


class OfflineComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is to tell. `about`: what each contender is; `ways`: how the peaks were reached."""

    checkpoint: str
    threads: int
    about: dict[str, str]
    ways: dict[Precision, str]
    turns: list[OfflineRun]

    @property
    def jobs(self) -> list[OfflineJob]:
        return list(dict.fromkeys(turn.job for turn in self.turns))

    @property
    def rows(self) -> list[tuple[str, Precision]]:
        """Contenders in the order they began, by precision."""
        return list(dict.fromkeys((turn.name, turn.precision) for turn in self.turns))

    def cell(self, name: str, precision: Precision, job: OfflineJob) -> OfflineCell:
        return OfflineCell(
            [turn for turn in self.turns if (turn.name, turn.precision, turn.job) == (name, precision, job)]
        )

    def agreement(self, name: str, precision: Precision) -> float:
        """Mean of that contender's turns."""
        return fmean(turn.agreement for turn in self.turns if (turn.name, turn.precision) == (name, precision))

    def ratio(self, name: str, precision: Precision, job: OfflineJob) -> float:
        """Our speed over that contender's, medians both."""
        return self.cell(OURS, precision, job).speed / self.cell(name, precision, job).speed


def show(console: Console, seen: OfflineComparison) -> None:
    """Print speeds with shares of the limit, ratios, and what the machine gave."""
    job = seen.jobs[0]
    title = f"output tokens/s and share of the limit, {job.prompt} prompt + {job.new} new tokens, medians"
    table = table_of(("sequences",), [str(job.sequences) for job in seen.jobs], title)
    for name, precision in seen.rows:
        if name == OURS:
            table.add_section()
            limits = (seen.cell(name, precision, job).limit for job in seen.jobs)
            table.add_row(f"the machine's limit, {precision}", *(f"{limit:.1f}" for limit in limits))
        cells = [seen.cell(name, precision, job) for job in seen.jobs]
        table.add_row(f"{name} {precision}", *(f"{cell.speed:.1f} {cell.share:4.0%}" for cell in cells))
    table.add_section()
    for name, precision in seen.rows:
        if name != OURS:
            ratios = (seen.ratio(name, precision, job) for job in seen.jobs)
            table.add_row(f"{OURS} / {name}, {precision}", *(f"{ratio:.2f}" for ratio in ratios))
    console.print(table)
    console.print(_machine(seen), highlight=False)
    for name, precision in seen.rows:
        if name != OURS:
            console.print(f"{name} {precision} begins as we do in {seen.agreement(name, precision):.0%} of the prompts")


def _machine(seen: OfflineComparison) -> str:
    reads = sorted(turn.machine.read / 1e9 for turn in seen.turns)
    lines = [f"{seen.threads} threads; read bandwidth {reads[0]:.1f} to {reads[-1]:.1f} GB/s"]
    for precision, way in seen.ways.items():
        peaks = [turn.machine.peak / 1e9 for turn in seen.turns if turn.precision == precision]
        lines.append(f"{precision} peak {min(peaks):.0f} to {max(peaks):.0f} GOP/s by {way}")
    return "; ".join([*lines, *dict.fromkeys(seen.about.values())])


def write_json(path: Path, seen: OfflineComparison) -> None:
    """Every turn, and the medians of the table."""
    medians = [
        {
            "name": name,
            "precision": precision,
            "sequences": job.sequences,
            "speed": cell.speed,
            "limit": cell.limit,
            "share": cell.share,
            "ours_over_this": seen.ratio(name, precision, job),
            "agreement": seen.agreement(name, precision),
        }
        for name, precision in seen.rows
        for job in seen.jobs
        for cell in [seen.cell(name, precision, job)]
    ]
    path.write_bytes(msgspec.json.encode({"comparison": seen, "medians": medians}))


def write_plot(path: Path, seen: OfflineComparison) -> None:
    """Speeds over sequences with the limit above them, one picture a precision."""
    pyplot = require_matplotlib()
    precisions = list(dict.fromkeys(precision for _, precision in seen.rows))
    figure, axes = pyplot.subplots(
        1, len(precisions), figsize=(6 * len(precisions), 4), layout="constrained", squeeze=False
    )
    for plot, precision in zip(axes[0], precisions, strict=True):
        _draw(plot, seen, precision)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(plot: Any, seen: OfflineComparison, precision: Precision) -> None:
    places = range(len(seen.jobs))
    limits = [seen.cell(OURS, precision, job).limit for job in seen.jobs]
    plot.plot(places, limits, "k--", label="the machine's limit")
    for name, own in seen.rows:
        if own == precision:
            speeds = [seen.cell(name, precision, job).speed for job in seen.jobs]
            plot.plot(places, speeds, "o-", linewidth=2.5 if name == OURS else 1.2, label=name)
    plot.set_xticks(places, [str(job.sequences) for job in seen.jobs])
    plot.set(title=precision, xlabel="sequences at once", ylabel="output tokens/s", ylim=(0, None))
    plot.grid(alpha=0.3)
    plot.legend()
