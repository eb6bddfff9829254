"""How much prompt work a step may take on: prompts that wait, and rows that wait for the step's end.

Short prompts and long ones have lanes of their own. Knows tokens, and the seconds that steps took; no rows, no blocks,
no model, no machine and no clock. The same observations give the same numbers.
"""

import math
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from .config import SchedulerConfig

CALM_SLOWDOWN, LEAST_SLOWDOWN = 2.25, 1.6
"""While no prompt is late, prompts may make a step so many times as long as it is without them: the first factor holds
up to CALM_STREAMS decoding rows for each prompt that waits; with more rows it falls, down to the second."""

CALM_STREAMS = 8

PATIENT_SLOWDOWN = 1.35
"""While rows decode, prompts that may be late make a step so many times as long, and so does the time that it leaves to
what only computes between steps."""

LONG_PROMPT_SECONDS = 0.6
"""A prompt that takes longer to compute is a long one."""

PATIENT_PART = 0.15
"""After a step, what only computes between steps has at least such a part of its time."""

SHORT_PROMPT_STEP_SECONDS = 0.18
"""Short prompts may make a step so long."""

LONGEST_STEP_SECONDS, LONGEST_SLOWDOWN = 0.25, 4.0
"""Prompts that would be late may make a step so long, or so many times as long as without them; any prompt may where no
row decodes, or none that waits for its tokens."""

IDLE_STEP_SECONDS = 0.125
"""A step in which nothing but a long prompt is computed may take so long: a request that arrives meanwhile waits for
its end."""

PATIENCE_SECONDS, PATIENCE_SLOWDOWN = 5.0, 3.0
"""Without a target a prompt is late after so many seconds, and so many times its own computation."""

TARGET_PART = 0.93
"""A target is aimed at with so much of its time: some steps only decode, and times are not known exactly."""

LINE_LENGTH = 32
"""So many prompts are looked at to see whether they are in time."""

MIN_CHUNK_TOKENS = 4
"""Tokens that a lane's first prompt gets in a step whatever they cost: every prompt gets on."""

PROBE_STEPS = 32
"""After so many steps that computed prompts beside decoding rows, one only decodes: its time tells the costs of the two
apart."""

_OBSERVATIONS = 32
"""Steps from which costs are learnt together: one by one they would each take several times as long, see
`bench.step_overhead`."""

