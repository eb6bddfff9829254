"""How much prompt work a step may take on, so that nobody who waits for its end waits long.

Short prompts and long ones go in lanes of their own. Knows what steps cost, tokens and seconds; no rows, no blocks and
no clock.
"""

from math import inf

from .step_time import StepTimeModel, StepWork

LONG_PROMPT_SLOWDOWN = 1.6
"""For the sake of long prompts a step may take so many times what it would without them."""

LONG_PROMPT_SECONDS = 0.5
"""A prompt that takes longer to compute is a long one."""

SHORT_PROMPT_STEP_SECONDS = 0.25
"""For the sake of short prompts a step may take so long."""

IDLE_STEP_SECONDS = 0.125
"""A step in which nobody waits for a token may take so long: whoever arrives meanwhile waits for its end."""

MIN_CHUNK_TOKENS = 4
"""Tokens that a lane's first prompt gets in a step whatever they cost: every prompt gets on."""

PROBE_STEPS = 32
"""After so many steps that computed prompts beside decoding rows, one only decodes: what it takes tells the costs of
the two apart."""

_LESSONS = 32
"""Steps from which costs are learnt together: one by one they would each take several times as long, see
`bench.turns`."""

_MANY = 1 << 31


class PrefillLane:
    """What prompts of one kind may take of one step: so many tokens, and of them what `seconds` suffice for."""

    def __init__(self, cost: StepTimeModel, tokens: int, seconds: float) -> None:
        self._cost = cost
        self._tokens = tokens
        self._seconds = seconds
        self._entered = False

    @property
    def has_room(self) -> bool:
        """There is room for a chunk worth the name."""
        return self._tokens > 0 and (not self._entered or self._worth(0) >= MIN_CHUNK_TOKENS)

    def grant_tokens(self, gap: int, context: int, most: int) -> int:
        """Tokens, from 1 to `most`, of a prompt that lacks `gap` after `context`: they are taken. It must be open."""
        tokens = min(gap, most, self._room(context))
        self._entered = True
        self._tokens -= tokens
        self._seconds -= self._cost.prompt_seconds(tokens, context) if self._seconds < inf else 0.0
        return tokens

    def set_tokens_left(self, tokens: int) -> None:
        """So many tokens of the step's budget are left, and nobody else wants them."""
        self._tokens = tokens

    def _room(self, context: int) -> int:
        """Tokens after `context` that there is room for, at least one."""
        return min(self._tokens, max(self._worth(context), 1 if self._entered else MIN_CHUNK_TOKENS))

    def _worth(self, context: int) -> int:
        return _MANY if self._seconds == inf else self._cost.prompt_tokens_within(self._seconds, context)


class PrefillBudget:
    """`target`: seconds a step may take on account of prompts, long or short; 0 bounds nothing, None goes by what the
    step costs without them. Nothing is bounded, and no prompt long, until a step was timed."""

    def __init__(self, target: float | None) -> None:
        self._target = target
        self._beside = 0
        self._cost = StepTimeModel()
        self._observed: list[tuple[StepWork, float]] = []

    @property
    def time_model(self) -> StepTimeModel:
        """As far as steps were observed."""
        self._learn()
        return self._cost

    def _learn(self) -> None:
        for work, seconds in self._observed:
            self._cost.observe(work, seconds)
        self._observed.clear()

    @property
    def _bounds(self) -> bool:
        return self.time_model.calibrated and self._target != 0

    def is_long_prompt(self, tokens: int, context: int) -> bool:
        """Whether a prompt that lacks `tokens` after `context` goes in the lane of long ones."""
        return (
            self._bounds
            and self._target is None
            and self.time_model.prompt_seconds(tokens, context) > LONG_PROMPT_SECONDS
        )

    def is_decode_probe(self, decoding: StepWork) -> bool:
        """Whether this step is to tell what `decoding` alone costs."""
        return bool(decoding.decode_tokens) and self._bounds and self._beside >= PROBE_STEPS

    def short_prompt_lane(self, decoding: StepWork, tokens: int) -> PrefillLane:
        """For a step of these decoding rows, with `tokens` of its budget left."""
        seconds = inf
        if self._bounds:
            alone = self.time_model.step_seconds(decoding)
            seconds = (self._target or SHORT_PROMPT_STEP_SECONDS) - alone
            if self._target is None and decoding.decode_tokens:
                seconds = max(seconds, (LONG_PROMPT_SLOWDOWN - 1) * alone)
        return PrefillLane(self.time_model, tokens, seconds)

    def long_prompt_lane(self, decoding: StepWork, short: StepWork, tokens: int) -> PrefillLane:
        """For the same step, in which short prompts take what `short` says."""
        seconds = inf
        if self._bounds:
            waiting = decoding if decoding.decode_tokens else short
            alone = self.time_model.step_seconds(waiting)
            seconds = (
                IDLE_STEP_SECONDS - alone
                if not (waiting.decode_tokens or waiting.prefill_tokens)
                else (LONG_PROMPT_SLOWDOWN - 1) * alone
            )
        return PrefillLane(self.time_model, tokens, seconds)

    def note_launched(self, work: StepWork) -> None:
        """A step is on its way."""
        self._beside = self._beside + 1 if work.decode_tokens and work.prefill_tokens else 0

    def observe_step(self, work: StepWork, seconds: float) -> None:
        """It took so long."""
        self._observed.append((work, seconds))
        if len(self._observed) == _LESSONS:
            self._learn()
