"""A trial: contenders take turns, A B A B, and what is told are medians and ratios of the turns.

A shared machine changes its speed by the minute: only what was measured beside each other compares.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table

from .command import Log

Run = TypeVar("Run")
"""One turn of one contender, measured."""


def take_turns(
    contenders: Mapping[str, Callable[[int], Run]], repeats: int, log: Log, describe: Callable[[Run], str]
) -> dict[str, list[Run]]:
    """Measure every contender once a round, for `repeats` rounds, whose number each is called with. `describe` makes
    the line that is logged of a turn."""
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for number in range(repeats):
        for name, measure in contenders.items():
            run = measure(number)
            runs[name].append(run)
            log(f"{name}: {describe(run)}")
    return runs


def median_of(runs: Sequence[Run], figure: Callable[[Run], float]) -> float:
    """The median of a figure over the turns of a contender."""
    return median(map(figure, runs))


def ratio_of(runs: Sequence[Run], others: Sequence[Run], figure: Callable[[Run], float]) -> float:
    """The median over rounds of a contender's figure, in that of another in the same round."""
    return median(figure(run) / figure(other) for run, other in zip(runs, others, strict=True))


class TrialVerdict(NamedTuple):
    """The figure of a trial, and its bar, a lower or an upper bound."""

    what: str
    value: float
    bar: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.value >= self.bar if self.at_least else self.value <= self.bar


def show_verdicts(console: Console, verdicts: Sequence[TrialVerdict]) -> None:
    """Print them beside their bars."""
    table = Table("", "figure", "bar", "")
    for verdict in verdicts:
        sign = "at least" if verdict.at_least else "at most"
        met = "met" if verdict.met else "[red]missed[/red]"
        table.add_row(verdict.what, f"{verdict.value:.2f}", f"{sign} {verdict.bar:g}", met)
    console.print(table)
