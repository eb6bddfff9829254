"""How long steps take: a model that is learnt from the times of those that were computed.

Knows tokens and seconds; no rows, no machine and no clock. The same observations give the same numbers.
"""

import math
from collections import deque
from math import inf

from ..plan import StepWork

_OBSERVATIONS = 32
"""Steps from which costs are learnt together: one by one they would each take several times as long, see
`bench.step_overhead`."""

_REPEATS = 40
"""A step of a GPU that decodes reads all weights, beside which a token of a prompt costs a hundredth of what the
first coefficients say: after so many rounds over the same steps they are what they tell."""

_LEARNING_RATE = 0.25
_FIRST_COEFFICIENTS = 1.0, 0.02, 2e-5, 0.05, 1e-5
"""In proportion those of a model of half a billion parameters on two cores."""

_MAX_SURPRISE = math.log(2)
"""A step counts as twice or half of the expected time at most: the machine may have hiccuped."""

_GAINS = (1.0, 1.0, 1.0, 1.0, 1.0)
_GAINS_BESIDE_PROMPTS = (0.1, 0.1, 0.1, 1.0, 1.0)
"""The cost of decoding is learnt from steps that do nothing else; others tell what prompts add to it."""


class StepTimeModel:
    """Seconds of a step as a sum over its work: a constant and four terms, each with a positive coefficient.

    Logarithms of coefficients are projected onto the time of the newest step (Kaczmarz' method, damped): no unit and no
    scale needs to be known, and a coefficient moves by as much as it had a part in the step.
    """

    def __init__(self, work: StepWork, seconds: float) -> None:
        """The first step that was timed, which scales all coefficients."""
        self._coefficients = [*_FIRST_COEFFICIENTS]
        expected = self.step_seconds(work)
        self._coefficients = [value * seconds / expected for value in self._coefficients]

    def step_seconds(self, work: StepWork) -> float:
        return sum(self._parts(work))

    def prompt_seconds(self, tokens: int, context: int) -> float:
        """Seconds that `tokens` of a prompt add to a step, the first of them preceded by `context`."""
        _, _, _, token, attended = self._coefficients
        return tokens * (token + attended * (context + tokens / 2))

    def prompt_tokens_within(self, seconds: float, context: int) -> int:
        """The most tokens of a prompt that add no more than `seconds` to a step."""
        if seconds <= 0:
            return 0
        _, _, _, token, attended = self._coefficients
        linear = token + attended * context
        # The root of attended / 2 * n^2 + linear * n = seconds, in the form that does not cancel.
        return int(2 * seconds / (linear + math.sqrt(linear * linear + 2 * attended * seconds)))

    def observe(self, work: StepWork, seconds: float) -> None:
        parts = self._parts(work)
        expected = sum(parts)
        surprise = min(max(math.log(seconds / expected), -_MAX_SURPRISE), _MAX_SURPRISE)
        shares = [part / expected for part in parts]
        gains = _GAINS_BESIDE_PROMPTS if work.prefill_tokens else _GAINS
        norm = sum(gain * share * share for gain, share in zip(gains, shares, strict=True))
        step = _LEARNING_RATE * surprise / norm
        moved = zip(self._coefficients, gains, shares, strict=True)
        self._coefficients = [value * math.exp(step * gain * share) for value, gain, share in moved]

    def _parts(self, work: StepWork) -> list[float]:
        return [value * count for value, count in zip(self._coefficients, (1, *work), strict=True)]


class TimedSteps:
    """The times of one scheduler's steps, and what is learnt of them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget them: they say nothing of those to come."""
        self._model: StepTimeModel | None = None
        self._observed: list[tuple[StepWork, float]] = []
        self._learnt: deque[tuple[StepWork, float]] = deque(maxlen=_OBSERVATIONS)

    @property
    def model(self) -> StepTimeModel | None:
        """The model with all observations learnt; None before any step was timed."""
        if self._observed:
            for work, seconds in self._observed:
                if self._model is None:
                    self._model = StepTimeModel(work, seconds)
                else:
                    self._model.observe(work, seconds)
            self._learnt += self._observed
            self._observed.clear()
        return self._model

    def observe(self, work: StepWork, seconds: float) -> None:
        self._observed.append((work, seconds))
        if len(self._observed) == _OBSERVATIONS:
            _ = self.model

    def repeat_observations(self) -> None:
        """Learn from the last observations until the model agrees with them: at the start there are few."""
        if (model := self.model) is not None:
            for work, seconds in [*self._learnt] * _REPEATS:
                model.observe(work, seconds)

    def prompt_seconds(self, tokens: int, context: int) -> float:
        """Seconds that `tokens` of a prompt take to compute after `context`; `inf` before any step was timed."""
        model = self.model
        return inf if model is None else model.prompt_seconds(tokens, context)
