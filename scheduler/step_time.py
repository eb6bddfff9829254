"""What a step costs in seconds, learnt from steps that were timed.

Knows counts and seconds; nothing of the model or the machine. The same observations give the same numbers.
"""

import math
from typing import NamedTuple

_LEARNING = 0.25
_SURPRISE = math.log(2)
"""A step counts as twice or half of what was expected at most: the machine may have hiccuped."""

_GAINS = (1.0, 1.0, 1.0, 1.0, 1.0)
_GAINS_BESIDE = (0.1, 0.1, 0.1, 1.0, 1.0)
"""What decoding costs is learnt from steps that do nothing else; others tell what prompts add to it."""


class StepWork(NamedTuple):
    """What a step computes: tokens of decoding rows, and tokens of prompts, with the tokens that they attend to, summed
    over the tokens of each kind."""

    decode_tokens: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    prefill_context: int = 0


class StepTimeModel:
    """A sum over a step's work: each part has a positive coefficient, and there is one for what any step takes.

    The logarithms of the coefficients are projected onto what the newest step took (Kaczmarz' method, damped). So no
    unit and no scale needs to be known, and each coefficient moves by as much as it had a part in the step.
    """

    __slots__ = ("_coefficients", "calibrated")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.calibrated = False
        # Of a model of half a billion parameters on two cores. The first step that is timed scales them all.
        self._coefficients = [1.0, 0.02, 2e-5, 0.05, 1e-5]

    def step_seconds(self, work: StepWork) -> float:
        """Seconds such a step takes, as far as is known."""
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
        """Such a step took so long."""
        parts = self._parts(work)
        expected = sum(parts)
        if not self.calibrated:
            self.calibrated = True
            self._coefficients = [value * seconds / expected for value in self._coefficients]
            return
        surprise = min(max(math.log(seconds / expected), -_SURPRISE), _SURPRISE)
        shares = [part / expected for part in parts]
        gains = _GAINS_BESIDE if work.prefill_tokens else _GAINS
        step = _LEARNING * surprise / sum(gain * share * share for gain, share in zip(gains, shares, strict=True))
        moved = zip(self._coefficients, gains, shares, strict=True)
        self._coefficients = [value * math.exp(step * gain * share) for value, gain, share in moved]

    def _parts(self, work: StepWork) -> list[float]:
        return [value * count for value, count in zip(self._coefficients, (1, *work), strict=True)]
