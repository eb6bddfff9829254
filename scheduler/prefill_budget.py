"""How much prompt work a step may take on, so that nobody who waits for its end waits long.

Short prompts and long ones go in lanes of their own. Knows what steps cost, tokens and seconds; no rows, no blocks and
no clock.
"""

from math import inf

from .step_time import StepCost, Work

PATIENCE = 1.6
"""For the sake of long prompts a step may take so many times what it would without them."""

LONG_SECONDS = 0.5
"""A prompt that takes longer to compute is a long one."""

RESPONSE_SECONDS = 0.25
"""For the sake of short prompts a step may take so long."""

ARRIVAL_SECONDS = 0.125
"""A step in which nobody waits for a token may take so long: whoever arrives meanwhile waits for its end."""

LEAST_CHUNK = 4
"""Tokens that a lane's first prompt gets in a step whatever they cost: every prompt gets on."""

PROBE_STEPS = 32
"""After so many steps that computed prompts beside decoding rows, one only decodes: what it takes tells the costs of
the two apart."""

_LESSONS = 32
"""Steps from which costs are learnt together: one by one they would each take several times as long, see
`bench.turns`."""

_MANY = 1 << 31


class Lane:
    """What prompts of one kind may take of one step: so many tokens, and of them what `seconds` suffice for."""

    def __init__(self, cost: StepCost, tokens: int, seconds: float) -> None:
        self._cost = cost
        self._tokens = tokens
        self._seconds = seconds
        self._entered = False

    @property
    def open(self) -> bool:
        """There is room for a chunk worth the name."""
        return self._tokens > 0 and (not self._entered or self._worth(0) >= LEAST_CHUNK)

    def grant(self, gap: int, context: int, most: int) -> int:
        """Tokens, from 1 to `most`, of a prompt that lacks `gap` after `context`: they are taken. It must be open."""
        tokens = min(gap, most, self._room(context))
        self._entered = True
        self._tokens -= tokens
        self._seconds -= self._cost.of_prompt(tokens, context) if self._seconds < inf else 0.0
        return tokens

    def widen(self, tokens: int) -> None:
        """So many tokens of the step's budget are left, and nobody else wants them."""
        self._tokens = tokens

    def _room(self, context: int) -> int:
        """Tokens after `context` that there is room for, at least one."""
        return min(self._tokens, max(self._worth(context), 1 if self._entered else LEAST_CHUNK))

    def _worth(self, context: int) -> int:
        return _MANY if self._seconds == inf else self._cost.prompt_tokens(self._seconds, context)


class Pace:
    """`target`: seconds a step may take on account of prompts, long or short; 0 bounds nothing, None goes by what the
    step costs without them. Nothing is bounded, and no prompt long, until a step was timed."""

    def __init__(self, target: float | None) -> None:
        self._target = target
        self._beside = 0
        self._cost = StepCost()
        self._observed: list[tuple[Work, float]] = []

    @property
    def cost(self) -> StepCost:
        """As far as steps were observed."""
        self._learn()
        return self._cost

    def _learn(self) -> None:
        for work, seconds in self._observed:
            self._cost.observe(work, seconds)
        self._observed.clear()

    @property
    def _bounds(self) -> bool:
        return self.cost.known and self._target != 0

    def is_long(self, tokens: int, context: int) -> bool:
        """Whether a prompt that lacks `tokens` after `context` goes in the lane of long ones."""
        return self._bounds and self._target is None and self.cost.of_prompt(tokens, context) > LONG_SECONDS

    def probes(self, decoding: Work) -> bool:
        """Whether this step is to tell what `decoding` alone costs."""
        return bool(decoding.rows) and self._bounds and self._beside >= PROBE_STEPS

    def short_lane(self, decoding: Work, tokens: int) -> Lane:
        """For a step of these decoding rows, with `tokens` of its budget left."""
        seconds = inf
        if self._bounds:
            alone = self.cost.of(decoding)
            seconds = (self._target or RESPONSE_SECONDS) - alone
            if self._target is None and decoding.rows:
                seconds = max(seconds, (PATIENCE - 1) * alone)
        return Lane(self.cost, tokens, seconds)

    def long_lane(self, decoding: Work, short: Work, tokens: int) -> Lane:
        """For the same step, in which short prompts take what `short` says."""
        seconds = inf
        if self._bounds:
            waiting = decoding if decoding.rows else short
            alone = self.cost.of(waiting)
            seconds = ARRIVAL_SECONDS - alone if not (waiting.rows or waiting.tokens) else (PATIENCE - 1) * alone
        return Lane(self.cost, tokens, seconds)

    def launched(self, work: Work) -> None:
        """A step is on its way."""
        self._beside = self._beside + 1 if work.rows and work.tokens else 0

    def observe(self, work: Work, seconds: float) -> None:
        """It took so long."""
        self._observed.append((work, seconds))
        if len(self._observed) == _LESSONS:
            self._learn()
