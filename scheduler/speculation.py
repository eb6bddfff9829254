"""Speculation: tokens are drafted for a sequence, and the step that computes its next token verifies them.

A step samples at each draft and at the token before the first, each time the token that it would have sampled there
without drafts: the same logits, the same number of the counter. Drafts are accepted while they are what was sampled.
So the text is the same with drafts and without, whoever drafts, and however. Knows no rows, no blocks and no text.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from itertools import accumulate
from math import inf
from time import perf_counter
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..core.metrics import DrafterTotals
from .plan import IntArray, Proposals
from .sequence import DraftGuess, Sequence, SequenceSpec

FIRST_CHANCE, HIGHEST_CHANCE = 0.7, 0.98
"""The probability that a drafted token is right, before any was, and at most."""

CHANCE_WEIGHT, COST_WEIGHT = 0.12, 0.1
"""Weights of the newest token, and of the newest step, in moving averages."""

PREDICTED_DRAFTS = 16
"""Tokens of a prediction that a step verifies at most: where it is right, it is for long."""

PROBE_STEPS = 64
"""One step in so many has no drafts, sooner while few had as many sequences: others are held against their time. What
was measured once is forgotten after so many steps."""

LEAST_GAIN, LEAST_GAIN_OF_MANY = 1.08, 1.16
"""Drafts are verified where that seems to bring so many times the tokens a second: estimates err. Of MANY_SEQUENCES
some are unlucky, and wait longer for the others' drafts."""

MANY_SEQUENCES, REST_STEPS = 8, 8
"""Nothing is drafted but in one step of so many, when in as many no draft was worth its cost, or none was found for so
many sequences: to draft takes time too."""

BYSTANDER_SLOWDOWN = 1.05
"""A step that also computes sequences without drafts takes at most so many times as long with those of the others."""

TRIAL_SHARE = 0.006
"""The share of the time of all steps in which a draft model may propose what seems not worth it: to learn if it is. A
drafter may take as much beyond what its drafts save."""

FIRST_CREDIT, MOST_CREDIT = 10, 30
"""Steps that drafting, and drafts that were wrong, may cost at first, and that can be saved up."""

UNLEARNT_STEPS = 16
"""So many steps are learnt together, if none asks before."""

LONGEST_REST = 32
"""After so many steps at most it is seen again whether a draft model, or a sequence's drafts, are worth their cost."""

HOPELESS_CHANCE, FIRST_REST = 0.1, 4
"""A sequence whose drafts are right more seldom rests from them, for so many tokens at first, and twice as many each
time. Those that rest are asked again in one step: each step that asks takes time, whoever is asked."""


PREDICTION, GRAMMAR = "prediction", "grammar"
"""Names of what drafts beside the configured method: what requests bring, and what their grammars force."""


class DraftRequest(NamedTuple):
    """A sequence for which at most `k` tokens are to be drafted. `prompt` and `outputs` are all its tokens, not to be
    changed; `state` is the drafter's own from the sequence's first request to its last. `prediction`: what the client
    says that the outputs will likely be. `proposed`: what the executor's draft model says that follows. `extras`: what
    else tells sequences apart that may not learn from each other, as in the prefix cache."""

    prompt: IntArray
    outputs: Tokens[int]
    k: int
    state: dict[str, Any]
    tenant: str = ""
    prediction: IntArray | None = None
    proposed: Tokens[int] = ()
    extras: tuple[str, ...] = ()


class Drafter(Protocol):
    """Guesses how sequences go on. Called on the step loop's thread, while nothing computes."""

    def propose(self, requests: Tokens[DraftRequest]) -> Tokens[Tokens[int]]:
        """The tokens that may follow, the likeliest, for each request: none where there is no guess."""


@runtime_checkable
class LearningDrafter(Drafter, Protocol):
    """A drafter that also wants to see what became of sequences."""

    def finished(self, request: DraftRequest) -> None:
        """The sequence has ended, with all its `outputs`. Called on the step loop's thread."""


