"""How much prompt work a step may take on: prompts that wait, and rows that wait for the step's end.

Short prompts and long ones have lanes of their own. Knows tokens, and the seconds that steps took; no rows, no blocks,
no model, no machine and no clock.
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from .config import SchedulerConfig
from .pace.step_times import StepTimeModel, TimedSteps
from .plan import StepWork

CALM_SLOWDOWN, LEAST_SLOWDOWN = 2.25, 1.6
"""While no prompt is late, prompts may make a step so many times as long as it is without them: the first factor holds
up to CALM_STREAMS decoding rows for each prompt that waits; with more rows it falls, down to the second."""

CALM_STREAMS = 8

PATIENT_SLOWDOWN = 1.25
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

_MANY_TOKENS = 1 << 31


class PrefillLane:
    """One step's allowance for prompts of one kind: `tokens`, and of them as many as `seconds` suffice for. They are
    infinite where no `cost` is known."""

    def __init__(self, cost: StepTimeModel | None, tokens: int, seconds: float) -> None:
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
        if self._cost is not None:
            self._seconds -= self._cost.prompt_seconds(tokens, context)
        return tokens

    def _affordable(self, context: int) -> int:
        if self._cost is None or self._seconds == inf:
            return _MANY_TOKENS
        return self._cost.prompt_tokens_within(self._seconds, context)


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
    """The lanes of one step: seconds that `long` prompts may add to it, and that `all` may. `withheld`: there is no
    lane of long ones."""

    model: StepTimeModel | None
    demand: StepDemand
    long: float = inf
    all: float = inf
    withheld: bool = False

    def short_prompt_lane(self, tokens: int) -> PrefillLane:
        """The lane of short prompts, with so many tokens at first."""
        return PrefillLane(self.model, tokens, self.all - self.long / 2 if self.demand.mixed else self.all)

    def long_prompt_lane(self, work: StepWork, tokens: int) -> PrefillLane:
        """The lane of long prompts, where decoding rows and short prompts are this `work`."""
        assert self.model is not None, "no prompt is long before a step was timed"
        used = self.model.step_seconds(work) - self.model.step_seconds(self.demand.decoding)
        return PrefillLane(self.model, 0 if self.withheld else tokens, min(self.long, self.all - used))


class PrefillBudget:
    """Lanes for each step. Until a step was timed, or with a `target_itl_ms` of 0, nothing is bounded and no prompt
    long.

    A target of the decoding rows is a bound, all of it for prompts. Without one the step goes by the line: some times
    what it takes without prompts, more as prompts would be late, to LONGEST_STEP_SECONDS.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._unbounded = config.target_itl_ms == 0
        self._steps_beside_prompts = 0
        self._turns = False
        """Whether no prompt waits but calm ones: a step has a piece of them, or the pause of `patient_seconds`."""
        self._pause_is_due = False
        self.times = TimedSteps()

    @property
    def bound(self) -> StepTimeModel | None:
        """The model by which prompts are bounded; None: they are not."""
        return None if self._unbounded else self.times.model

    def is_long_prompt(self, tokens: int, context: int, calm: bool = False) -> bool:
        """Whether a prompt that lacks `tokens` after `context` goes in the lane of long ones, as all `calm` ones do."""
        model = self.bound
        return model is not None and (calm or model.prompt_seconds(tokens, context) > LONG_PROMPT_SECONDS)

    def is_decode_probe(self, decoding: StepWork) -> bool:
        """Whether this step is to tell what `decoding` alone costs."""
        due = self._steps_beside_prompts >= PROBE_STEPS and decoding.decode_tokens > 0
        return due and self.bound is not None

    def pace(self, demand: StepDemand) -> StepPace:
        model = self.bound
        line = [prompt for prompt in demand.line if not prompt.calm]
        decodes = demand.decoding.decode_tokens > 0
        self._turns = model is not None and decodes and demand.balanced and bool(demand.line) and not line
        if model is None:
            return StepPace(None, demand._replace(mixed=False))
        alone = model.step_seconds(demand.decoding)
        longest = max(LONGEST_STEP_SECONDS, LONGEST_SLOWDOWN * alone)
        if not decodes:
            newcomer = max(IDLE_STEP_SECONDS, LONGEST_SLOWDOWN * alone)
            return StepPace(model, demand, (longest if len(demand.line) > 1 else newcomer) - alone, longest - alone)
        bound = (demand.itl_target if demand.itl_target < inf else longest) - alone
        if not demand.balanced:
            return StepPace(model, demand, bound, bound)
        waiting = len(line) if demand.line else 1
        if self._turns and self._pause_is_due:
            self._pause_is_due = False
            return StepPace(model, demand, 0.0, min(SHORT_PROMPT_STEP_SECONDS - alone, bound), withheld=True)
        part = min(CALM_STREAMS * waiting / demand.decoding.decode_tokens, 1.0)
        calm = max((CALM_SLOWDOWN - 1) * part, (LEAST_SLOWDOWN if waiting else PATIENT_SLOWDOWN) - 1) * alone
        crowded = len(line) > demand.decoding.decode_tokens
        share = 1.0 if crowded else _needed_share(model, line)
        needed = alone * share / (1 - share) if share < 1 else inf
        long = min(max(calm, min(needed, longest - alone)), bound)
        return StepPace(model, demand, long, min(max(long, SHORT_PROMPT_STEP_SECONDS - alone), bound))

    def patient_seconds(self, work: StepWork, itl_target: float = inf) -> float:
        """Seconds before a step of this `work` in which what only computes between steps has the processors: with them
        it takes as long as with prompts that are in time, or a little longer than by itself. A piece of a calm prompt
        leaves the pause to the next step."""
        model = self.times.model
        if model is None:
            return 0.0
        self._pause_is_due = self._turns and work.prefill_tokens > 0
        if self._pause_is_due:
            return 0.0
        seconds = model.step_seconds(work)
        alone = model.step_seconds(work._replace(prefill_tokens=0, prefill_context=0)) if work.decode_tokens else 0.0
        free = min(PATIENT_SLOWDOWN * alone, itl_target) - seconds
        return min(max(free, PATIENT_PART * seconds), LONGEST_STEP_SECONDS)

    def note_launched(self, work: StepWork) -> None:
        self._steps_beside_prompts = self._steps_beside_prompts + 1 if work.decode_tokens and work.prefill_tokens else 0


def _needed_share(model: StepTimeModel, line: Sequence[WaitingPrompt]) -> float:
    """The share of all time that prompts need, so that none of the line is late; 1 where one will be anyway."""
    if len(line) < 2 and all(prompt.target is None for prompt in line):
        return 0.0  # nothing waits for it
    due = list[tuple[float, float]]()
    for tokens, context, waited, target, _ in line:
        patience = PATIENCE_SECONDS + PATIENCE_SLOWDOWN * model.prompt_seconds(context + tokens, 0)
        wanted = patience if target is None else TARGET_PART * target
        due.append((wanted - waited, model.prompt_seconds(tokens, context)))
    work = share = 0.0
    for left, seconds in sorted(due):
        work += seconds
        share = max(share, work / left if left > work else 1.0)
    return share
