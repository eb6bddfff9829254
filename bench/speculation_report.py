"""The figures of a comparison of drafters: tables for the terminal, JSON for programs, a plot for documents."""

from collections.abc import Sequence
from math import isinf
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from .command import table_of
from .load.figures import require_matplotlib
from .roofline import Precision
from .speculation_texts import TextKind
from .speculation_trial import Acceptance, RunFigures

_ACCEPTANCE = ("drafted", "length", "right by place", "accepted 0, 1, ..")
_ALL_SIZES = 12
"""Steps of more tokens are shown where they are one in a hundred."""
NONE = "none"
"""The contender without drafts."""


class SpeculationTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One contender once with all texts of a kind."""

    kind: TextKind
    streams: int
    drafter: str
    repeat: int
    figures: RunFigures


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that only decode, of so many `tokens`: median seconds, and those that the schedulers expect, in the median
    of those that do."""

    tokens: int
    steps: int
    measured: float
    predicted: float | None


class SpeculationComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is to tell."""

    checkpoint: str
    precision: Precision
    target: str
    machine: str
    turns: list[SpeculationTurn]
    costs: list[StepCost]

    @property
    def drafters(self) -> list[str]:
        return list(dict.fromkeys(turn.drafter for turn in self.turns))

    @property
    def kinds(self) -> list[TextKind]:
        return list(dict.fromkeys(turn.kind for turn in self.turns))

    @property
    def streams(self) -> list[int]:
        return list(dict.fromkeys(turn.streams for turn in self.turns))

    @property
    def differing(self) -> int:
        """Sampled tokens that are not those without drafts."""
        return sum(turn.figures.differing for turn in self.turns)

    def cell(self, kind: TextKind, streams: int, drafter: str) -> "SpeculationCell":
        """The turns of one contender, each beside that without drafts in the same round."""
        both = [
            {turn.repeat: turn.figures for turn in self.turns if (turn.kind, turn.streams, turn.drafter) == key}
            for key in ((kind, streams, drafter), (kind, streams, NONE))
        ]
        return SpeculationCell([both[0][repeat] for repeat in both[0]], [both[1][repeat] for repeat in both[0]])

    def mean_ratio(self, streams: int, drafter: str) -> float:
        """Of the speed over that without drafts: the geometric mean over kinds of text."""
        return geometric_mean(self.cell(kind, streams, drafter).ratio for kind in self.kinds)


class SpeculationCell:
    """Turns of a contender and of the one without drafts, round by round."""

    def __init__(self, own: Sequence[RunFigures], none: Sequence[RunFigures]) -> None:
        self.own, self._none = RunFigures.together(own), RunFigures.together(none)
        self.speed = median(each.speed for each in own)
        self.ratio = median(one.speed / other.speed for one, other in zip(own, none, strict=True))

    @property
    def tpot_ratio(self) -> float:
        """The 99th percentile over sequences of the time per output token, over that without drafts."""
        return float(np.percentile(self.own.tpot, 99) / np.percentile(self._none.tpot, 99))


def show(console: Console, seen: SpeculationComparison) -> None:
    """Print speeds by text, what became of drafts, and what steps cost."""
    said = f"{seen.checkpoint}, {seen.precision}, tokens of the {seen.target}"
    columns = ("tokens/s", "of none", "TPOT p99 of none", "gap p50", "gap p99 ms", "length", "wasted", "others")
    title = f"output tokens/s while decoding, {said}; medians"
    table = table_of(("streams", "text", "drafter"), columns, title)
    for streams in seen.streams:
        for kind in seen.kinds:
            for drafter in seen.drafters:
                _add_cell(table, (str(streams), kind, drafter), seen.cell(kind, streams, drafter))
            table.add_section()
    console.print(table)
    console.print(_by_drafter(seen))
    console.print(_costs(seen.costs))
    console.print(seen.machine, highlight=False)


def _add_cell(table: Table, names: tuple[str, ...], cell: SpeculationCell) -> None:
    gaps = np.percentile(cell.own.gaps, [50, 99]) * 1e3
    figures = cell.own
    table.add_row(
        *names,
        f"{cell.speed:.1f}",
        f"{cell.ratio:.2f}",
        f"{cell.tpot_ratio:.2f}",
        *(f"{gap:.1f}" for gap in gaps),
        f"{figures.acceptance.length:.2f}" if figures.acceptance.drafted else "-",
        f"{figures.wasted / max(figures.computed, 1):.0%}",
        str(figures.differing),
    )


def _by_drafter(seen: SpeculationComparison) -> Table:
    columns = ("of none", *_ACCEPTANCE, "ms to draft")
    title = "over all texts: geometric mean of the ratios, and what became of drafts"
    table = table_of(("streams", "drafter"), columns, title)
    for streams in seen.streams:
        for drafter in seen.drafters:
            own = [turn for turn in seen.turns if (turn.streams, turn.drafter) == (streams, drafter)]
            if drafter != NONE:
                figures = RunFigures.together([turn.figures for turn in own])
                ratio = f"{seen.mean_ratio(streams, drafter):.3f}"
                table.add_row(str(streams), drafter, ratio, *_acceptance(figures.acceptance), _drafting(figures))
        table.add_section()
    return table


def _acceptance(acceptance: Acceptance) -> tuple[str, ...]:
    return (
        f"{acceptance.drafted / max(acceptance.steps, 1):.0%}",
        f"{acceptance.length:.2f}",
        " ".join(f"{rate:.2f}".removeprefix("0") for rate in acceptance.rates) or "-",
        " ".join(map(str, acceptance.histogram)),
    )


def _drafting(figures: RunFigures) -> str:
    """Median milliseconds to draft for the number of sequences that was asked most often."""
    if not figures.drafting:
        return "-"
    rows, seconds = max(figures.drafting.items(), key=lambda item: len(item[1]))
    return f"{median(seconds) * 1e3:.3f} for {rows}"


def _costs(costs: Sequence[StepCost]) -> Table:
    columns = ("tokens", "steps", "measured", "expected", "of the smallest")
    table = table_of((), columns, "steps that only decode, by their tokens: median ms, and what the schedulers expect")
    steps = sum(cost.steps for cost in costs)
    for cost in costs:
        if cost.tokens > _ALL_SIZES and cost.steps < steps / 100:
            continue  # as sequences end there are some of every size
        expected = "-" if cost.predicted is None or isinf(cost.predicted) else f"{cost.predicted * 1e3:.2f}"
        of_least = f"{cost.measured / costs[0].measured:.2f}"
        table.add_row(str(cost.tokens), str(cost.steps), f"{cost.measured * 1e3:.2f}", expected, of_least)
    return table


def show_replay(console: Console, turns: Sequence[SpeculationTurn]) -> None:
    """Print what each drafter would have had accepted in each kind of text."""
    columns = ("tokens a step", *_ACCEPTANCE, "us to draft")
    table = table_of(("drafter", "text"), columns, "drafters against records")
    for drafter in dict.fromkeys(turn.drafter for turn in turns):
        for kind in dict.fromkeys(turn.kind for turn in turns):
            own = [turn.figures for turn in turns if (turn.drafter, turn.kind) == (drafter, kind)]
            figures = RunFigures.together(own)
            spent = median(figures.drafting[1]) * 1e6
            acceptance = figures.acceptance
            table.add_row(drafter, kind, f"{acceptance.tokens_per_step:.2f}", *_acceptance(acceptance), f"{spent:.1f}")
        table.add_section()
    console.print(table)


def write_json(path: Path, seen: SpeculationComparison) -> None:
    """Every turn, and the medians of the tables."""
    medians = [
        {"kind": kind, "streams": streams, "drafter": drafter, "speed": cell.speed, "ratio": cell.ratio}
        for streams in seen.streams
        for kind in seen.kinds
        for drafter in seen.drafters
        for cell in [seen.cell(kind, streams, drafter)]
    ]
    path.write_bytes(msgspec.json.encode({"comparison": seen, "medians": medians}))


def write_plot(path: Path, seen: SpeculationComparison) -> None:
    """The speed over that without drafts by kind of text, one picture for each number of streams."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(
        len(seen.streams), 1, figsize=(10, 3.2 * len(seen.streams)), layout="constrained", squeeze=False
    )
    for plot, streams in zip(axes[:, 0], seen.streams, strict=True):
        _draw(plot, seen, streams)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(plot: Any, seen: SpeculationComparison, streams: int) -> None:
    drafters = [drafter for drafter in seen.drafters if drafter != NONE]
    width, places = 0.8 / max(len(drafters), 1), np.arange(len(seen.kinds))
    for number, drafter in enumerate(drafters):
        ratios = [seen.cell(kind, streams, drafter).ratio for kind in seen.kinds]
        plot.bar(places + (number - (len(drafters) - 1) / 2) * width, ratios, width, label=drafter)
    plot.axhline(1, color="black", linewidth=1)
    plot.set_xticks(places, seen.kinds)
    plot.set(title=f"{streams} at once", ylabel="speed, of none", ylim=(0, None))
    plot.grid(alpha=0.3, axis="y")
    plot.legend()
