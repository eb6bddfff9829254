"""How much prompt work a step may take on, so that rows that wait for its end do not wait long.

Short prompts and long ones have lanes of their own. Knows tokens, and the seconds that steps took; no rows, no blocks,
no model, no machine and no clock. The same observations give the same numbers.
"""

import math
from math import inf
from typing import NamedTuple

LONG_PROMPT_SLOWDOWN = 1.6
"""For the sake of long prompts a step may take so many times as long as without them."""

LONG_PROMPT_SECONDS = 0.5
"""A prompt that takes longer to compute is a long one."""

SHORT_PROMPT_STEP_SECONDS = 0.25
"""For the sake of short prompts a step may take so long."""

IDLE_STEP_SECONDS = 0.125
"""A step in which no row decodes may take so long: a request that arrives meanwhile waits for its end."""

MIN_CHUNK_TOKENS = 4
"""Tokens that a lane's first prompt gets in a step whatever they cost: every prompt gets on."""

PROBE_STEPS = 32
"""After so many steps that computed prompts beside decoding rows, one only decodes: its time tells the costs of the two
apart."""

_OBSERVATIONS = 32
"""Steps from which costs are learnt together: one by one they would each take several times as long, see
`bench.step_overhead`."""

_LEARNING_RATE = 0.25
_MAX_SURPRISE = math.log(2)
"""A step counts as twice or half of the expected time at most: the machine may have hiccuped."""

_GAINS = (1.0, 1.0, 1.0, 1.0, 1.0)
_GAINS_BESIDE_PROMPTS = (0.1, 0.1, 0.1, 1.0, 1.0)
"""The cost of decoding is learnt from steps that do nothing else; others tell what prompts add to it."""

_MANY_TOKENS = 1 << 31


class StepWork(NamedTuple):
    """A step's tokens of decoding rows and of prompts, each with the tokens attended to, summed over its tokens."""

    decode_tokens: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    prefill_context: int = 0


class StepTimeModel:
    """Seconds of a step as a sum over its work: a constant and four terms, each with a positive coefficient.

    The logarithms of the coefficients are projected onto the time of the newest step (Kaczmarz' method, damped): no
    unit and no scale needs to be known, and each coefficient moves by as much as it had a part in the step.
    """

    def __init__(self) -> None:
        self.calibrated = False
        # Of a model of half a billion parameters on two cores. The first step that is timed scales them all.
        self._coefficients = [1.0, 0.02, 2e-5, 0.05, 1e-5]

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
        if not self.calibrated:
            self.calibrated = True
            self._coefficients = [value * seconds / expected for value in self._coefficients]
            return
        surprise = min(max(math.log(seconds / expected), -_MAX_SURPRISE), _MAX_SURPRISE)
        shares = [part / expected for part in parts]
        gains = _GAINS_BESIDE_PROMPTS if work.prefill_tokens else _GAINS
        norm = sum(gain * share * share for gain, share in zip(gains, shares, strict=True))
        step = _LEARNING_RATE * surprise / norm
        moved = zip(self._coefficients, gains, shares, strict=True)
        self._coefficients = [value * math.exp(step * gain * share) for value, gain, share in moved]

    def _parts(self, work: StepWork) -> list[float]:
        return [value * count for value, count in zip(self._coefficients, (1, *work), strict=True)]


class PrefillLane:
    """One step's allowance for prompts of one kind: `tokens`, and of them as many as `seconds` suffice for."""

    def __init__(self, cost: StepTimeModel, tokens: int, seconds: float) -> None:
        self._cost = cost
        self.tokens = tokens
        self._seconds = seconds
        self._used = False

    @property
    def has_room(self) -> bool:
        """Whether there is room for a chunk worth the name."""
        return self.tokens > 0 and (not self._used or self._affordable(0) >= MIN_CHUNK_TOKENS)

    def grant_tokens(self, missing: int, context: int, most: int) -> int:
        """Take tokens, from 1 to `most`, for a prompt that lacks `missing` after `context`. There must be room."""
        affordable = max(self._affordable(context), 1 if self._used else MIN_CHUNK_TOKENS)
        tokens = min(missing, most, self.tokens, affordable)
        self._used = True
        self.tokens -= tokens
        self._seconds -= self._cost.prompt_seconds(tokens, context) if self._seconds < inf else 0.0
        return tokens

    def _affordable(self, context: int) -> int:
        return _MANY_TOKENS if self._seconds == inf else self._cost.prompt_tokens_within(self._seconds, context)


class PrefillBudget:
    """Lanes for each step. `target_ms`: how long prompts may make a step, long or short; 0 bounds nothing, None goes by
    what the step costs without them. Nothing is bounded, and no prompt long, until a step was timed."""

    def __init__(self, target_ms: float | None) -> None:
        self._target = None if target_ms is None else target_ms / 1e3
        self._steps_beside_prompts = 0
        self._model = StepTimeModel()
        self._observed: list[tuple[StepWork, float]] = []

    @property
    def time_model(self) -> StepTimeModel:
        """The model with all observations learnt."""
        for work, seconds in self._observed:
            self._model.observe(work, seconds)
        self._observed.clear()
        return self._model

    @property
    def _bounded(self) -> bool:
        return self.time_model.calibrated and self._target != 0

    def is_long_prompt(self, tokens: int, context: int) -> bool:
        """Whether a prompt that lacks `tokens` after `context` goes in the lane of long ones."""
        slow = self._bounded and self._target is None
        return slow and self.time_model.prompt_seconds(tokens, context) > LONG_PROMPT_SECONDS

    def is_decode_probe(self, decoding: StepWork) -> bool:
        """Whether this step is to tell what `decoding` alone costs."""
        return bool(decoding.decode_tokens) and self._bounded and self._steps_beside_prompts >= PROBE_STEPS

    def short_prompt_lane(self, decoding: StepWork, tokens: int) -> PrefillLane:
        """The lane for a step of these decoding rows, with `tokens` of its budget left."""
        seconds = inf
        if self._bounded:
            alone = self.time_model.step_seconds(decoding)
            seconds = (self._target or SHORT_PROMPT_STEP_SECONDS) - alone
            if self._target is None and decoding.decode_tokens:
                seconds = max(seconds, (LONG_PROMPT_SLOWDOWN - 1) * alone)
        return PrefillLane(self.time_model, tokens, seconds)

    def long_prompt_lane(self, decoding: StepWork, short: StepWork, tokens: int) -> PrefillLane:
        """The lane for the same step, in which short prompts take what `short` says."""
        seconds = inf
        if self._bounded:
            others = decoding if decoding.decode_tokens else short
            alone, idle = self.time_model.step_seconds(others), not (others.decode_tokens or others.prefill_tokens)
            seconds = IDLE_STEP_SECONDS - alone if idle else (LONG_PROMPT_SLOWDOWN - 1) * alone
        return PrefillLane(self.time_model, tokens, seconds)

    def note_launched(self, work: StepWork) -> None:
        self._steps_beside_prompts = self._steps_beside_prompts + 1 if work.decode_tokens and work.prefill_tokens else 0

    def observe_step(self, work: StepWork, seconds: float) -> None:
        self._observed.append((work, seconds))
        if len(self._observed) == _OBSERVATIONS:
            _ = self.time_model
