"""What drafts cost and bring: the seconds of steps with drafts and without, and how many drafts are worth theirs.

Knows numbers of tokens and seconds; no sequences, no drafters and no clock.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import accumulate
from math import inf

HIGHEST_RATE = 0.98
"""The probability that a drafted token is right, at most."""

COST_WEIGHT = 0.1
"""Weight of the newest step in moving averages."""

PROBE_STEPS = 64
"""One step in so many has no drafts, sooner while few had as many sequences: others are measured by their time. What
was measured once is forgotten after so many steps."""

LEAST_GAIN, LEAST_GAIN_OF_MANY = 1.08, 1.16
"""Drafts are verified where that seems to bring so many times the tokens a second: estimates err. Of MANY_SEQUENCES
some are unlucky, and wait longer for the others' drafts."""

MANY_SEQUENCES = 8

BYSTANDER_SLOWDOWN = 1.05
"""A step that also computes sequences without drafts takes at most so many times as long with those of the others."""

TRIAL_SHARE = 0.006
"""The share of the time of all steps in which a draft model may propose what seems not worth it: to learn if it is. A
drafter may take as much beyond what its drafts save."""

FIRST_CREDIT, MOST_CREDIT = 10, 30
"""Steps that drafting, and drafts that were wrong, may cost at first, and that can be saved up."""

UNLEARNT_STEPS = 16
"""So many steps are learnt together, if none asks before: one by one they each take several times as long."""