class DecodeCosts:
    """Seconds of steps that only decode, by their number of tokens, as measured: in between the measured ones in
    proportion, and a little beyond them as they grow at the end, so that larger steps are tried one after the other. No
    step takes longer than one of more tokens: what seems so was disturbed."""

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
        for tokens in [each for each in self._sizes if self._forgotten_at[each] < self._observed]:
            self._sizes.remove(tokens)
            del self._seconds[tokens]

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, tokens: int) -> bool:
        return tokens in self._seconds

    def probe_interval(self, tokens: int) -> int:
        """One step in so many is to have so many tokens: more often while few had."""
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
        at = bisect_left(sizes, tokens)
        low, high = sizes[max(at - 1, 0)], sizes[at]
        above = self._least[at]
        below = min(self._seconds[low], above)
        return below + (tokens - low) / (high - low) * (above - below) if low < tokens < high else above

    def marginal_seconds(self, tokens: int) -> float:
        """How much longer than with one token fewer a step takes; nothing where neither was measured."""
        if tokens > self._sizes[-1]:
            return 0.0
        return self.seconds(tokens) - (self.seconds(tokens - 1) if tokens > 1 else 0.0)


class Speculation:
    """What `drafters` draft, by name, each for the sequences for which those before it have no guess: `most` tokens a
    sequence and step at most, of a vocabulary of `vocab_size` tokens. The one called PREDICTION is asked for sequences
    with a prediction, for PREDICTED_DRAFTS, also where `most` is 0. `most_sampled`: places of a step that may be
    sampled. `draft_model`: the executor has one, which proposes what the last drafter says.

    `possible_drafts`: what the host makes of drafts for the constrained sequence with this key; so many are wanted.
    `totals`: by drafter, and of GRAMMAR.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        most: int,
        vocab_size: int,
        most_sampled: int = 1 << 30,
        draft_model: bool = False,
    ) -> None:
        self._drafters, self.most, self._vocab_size, self.most_sampled = drafters, most, vocab_size, most_sampled
        self.draft_model = draft_model
        self.possible_drafts: Callable[[int, list[int], int], list[int]] = lambda key, drafts, most: []
        self.reset_step_times()
        self._chance = FIRST_CHANCE
        self._steps = 0
        self._fruitless = 0  # latest rounds of drafts of which none was verified
        self._in_trial = False
        self.drafters_off = 0  # turned off, see `GuardedDrafter`
        self._rest = self._resting = 0
        self.reset_totals()

    def reset_totals(self) -> None:
        self.totals = {name: DrafterTotals() for name in (*self._drafters, GRAMMAR)}
        self._told: dict[str, DrafterTotals] | None = None
        self._chance = FIRST_CHANCE
        self._credit: float | None = None  # seconds that drafts may cost, once a step was timed

    def copied_totals(self) -> dict[str, DrafterTotals]:
        """The totals of drafters that did anything, as they are now: the same object as long as none did more."""
        if self._told is None:
            active = ((name, each) for name, each in self.totals.items() if each.seconds or each.draft_tokens)
            self._told = {name: each.copied() for name, each in active}
        return self._told

    def reset_step_times(self) -> None:
        self._costs = DecodeCosts()
        self._unlearnt: list[tuple[int, float]] = []  # steps that it does not know of yet
        self._asked = self._drafted_before = False
        self._drafting_seconds = 0.0  # to draft for a sequence
        self._host_seconds = 0.0  # between two steps of which neither had to do with drafts
        self._spent = 0.0  # seconds that drafters took since the last step
        self._pass_costs = DecodeCosts()  # of the draft model, by rows
        self._trial_seconds = 0.0

    def most_drafts(self, request: SequenceSpec) -> int:
        """Tokens that a step may draft for a sequence."""
        most = self.most if request.prediction is None else max(self.most, PREDICTED_DRAFTS)
        return most if request.drafts_wanted is None else min(most, request.drafts_wanted)

    def draft(self, asked: Tokens[tuple[Sequence, int]], decoding: int, step: int) -> list[list[int]]:
        """Tokens to verify for each sequence, so many at most, in a `step` that decodes `decoding` tokens else."""
        self._steps += 1
        self._learn()
        if self._probes(decoding):
            return [[] for _ in asked]
        self._asked, self._told, began = True, None, perf_counter()
        verified = self._draft(asked, decoding, step)
        seconds, known = perf_counter() - began, self._drafting_seconds
        self._drafting_seconds += COST_WEIGHT * (min(seconds / len(asked), 2 * known or seconds) - known)
        self._spent += seconds
        return verified

    def _probes(self, decoding: int) -> bool:
        """Whether a step has no drafts, so that it is known how long `decoding` tokens take: two in a row, of which
        `observe_step` learns."""
        if not self._costs:
            return False
        return decoding not in self._costs or self._steps % self._costs.probe_interval(decoding) < 2

    def is_due(self, step: int) -> bool:
        """Whether anything is drafted in this step: drafts cost no more than they saved, and their share of all steps,
        and brought something of late."""
        if self._credit is not None and self._credit < 0:
            return False
        return self._fruitless < REST_STEPS or self.draft_model or step % REST_STEPS == 0

    def _draft(self, asked: Tokens[tuple[Sequence, int]], decoding: int, step: int) -> list[list[int]]:
        guesses = list[list[int]]()
        for (sequence, _), guess in zip(asked, self._guesses(asked), strict=True):
            if sequence.draft_guess.tokens and sequence.draft_guess.drafter != GRAMMAR:
                self._judge(sequence)
            sequence.draft_guess = guess
            guesses.append([] if self._rests(sequence, step) else guess.tokens)
        if not any(guesses):
            self._fruitless += len(asked) >= MANY_SEQUENCES
            return guesses
        lengths = self._lengths_to_verify([each for each, _ in asked], [*map(len, guesses)], decoding)
        self._fruitless = 0 if any(lengths) else self._fruitless + 1
        verified = [guess[:length] for guess, length in zip(guesses, lengths, strict=True)]
        for at, (sequence, _) in enumerate(asked):
            if sequence.spec.constrained and verified[at]:  # by then the grammar need not read what is not verified
                verified[at] = self._cut(sequence, verified[at], lengths[at])
        return verified

    def _guesses(self, asked: Tokens[tuple[Sequence, int]]) -> list[DraftGuess]:
        """What the first drafter that has a guess says; where none has, what the sequence's grammar forces."""
        requests = [_draft_request(each, most) for each, most in asked]
        found = [DraftGuess(len(request.outputs)) for request in requests]
        for name, drafter in self._drafters.items():
            predicts = name == PREDICTION
            left = [at for at, guess in enumerate(found) if not guess.tokens]
            if predicts:
                left = [at for at in left if requests[at].prediction is not None]
            if not left:
                continue
            theirs = [requests[at] for at in left]
            if not predicts:
                theirs = [each if each.k <= self.most else each._replace(k=self.most) for each in theirs]
            began = perf_counter()
            proposed = drafter.propose(theirs)
            self.totals[name].seconds += perf_counter() - began
            for at, tokens, request in zip(left, proposed, theirs, strict=True):
                if possible := self._possible(tokens, request.k):
                    found[at] = found[at]._replace(tokens=possible, drafter=name, own=len(possible))
        for at, (sequence, most) in enumerate(asked):
            if sequence.spec.constrained and not found[at].tokens:
                found[at] = found[at]._replace(tokens=self._possible_drafts(sequence, [], most), drafter=GRAMMAR)
        return found

    def _possible_drafts(self, sequence: Sequence, drafts: list[int], most: int) -> list[int]:
        began = perf_counter()
        possible = self.possible_drafts(sequence.spec.key, drafts, most)
        self.totals[GRAMMAR].seconds += perf_counter() - began
        return possible

    def _cut(self, sequence: Sequence, drafts: list[int], most: int) -> list[int]:
        """What the sequence's grammar makes of drafts: those from the first other token on are not the drafter's."""
        possible, guess = self._possible_drafts(sequence, drafts, most), sequence.draft_guess
        pairs = enumerate(zip(possible, drafts, strict=False))
        same = next((at for at, (one, other) in pairs if one != other), min(len(possible), len(drafts)))
        sequence.draft_guess = guess._replace(own=min(same, guess.own))
        return possible

    @property
    def asks_draft_model(self) -> bool:
        """Whether `propose` is to be called in this step: more and more seldom while nothing is worth it."""
        self._resting -= 1
        return self.draft_model and self._resting < 0

    def finished(self, sequence: Sequence) -> None:
        """A sequence has ended: a drafter that learns is told."""
        self._told = None
        for name, drafter in self._drafters.items():
            if isinstance(drafter, LearningDrafter):
                began = perf_counter()
                drafter.finished(_draft_request(sequence, 0))
                seconds = perf_counter() - began
                self.totals[name].seconds += seconds
                self._spent += seconds

    def note_off(self) -> None:
        """A drafter was turned off."""
        self.drafters_off += 1

    def propose(self, asked: Tokens[tuple[Sequence, int]], decoding: int) -> list[int]:
        """How many tokens the draft model is to propose for each sequence, so many at most, for a step that decodes
        `decoding` tokens else."""
        self._learn()
        sequences, mosts = [each for each, _ in asked], [most for _, most in asked]
        if not self._costs:
            return mosts
        lengths = self._worthwhile([*map(self._chance_of, sequences)], mosts, decoding, self._pass_costs)
        if not any(lengths) and self._trial_seconds > 0:
            at_best = self._worthwhile([HIGHEST_CHANCE] * len(asked), mosts, decoding, self._pass_costs)
            if any(at_best):
                oldest = min(range(len(asked)), key=lambda at: sequences[at].proposed[0] - sequences[at].known)
                lengths[oldest], self._in_trial = mosts[oldest], True
        self._rest = 0 if any(lengths) else min(2 * self._rest + 1, LONGEST_REST)
        self._resting = self._rest
        return lengths

    def take_proposals(self, proposals: Proposals) -> None:
        """Learn what it took to propose."""
        self._told = None
        rows = len(proposals.rows)
        self.totals[[*self._drafters][-1]].seconds += proposals.seconds
        if self._in_trial:
            self._trial_seconds -= proposals.seconds
            self._in_trial = False
        if rows and proposals.first <= rows * (2 + self.most):  # no prompts
            self._pass_costs.observe(rows, proposals.seconds / proposals.passes)

    def _judge(self, sequence: Sequence) -> None:
        """Hold the last guess against what has come since, whether it was verified or not: that costs nothing."""
        sequence.acceptance_rate = self._chance_of(sequence)
        guess = sequence.draft_guess
        came = sequence.outputs[guess.outputs : guess.outputs + len(guess.tokens)]
        for token, guessed in zip(came, guess.tokens, strict=False):
            right = token == guessed
            sequence.acceptance_rate += CHANCE_WEIGHT * (right - sequence.acceptance_rate)
            self._chance += CHANCE_WEIGHT / 8 * (right - self._chance)
            if not right:
                break

    def _rests(self, sequence: Sequence, step: int) -> bool:
        """Whether drafts were wrong so often that none are asked for its next tokens, each time for longer. A draft
        model is asked by what it costs, and a grammar says what has to come."""
        if self._chance_of(sequence) >= HOPELESS_CHANCE:
            sequence.draft_cooldown = 0
        elif self._costs and not (self.draft_model or sequence.spec.constrained):
            sequence.draft_cooldown = min(max(2 * sequence.draft_cooldown, FIRST_REST), LONGEST_REST)
            sequence.drafts_from = sequence.known + sequence.draft_cooldown - step % sequence.draft_cooldown
        return sequence.drafts_from > sequence.known

    def _chance_of(self, sequence: Sequence) -> float:
        return self._chance if sequence.acceptance_rate is None else sequence.acceptance_rate

    def _lengths_to_verify(self, sequences: Tokens[Sequence], mosts: list[int], decoding: int) -> list[int]:
        if not self._costs:
            return mosts
        forced = (each.draft_guess.drafter == GRAMMAR for each in sequences)
        chances = [
            HIGHEST_CHANCE if sure else self._chance_of(each) for each, sure in zip(sequences, forced, strict=True)
        ]
        return self._worthwhile(chances, mosts, decoding)

    def _worthwhile(
        self, chances: list[float], mosts: list[int], decoding: int, drafting: DecodeCosts | None = None
    ) -> list[int]:
        """How many tokens of each guess to verify, `mosts` at most: those that together bring the most tokens a second,
        by the time that steps took, and that drafting takes: of a draft model's passes, by rows, where these are still
        to come. Sequences beside them, which get none, are not to wait noticeably longer."""
        gains: list[tuple[float, int, int]] = []
        for at, (chance, most) in enumerate(zip(chances, mosts, strict=True)):
            turn = (at + self._steps) % len(mosts)  # of equals others come first in each step
            gains += [(min(chance, HIGHEST_CHANCE) ** (place + 1), turn, at) for place in range(most)]
        gains.sort(reverse=True)
        alone, shared = self._costs.seconds(decoding) + self._host_seconds, sum(map(bool, mosts)) < decoding
        least = LEAST_GAIN if len(mosts) < MANY_SEQUENCES else LEAST_GAIN_OF_MANY
        best, rate, gained = 0, least * decoding / alone, 0.0
        before = self._host_seconds + (0.0 if self.draft_model else len(mosts) * self._drafting_seconds)
        lengths, rows = [0] * len(mosts), [0] * max(mosts, default=0)
        for number, (gain, _, at) in enumerate(gains, 1):
            gained += gain
            if drafting:  # one row more in the pass that proposes this place
                rows[lengths[at]] += 1
                before += drafting.marginal_seconds(rows[lengths[at]])
            lengths[at] += 1
            seconds = self._costs.seconds(decoding + number) + before
            if shared and seconds > BYSTANDER_SLOWDOWN * alone:
                break
            if (decoding + gained) / seconds > rate:
                best, rate = number, (decoding + gained) / seconds
        lengths = [0] * len(mosts)
        for _, _, at in gains[:best]:
            lengths[at] += 1
        return lengths

    def observe_step(
        self, tokens: int, seconds: float, drafted: int = 0, accepted: int = 0, host_seconds: float = 0.0
    ) -> None:
        """A step that only decoded, `tokens` of them, took so long, without what a draft model took. Of `drafted` ones
        among them so many were right. `host_seconds`: from the end of the step before to its launch, if that was
        measured. The step for which a drafter was asked, and the one after drafts, are no measure of those without:
        they find other things in the processor's caches, and take a quarter as long again where a step takes half a
        millisecond. That, too, is what drafts cost."""
        disturbed = self._asked or self._drafted_before
        if drafted or not disturbed:
            self._unlearnt.append((tokens, seconds))
        spent, decoding, host = self._spent, tokens - drafted, self._host_seconds
        if not disturbed:
            self._host_seconds += COST_WEIGHT * (min(host_seconds, 2 * host or host_seconds) - host)
        self._asked, self._drafted_before, self._spent = False, drafted > 0, 0.0
        if len(self._unlearnt) == UNLEARNT_STEPS:
            self._learn()
        self._trial_seconds += TRIAL_SHARE * seconds
        earned = TRIAL_SHARE * seconds
        if disturbed and decoding in self._costs:  # what its tokens would have taken, less what they took, no hiccups
            alone = self._costs.seconds(decoding) + host
            took = min(seconds, 2 * self._costs.seconds(tokens)) + max(spent, min(host_seconds, spent + 3 * host))
            earned += (decoding + accepted) / decoding * alone - took
        else:
            earned -= spent
        credit = FIRST_CREDIT * seconds if self._credit is None else self._credit
        self._credit = min(credit + earned, MOST_CREDIT * seconds)

    def _learn(self) -> None:
        """Steps that are learnt one by one each take several times as long."""
        for tokens, seconds in self._unlearnt:
            self._costs.observe(tokens, seconds)
        self._unlearnt.clear()

    def expected_seconds(self, tokens: int) -> float | None:
        """How long it expects such a step to take; None before the first one."""
        self._learn()
        return self._costs.seconds(tokens) if self._costs else None

    def _possible(self, tokens: Tokens[int], most: int) -> list[int]:
        """The tokens up to the first that there is not."""
        for at, token in enumerate(tokens[:most]):
            if not 0 <= token < self._vocab_size:
                return list(tokens[:at])
        return list(tokens[:most])

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens of the sequence the first `accepted` were right."""
        guess, self._told = sequence.draft_guess, None
        own = min(guess.own, drafted)
        if own:
            self.totals[guess.drafter].count(0, own, accepted)
        if own < drafted:
            self.totals[GRAMMAR].count(own, drafted, accepted)


def _draft_request(sequence: Sequence, most: int) -> DraftRequest:
    request, continuing = sequence.spec, _continuing(sequence)
    return DraftRequest(
        request.prompt,
        sequence.outputs,
        most,
        sequence.draft_state,
        request.tenant,
        request.prediction,
        continuing,
        request.extras,
    )


def _continuing(sequence: Sequence) -> Tokens[int]:
    """What the draft model's last proposals say that follows now: nothing, where they said something else before."""
    known, proposed = sequence.proposed
    came = sequence.known - known
    if came >= len(proposed):
        return ()
    if came and sequence.outputs[-came:] != proposed[:came]:
        return ()
    return proposed[came:]
