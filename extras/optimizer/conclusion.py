"""What an analysis came to, in words and tables: for the terminal, and for the report.

Knows trials and goals; measures nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import msgspec
from rich.console import Console
from rich.table import Table

from ...repository.config_io import config_to_text
from .parameters import configured, engine_flags, owner, value_now
from .ranking import RankedConfiguration, are_told_apart, rank
from .search_goal import (
    Configuration,
    ConfigurationTrial,
    ParameterValue,
    SearchGoal,
    expected_wall,
    format_metric,
)
from .search_space import SearchSpace
from .tuned_models import TunedModels

_ROWS, _SEPARATE = 10, 5
"""Configurations that the terminal shows, and parameters that have a column of their own there."""
_FOLDED = 12
"""Characters that a column whose text may be folded has at least."""
_BUSY = 0.85
"""From this share of a core on, the load generator may be what was measured."""
_SHOWN = ("throughput", "e2e_p50", "e2e_p99", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "memory", "failed")


class ConclusionText(msgspec.Struct, frozen=True):
    """Something to paste, and where to."""

    title: str
    text: str


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    """`ranked`: all that was measured, the best first. `start`: what holds without a search, or is nearest to that.
    `sentences`: what is to be said; `texts`: what to paste."""

    title: str
    goal: SearchGoal
    space: SearchSpace
    ranked: list[RankedConfiguration]
    start: Configuration
    sentences: list[str]
    texts: list[ConclusionText]

    @property
    def best(self) -> RankedConfiguration | None:
        """The best that has figures."""
        return next((candidate for candidate in self.ranked if candidate.scores), None)

    @property
    def columns(self) -> list[str]:
        """The metrics that there are figures of, the objective first."""
        levels = [candidate.middle.level for candidate in self.ranked if candidate.middle is not None]
        names = dict.fromkeys([self.goal.objective, *(bound.metric for bound in self.goal.bounds), *_SHOWN])
        there = [name for name in names if any(level.metric(name) is not None for level in levels)]
        return [name for name in there if name != "failed" or any(level.failed for level in levels)]

    def cells(self, ranked: RankedConfiguration, columns: Sequence[str]) -> list[str]:
        """The text of each column: of the objective the median, as in the sentences, and beside it what came with the
        middle measurement."""
        middle = ranked.middle
        if middle is None:
            return ["-" for _ in columns]
        medians = {self.goal.objective: ranked.value}
        values = [(name, medians.get(name, middle.level.metric(name))) for name in columns]
        return ["-" if value is None else format_metric(name, value) for name, value in values]

    def remark(self, ranked: RankedConfiguration) -> str:
        """What a row says at its end."""
        middle = ranked.middle
        if middle is None:
            return next((in_a_line(trial.failure, 120) for trial in ranked.trials if trial.failure), "no figures")
        missed = ", ".join(f"misses {bound}" for bound in self.goal.missed(middle.level))
        now = "now, or nearest" if ranked.configuration == self.start else ""
        return "; ".join(filter(None, (now, missed)))

    def print_to(self, console: Console) -> None:
        """Print a table with what the console has room for, the sentences, and what to paste."""
        if known := [candidate for candidate in self.ranked if candidate.scores]:
            console.print(self._table(known[:_ROWS], console.width))
        for text in (*self.sentences, *(f"\n{paste.title}\n{paste.text}" for paste in self.texts)):
            console.print(text, soft_wrap=True)

    def _table(self, known: Sequence[RankedConfiguration], width: int) -> Table:
        """Metrics beside the objective are left out from the last on where there is no room, and the parameters share a
        column where that is not enough, or there are many; the report has them all."""
        separate = [False] if len(self.space.parameters) > _SEPARATE else [True, False]
        for is_separate, count in product(separate, range(len(self.columns), 0, -1)):
            rows = self._rows(known, self.columns[:count], is_separate)
            fixed = [max(map(len, column)) for column in zip(*rows, strict=True)][not is_separate : -1]
            if sum(fixed) + 3 * len(rows[0]) + 1 + _FOLDED * (2 - is_separate) <= width:
                break
        table = Table(*rows[0])
        for index, column in enumerate(table.columns):
            is_folded = index == len(rows[0]) - 1 or (index == 0 and not is_separate)
            column.no_wrap = not is_folded
            column.overflow = "fold"
        for row in rows[1:]:
            table.add_row(*row)
        return table

    def _rows(self, known: Sequence[RankedConfiguration], columns: Sequence[str], is_separate: bool) -> list[list[str]]:
        names = [parameter.name for parameter in self.space.parameters]
        rows = [[*(names if is_separate else ["configuration"]), *columns, "turns", ""]]
        for candidate in known:
            together = [describe_settings(self.space.settings(candidate.configuration))]
            values = list(map(str, candidate.configuration)) if is_separate else together
            rows.append([*values, *self.cells(candidate, columns), str(len(candidate.scores)), self.remark(candidate)])
        return rows


def conclude(
    models: TunedModels, space: SearchSpace, goal: SearchGoal, trials: Sequence[ConfigurationTrial], ended: str
) -> Conclusion:
    """`ended`: why the search stopped before it was through, if it did."""
    ranked = rank(trials, goal)
    best = next((candidate for candidate in ranked if candidate.scores), None)
    sentences = [*_verdict(space, goal, ranked)]
    texts = list[ConclusionText]()
    if best is not None and best.feasible:
        settings = space.settings(best.configuration)
        kept = _kept(models, space, goal, best.configuration)
        sentences += [
            f"{name} may stay {now}: this load tells no {settings[name]} from it" for name, now in kept.items()
        ]
        texts += _texts(models, settings | kept)
    sentences += _cautions(space, goal, ranked, trials)
    if ended:
        sentences.append(ended)
    return Conclusion(
        title=models.loaded.name,
        goal=goal,
        space=space,
        ranked=ranked,
        start=space.start,
        sentences=sentences,
        texts=texts,
    )


def conclude_levels(model: str, space: SearchSpace, goal: SearchGoal, trial: ConfigurationTrial) -> Conclusion:
    """The conclusion on a server that was measured once and not searched; a row for each level of load."""
    sentences = [
        f"{level.level}: "
        + ", ".join(
            f"{name} {format_metric(name, value)}" for name in _SHOWN if (value := level.metric(name)) is not None
        )
        + "".join(f"; misses {bound}" for bound in goal.missed(level))
        for level in trial.levels
    ]
    sentences += _busy([trial])
    ranked = rank([trial], goal)
    return Conclusion(
        title=model, goal=goal, space=space, ranked=ranked, start=space.start, sentences=sentences, texts=[]
    )


def _verdict(space: SearchSpace, goal: SearchGoal, ranked: Sequence[RankedConfiguration]) -> Iterator[str]:
    known = [candidate for candidate in ranked if candidate.scores]
    if not known:
        yield "no configuration could be measured: the rows, or the results, say why"
        return
    best = known[0]
    settings = describe_settings(space.settings(best.configuration))
    level = best.middle.level.level if best.middle is not None else ""
    if not best.feasible:
        bounds = ", ".join(str(bound) for bound in goal.bounds)
        yield f"no configuration that was measured keeps the constraints ({bounds})"
        yield f"the nearest: {settings}, with {goal.objective} {describe_spread(goal, best)} under {level}"
        return
    yield f"best: {settings}: {goal.objective} {describe_spread(goal, best)} under {level}"
    start = next((candidate for candidate in known if candidate.configuration == space.start), None)
    if start is best:
        yield "it is what holds now, or what was tried nearest to that"
    elif start is not None:
        factor = best.value / start.value if goal.maximises else start.value / best.value
        other = describe_settings(space.settings(start.configuration))
        misses = "" if start.feasible else "; that one misses the constraints"
        fewer = len(start.scores) < len(best.scores) or longest(start) < longest(best)
        times = "once" if len(start.scores) == 1 else f"{len(start.scores)} times"
        often = f" (measured {times}, for {longest(start):.3g} s)" if fewer else ""
        yield f"{factor:.2f} times as good as {other}{often}, which holds now or was tried nearest to that{misses}"
    finalists = [
        candidate for candidate in known[1:] if candidate.feasible and min(len(candidate.scores), len(best.scores)) > 1
    ]
    for finalist in finalists[:3]:
        other = describe_settings(space.settings(finalist.configuration))
        if are_told_apart(best, finalist):
            yield f"told apart from {other}, with {describe_spread(goal, finalist)}: the ranges of turns do not meet"
        else:
            why = "the ranges of turns overlap, or there were fewer than three"
            yield f"not told apart from {other}, with {describe_spread(goal, finalist)}: {why}"


def longest(ranked: RankedConfiguration) -> float:
    """Seconds of load of the measurements that count of a configuration."""
    return max(trial.seconds for trial in ranked.trials if trial.levels)


def _cautions(
    space: SearchSpace, goal: SearchGoal, ranked: Sequence[RankedConfiguration], trials: Sequence[ConfigurationTrial]
) -> Iterator[str]:
    failed = [candidate for candidate in ranked if not candidate.scores]
    if failed:
        reason = next(
            (in_a_line(trial.failure) for candidate in failed for trial in candidate.trials if trial.failure), ""
        )
        yield f"{len(failed)} of the configurations failed{f', the first with: {reason}' if reason else ''}"
    seconds = sum(trial.wall for trial in trials)
    if any(trial.loading for trial in trials):
        full = max(trial.seconds for trial in trials)
        whole = space.size * expected_wall(trials, full)
        measured = f"{len(ranked)} of {space.size} configurations were measured, in {seconds:.0f} s"
        yield f"{measured}; each once for {full:.3g} s would be about {whole:.0f} s"
    yield from _busy(trials)


def _busy(trials: Sequence[ConfigurationTrial]) -> Iterator[str]:
    if any(level.generator > _BUSY for trial in trials for level in trial.levels):
        yield "the load generator was busy itself: believe differences, less the rates"


def _kept(models: TunedModels, space: SearchSpace, goal: SearchGoal, best: Configuration) -> dict[str, ParameterValue]:
    """The values that hold now of parameters that need no change: the load cannot tell them from the best's. None where
    memory counts, in which the two may differ."""
    kept: dict[str, ParameterValue] = {}
    if "memory" in (goal.objective, *(bound.metric for bound in goal.bounds)):
        return kept
    for parameter in space.parameters:
        settings = space.settings(best) | kept
        now = value_now(*owner(parameter.name, models))
        if now is None or now == settings[parameter.name] or now not in parameter.values:
            continue
        if space.canonical(tuple((settings | {parameter.name: now}).values())) == best:
            kept[parameter.name] = now
    return kept


def _texts(models: TunedModels, settings: Mapping[str, ParameterValue]) -> Iterator[ConclusionText]:
    if models.is_checkpoint:
        yield ConclusionText("flags of charonia serve:", engine_flags(settings) or "(none)")
        return
    configs = configured(models, settings)
    turned = {owner(name, models)[0].name for name in settings}
    for source in models.models:
        if source.name in turned:
            title = f"{source.name}/config.pbtxt:"
            yield ConclusionText(title, config_to_text(configs[source.name]).strip())


def in_a_line(failure: str, most: int = 300) -> str:
    """What failed, without line breaks: of a server that ended those are its last words."""
    return " ".join(failure.split())[:most]


def describe_settings(settings: Mapping[str, ParameterValue]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def describe_value(goal: SearchGoal, value: float) -> str:
    return format_metric(goal.objective, value)


def describe_spread(goal: SearchGoal, ranked: RankedConfiguration) -> str:
    """The median of the objective, and of several measurements the range."""
    text = describe_value(goal, ranked.value)
    if len(ranked.scores) < 2:
        return text
    low, high = (describe_value(goal, value) for value in ranked.spread)
    return f"{text} ({low} to {high})"


def describe_trial(goal: SearchGoal, trial: ConfigurationTrial) -> str:
    score = goal.score(trial)
    if score is None:
        return in_a_line(trial.failure) if trial.failure else "no figures: every request failed"
    missed = "".join(f", misses {bound}" for bound in goal.missed(score.level))
    return f"{goal.objective} {describe_value(goal, score.value)} under {score.level.level}{missed}"