_REPEATS = 40
"""A step of a GPU that decodes reads all weights, beside which a token of a prompt costs a hundredth of what the
first coefficients say: after so many rounds over the same steps they are what they tell."""

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

    Logarithms of coefficients are projected onto the time of the newest step (Kaczmarz' method, damped): no unit and no
    scale needs to be known, and a coefficient moves by as much as it had a part in the step.
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


class WaitingPrompt(NamedTuple):
    """A prompt without a first token yet: it lacks `tokens` after `context`, and has waited `seconds`. `target`: the
    seconds to its first token that are wanted; None leaves that to the balance. `calm`: it may be late."""

    tokens: int
    context: int
    seconds: float
    target: float | None = None
    calm: bool = False


class StepDemand(NamedTuple):
    """What is weighed in a step: its `decoding` rows, and the first prompts of the `line`, at most LINE_LENGTH of them.
    `itl_target`: seconds that the step may take at most, by the targets of decoding rows; `balanced`: some of them have
    none. `mixed`: there are long prompts, and the short ones leave them their part."""

    decoding: StepWork
    line: Sequence[WaitingPrompt] = ()
    itl_target: float = inf
    balanced: bool = True
    mixed: bool = False


class StepPace(NamedTuple):
    """The lanes of one step: seconds that `long` prompts may add to it, and that `all` may."""

    model: StepTimeModel
    demand: StepDemand
    long: float = inf
    all: float = inf

    def short_prompt_lane(self, tokens: int) -> PrefillLane:
        """The lane of short prompts, with so many tokens at first."""
        return PrefillLane(self.model, tokens, self.all - self.long / 2 if self.demand.mixed else self.all)

    def long_prompt_lane(self, work: StepWork, tokens: int) -> PrefillLane:
        """The lane of long prompts, where decoding rows and short prompts are this `work`."""
        used = self.model.step_seconds(work) - self.model.step_seconds(self.demand.decoding)
        return PrefillLane(self.model, tokens, min(self.long, self.all - used))


class PrefillBudget:
    """Lanes for each step. Until a step was timed, or with a `target_itl_ms` of 0, nothing is bounded and no prompt
    long.

    A target of the decoding rows is a bound, all of it for prompts. Without one the step goes by the line: some times
    what it takes without prompts, more as prompts would be late, to LONGEST_STEP_SECONDS.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._unbounded = config.target_itl_ms == 0
        self._steps_beside_prompts = 0
        self._model = StepTimeModel()
        self._observed: list[tuple[StepWork, float]] = []
        self._learnt: deque[tuple[StepWork, float]] = deque(maxlen=_OBSERVATIONS)

    @property
    def time_model(self) -> StepTimeModel:
        """The model with all observations learnt."""
        if self._observed:
            for work, seconds in self._observed:
                self._model.observe(work, seconds)
            self._learnt += self._observed
            self._observed.clear()
        return self._model

    def repeat_observations(self) -> None:
        """Learn from the last observations until the model agrees with them: at the start there are few."""
        model = self.time_model
        for work, seconds in [*self._learnt] * _REPEATS:
            model.observe(work, seconds)

    @property
    def bounded(self) -> bool:
        return not self._unbounded and self.time_model.calibrated

    def is_long_prompt(self, tokens: int, context: int, calm: bool = False) -> bool:
        """Whether a prompt that lacks `tokens` after `context` goes in the lane of long ones, as all `calm` ones do."""
        return self.bounded and (calm or self.time_model.prompt_seconds(tokens, context) > LONG_PROMPT_SECONDS)

    def is_decode_probe(self, decoding: StepWork) -> bool:
        """Whether this step is to tell what `decoding` alone costs."""
        return bool(decoding.decode_tokens) and self.bounded and self._steps_beside_prompts >= PROBE_STEPS

    def pace(self, demand: StepDemand) -> StepPace:
        model = self.time_model
        if not self.bounded:
            return StepPace(model, demand._replace(mixed=False))
        alone = model.step_seconds(demand.decoding)
        longest = max(LONGEST_STEP_SECONDS, LONGEST_SLOWDOWN * alone)
        if not demand.decoding.decode_tokens:
            newcomer = max(IDLE_STEP_SECONDS, LONGEST_SLOWDOWN * alone)
            return StepPace(model, demand, (longest if len(demand.line) > 1 else newcomer) - alone, longest - alone)
        bound = (demand.itl_target if demand.itl_target < inf else longest) - alone
        if not demand.balanced:
            return StepPace(model, demand, bound, bound)
        line = [prompt for prompt in demand.line if not prompt.calm]
        waiting = len(line) if demand.line else 1
        part = min(CALM_STREAMS * waiting / demand.decoding.decode_tokens, 1.0)
        calm = max((CALM_SLOWDOWN - 1) * part, (LEAST_SLOWDOWN if waiting else PATIENT_SLOWDOWN) - 1) * alone
        crowded = len(line) > demand.decoding.decode_tokens
        share = 1.0 if crowded else self._needed_share(line)
        needed = alone * share / (1 - share) if share < 1 else inf
        long = min(max(calm, min(needed, longest - alone)), bound)
        return StepPace(model, demand, long, min(max(long, SHORT_PROMPT_STEP_SECONDS - alone), bound))

    def _needed_share(self, line: Sequence[WaitingPrompt]) -> float:
        """The share of all time that prompts need, so that none of the line is late; 1 where one will be anyway."""
        if len(line) < 2 and all(prompt.target is None for prompt in line):
            return 0.0  # nothing waits for it
        model, due = self.time_model, list[tuple[float, float]]()
        for tokens, context, waited, target, _ in line:
            patience = PATIENCE_SECONDS + PATIENCE_SLOWDOWN * model.prompt_seconds(context + tokens, 0)
            wanted = patience if target is None else TARGET_PART * target
            due.append((wanted - waited, model.prompt_seconds(tokens, context)))
        work = share = 0.0
        for left, seconds in sorted(due):
            work += seconds
            share = max(share, work / left if left > work else 1.0)
        return share

    def patient_seconds(self, work: StepWork, itl_target: float = inf) -> float:
        """Seconds before a step of this `work` in which what only computes between steps has the processors: with them
        it takes as long as with prompts that are in time, or a little longer than by itself."""
        model = self.time_model
        if not model.calibrated:
            return 0.0
        seconds = model.step_seconds(work)
        alone = model.step_seconds(work._replace(prefill_tokens=0, prefill_context=0)) if work.decode_tokens else 0.0
        free = min(PATIENT_SLOWDOWN * alone, itl_target) - seconds
        return min(max(free, PATIENT_PART * seconds), LONGEST_STEP_SECONDS)

    def note_launched(self, work: StepWork) -> None:
        self._steps_beside_prompts = self._steps_beside_prompts + 1 if work.decode_tokens and work.prefill_tokens else 0

    def observe_step(self, work: StepWork, seconds: float) -> None:
        self._observed.append((work, seconds))
        if len(self._observed) == _OBSERVATIONS:
            _ = self.time_model