class DecodeCosts:
    """Seconds of steps that only decode, by their number of tokens, as measured. Between measured numbers they are in
    proportion, and a little beyond as they grow at the end, so that larger steps are tried one after the other. No step
    takes longer than one of more tokens: what seems so was disturbed."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._seconds: dict[int, float] = {}
        self._least: list[float] | None = None  # of each size and those above it; made when it is asked for
        self._seen: dict[int, int] = {}
        self._forgotten_at: dict[int, int] = {}
        self._observed = 0

    def observe(self, tokens: int, seconds: float) -> None:
        """What was seen once may have been disturbed: the first times weigh more, none changes much, and what was
        seldom seen is soon forgotten, and tried again."""
        known, seen = self._seconds.get(tokens), self._seen.get(tokens, 0)
        if known is None:
            insort(self._sizes, tokens)
            self._seconds[tokens] = seconds
        else:
            most = 1 + 1 / min(seen, 4)
            weight = max(COST_WEIGHT, 1 / (seen + 1))
            self._seconds[tokens] += weight * (min(max(seconds, known / most), known * most) - known)
        self._observed += 1
        self._seen[tokens] = seen + 1
        self._forgotten_at[tokens] = self._observed + (PROBE_STEPS << 2 * min(seen, 3))
        if self._observed % PROBE_STEPS == 0:
            self._forget()
        self._least = None

    def _forget(self) -> None:
        for tokens in [size for size in self._sizes if self._forgotten_at[size] < self._observed]:
            self._sizes.remove(tokens)
            del self._seconds[tokens]

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, tokens: int) -> bool:
        return tokens in self._seconds

    def probe_interval(self, tokens: int) -> int:
        """The steps of which one is to have so many tokens: few while few steps had as many."""
        return min(PROBE_STEPS, 4 << min(self._seen.get(tokens, 0), 8))

    def seconds(self, tokens: int) -> float:
        """There must be some measured ones. Infinite where it is too many more than these had."""
        sizes, most = self._sizes, self._sizes[-1]
        if tokens > most:
            if tokens > most + max(most // 4, 1):
                return inf
            shorter = sizes[max(bisect_right(sizes, most * 4 // 5) - 1, 0)]
            grows = (self._seconds[most] - self._seconds[shorter]) / (most - shorter) if shorter < most else 0.0
            return self._seconds[most] + max(grows, 0.0) * (tokens - most)
        if self._least is None:
            self._least = [*accumulate(map(self._seconds.__getitem__, reversed(sizes)), min)][::-1]
        index = bisect_left(sizes, tokens)
        low, high = sizes[max(index - 1, 0)], sizes[index]
        above = self._least[index]
        below = min(self._seconds[low], above)
        return below + (tokens - low) / (high - low) * (above - below) if low < tokens < high else above

    def marginal_seconds(self, tokens: int) -> float:
        """How much longer than with one token fewer a step takes; nothing where neither was measured."""
        if tokens > self._sizes[-1]:
            return 0.0
        return self.seconds(tokens) - (self.seconds(tokens - 1) if tokens > 1 else 0.0)


class DraftCosts:
    """The measured costs of one scheduler's steps. `draft_model`: drafts come from one that the executor computes; its
    passes are costs of their own."""

    def __init__(self, draft_model: bool = False) -> None:
        self._draft_model = draft_model
        self.reset_step_times()
        self.reset_credit()

    def reset_step_times(self) -> None:
        self._steps = DecodeCosts()
        self._passes = DecodeCosts()  # of the draft model, by rows
        self._unlearnt: list[tuple[int, float]] = []
        self._asked = self._drafted_before = False
        self._drafting_seconds = 0.0  # to draft for a sequence
        self._host_seconds = 0.0  # between two steps of which neither had to do with drafts
        self._spent = 0.0  # seconds that drafters took since the last step
        self._trial_seconds = 0.0

    def reset_credit(self) -> None:
        self._credit: float | None = None  # seconds that drafts may cost, once a step was timed

    @property
    def known(self) -> bool:
        """Whether any step was measured."""
        return bool(self._steps)

    @property
    def overdrawn(self) -> bool:
        """Whether drafts have cost more than they saved, and their share of all steps."""
        return self._credit is not None and self._credit < 0

    @property
    def may_try(self) -> bool:
        """Whether there is time for a draft model to propose what seems not worth it."""
        return self._trial_seconds > 0

    def is_probe(self, decoding: int, number: int) -> bool:
        """Whether the step of this `number` has no drafts, so that it is known how long `decoding` tokens take: two in
        a row, of which `observe_step` learns."""
        if not self._steps:
            return False
        return decoding not in self._steps or number % self._steps.probe_interval(decoding) < 2

    def note_drafting(self, seconds: float, sequences: int) -> None:
        """Note how long drafting for so many sequences took."""
        self._asked, known = True, self._drafting_seconds
        self._drafting_seconds += COST_WEIGHT * (min(seconds / sequences, 2 * known or seconds) - known)
        self._spent += seconds

    def note_spent(self, seconds: float) -> None:
        """Drafters took so long for something else."""
        self._spent += seconds

    def note_trial(self, seconds: float) -> None:
        """A draft model took so long for what seemed not worth it."""
        self._trial_seconds -= seconds

    def observe_passes(self, rows: int, seconds: float) -> None:
        """A pass through the draft model took so long for so many rows."""
        self._passes.observe(rows, seconds)

    def worthwhile(
        self, rates: list[float], mosts: Sequence[int], decoding: int, turn: int, proposing: bool = False
    ) -> list[int]:
        """How many tokens of each guess to verify, `mosts` at most, that are right at these `rates`: those that bring
        the most tokens a second, by the time of steps and drafting; while `proposing` also of the draft model's passes
        to come. Sequences that get none are not to wait noticeably longer. Of equals others come first in each
        `turn`."""
        gains: list[tuple[float, int, int]] = []
        for index, (rate, most) in enumerate(zip(rates, mosts, strict=True)):
            order = (index + turn) % len(mosts)
            gains += [(min(rate, HIGHEST_RATE) ** (place + 1), order, index) for place in range(most)]
        gains.sort(reverse=True)
        alone = self._steps.seconds(decoding) + self._host_seconds
        shared = sum(map(bool, mosts)) < decoding
        least = LEAST_GAIN if len(mosts) < MANY_SEQUENCES else LEAST_GAIN_OF_MANY
        best = 0
        best_speed = least * decoding / alone
        gained = 0.0
        before = self._host_seconds + (0.0 if self._draft_model else len(mosts) * self._drafting_seconds)
        lengths, rows = [0] * len(mosts), [0] * max(mosts, default=0)
        for number, (gain, _, index) in enumerate(gains, 1):
            gained += gain
            if proposing and self._passes:  # one row more in the pass that proposes this place
                rows[lengths[index]] += 1
                before += self._passes.marginal_seconds(rows[lengths[index]])
            lengths[index] += 1
            seconds = self._steps.seconds(decoding + number) + before
            if shared and seconds > BYSTANDER_SLOWDOWN * alone:
                break
            if (decoding + gained) / seconds > best_speed:
                best, best_speed = number, (decoding + gained) / seconds
        lengths = [0] * len(mosts)
        for _, _, index in gains[:best]:
            lengths[index] += 1
        return lengths

    def observe_step(
        self, tokens: int, seconds: float, drafted: int = 0, accepted: int = 0, host_seconds: float = 0.0
    ) -> None:
        """A step that only decoded, `tokens` of them, took so long, without what a draft model took. Of `drafted` ones
        so many were right. `host_seconds`: from the end of the step before to its launch, if measured."""
        # The step for which a drafter was asked, and the one after drafts, are no measure of those without: they find
        # other things in the processor's caches, and take a quarter longer where a step takes half a millisecond. That,
        # too, is what drafts cost.
        disturbed = self._asked or self._drafted_before
        if drafted or not disturbed:
            self._unlearnt.append((tokens, seconds))
        spent = self._spent
        decoding = tokens - drafted
        host = self._host_seconds
        if not disturbed:
            self._host_seconds += COST_WEIGHT * (min(host_seconds, 2 * host or host_seconds) - host)
        self._asked = False
        self._drafted_before = drafted > 0
        self._spent = 0.0
        if len(self._unlearnt) == UNLEARNT_STEPS:
            self.learn()
        self._trial_seconds += TRIAL_SHARE * seconds
        earned = TRIAL_SHARE * seconds
        if disturbed and decoding in self._steps:  # what its tokens would have taken, less what they took, no hiccups
            alone = self._steps.seconds(decoding) + host
            took = min(seconds, 2 * self._steps.seconds(tokens)) + max(spent, min(host_seconds, spent + 3 * host))
            earned += (decoding + accepted) / decoding * alone - took
        else:
            earned -= spent
        credit = FIRST_CREDIT * seconds if self._credit is None else self._credit
        self._credit = min(credit + earned, MOST_CREDIT * seconds)

    def learn(self) -> None:
        """Take in the steps observed since the last time."""
        for tokens, seconds in self._unlearnt:
            self._steps.observe(tokens, seconds)
        self._unlearnt.clear()

    def expected_seconds(self, tokens: int) -> float | None:
        """How long such a step is expected to take; None before the first one."""
        self.learn()
        return self._steps.seconds(tokens) if self._steps else None
