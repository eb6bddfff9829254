"""Which of the configurations that were measured are better, and which are told apart. Pure logic over trials."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from .search_goal import Configuration, ConfigurationTrial, LevelScore, SearchGoal

_TURNS_TO_TELL = 3


class RankedConfiguration(NamedTuple):
    """What is known of a configuration. `scores`: of its longest measurements, from the least `utility` to the most,
    the `middle` among them; empty where all failed. `trials`: all that it had."""

    configuration: Configuration
    trials: tuple[ConfigurationTrial, ...]
    scores: tuple[LevelScore, ...] = ()

    @property
    def middle(self) -> LevelScore | None:
        """The score of the median; the lower of the middle two."""
        return self.scores[(len(self.scores) - 1) // 2] if self.scores else None

    @property
    def value(self) -> float:
        """The median of the objective."""
        return median(score.value for score in self.scores)

    @property
    def spread(self) -> tuple[float, float]:
        values = [score.value for score in self.scores]
        return min(values), max(values)

    @property
    def feasible(self) -> bool:
        return self.middle is not None and self.middle.feasible


def rank(trials: Sequence[ConfigurationTrial], goal: SearchGoal) -> list[RankedConfiguration]:
    """All configurations that were measured, the best first: those that keep the bounds before those that do not, and
    of these those that were measured most before what a short measurement may flatter."""
    by_configuration: dict[Configuration, list[ConfigurationTrial]] = {}
    for trial in trials:
        by_configuration.setdefault(trial.configuration, []).append(trial)
    ranked = [_rank_one(configuration, tuple(its), goal) for configuration, its in by_configuration.items()]
    longest = max((max(trial.seconds for trial in its) for its in by_configuration.values()), default=0.0)
    turns = {
        candidate.configuration: sum(trial.seconds == longest for trial in candidate.trials) for candidate in ranked
    }
    most = max(turns.values(), default=0)

    def key(candidate: RankedConfiguration) -> tuple[bool, bool, bool, float]:
        middle = candidate.middle
        utility = -float("inf") if middle is None else goal.utility(middle)
        return middle is not None, candidate.feasible, turns[candidate.configuration] >= max(1, most - 1), utility

    return sorted(ranked, key=key, reverse=True)


def _rank_one(
    configuration: Configuration, trials: tuple[ConfigurationTrial, ...], goal: SearchGoal
) -> RankedConfiguration:
    scored = [(trial.seconds, score) for trial in trials if (score := goal.score(trial)) is not None]
    longest = max((seconds for seconds, _ in scored), default=0.0)
    scores = sorted((score for seconds, score in scored if seconds == longest), key=goal.utility)
    return RankedConfiguration(configuration, trials, tuple(scores))


def are_told_apart(one: RankedConfiguration, other: RankedConfiguration) -> bool:
    """Whether each was measured as long three times or more, and all of one's values are better than all of the
    other's: of two times each that happens by chance once in three."""
    if min(len(one.scores), len(other.scores)) < _TURNS_TO_TELL:
        return False
    (low, high) = one.spread
    (others_low, others_high) = other.spread
    return low > others_high or high < others_low
