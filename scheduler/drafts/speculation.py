"""Speculation: tokens are drafted for a sequence, and the step that computes its next token verifies them.

A step samples at each draft and at the token before the first as it would without drafts (same logits, same number of
the counter), and accepts those that were sampled: the text stays the same. Knows no rows, blocks or text.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from time import perf_counter
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ...core.metrics import DrafterTotals
from ..plan import IntArray
from ..sequence import Sequence, SequenceSpec
from .draft_costs import HIGHEST_RATE, MANY_SEQUENCES, DraftCosts
from .proposals import Proposals
from .sequence_drafts import DraftGuess, SequenceDrafts

FIRST_RATE = 0.7
"""The probability that a drafted token is right, before any was."""

RATE_WEIGHT = 0.12
"""Weight of the newest token in the moving average of that probability."""

PREDICTED_DRAFTS = 16
"""Tokens of a prediction that a step verifies at most: where it is right, it is for long."""

FRUITLESS_STEPS = 8
"""Nothing is drafted but in one step of so many, when in as many no draft was worth its cost, or none was found for
MANY_SEQUENCES: to draft takes time too."""

LONGEST_COOLDOWN = 32
"""After so many steps at most it is seen again whether a draft model, or a sequence's drafts, are worth their cost."""

HOPELESS_RATE, FIRST_COOLDOWN = 0.1, 4
"""A sequence whose drafts are right more seldom gets none for so many tokens at first, and twice as many each time.
Sequences that cool down are asked again in one step: each step that asks takes time, whoever is asked."""

PREDICTION, GRAMMAR = "prediction", "grammar"
"""Names of what drafts beside the configured method: what requests bring, and what their grammars force."""


class DraftRequest(NamedTuple):
    """A sequence to draft for. All its tokens are in `prompt` and `outputs`, which are not to be changed."""

    prompt: IntArray
    outputs: Tokens[int]
    k: int
    """Tokens that are to be drafted at most."""
    state: dict[str, Any]
    """The drafter's own, from the sequence's first request to its last."""
    tenant: str = ""
    prediction: IntArray | None = None
    """What the client says that the outputs will likely be."""
    proposed: Tokens[int] = ()
    """What the executor's draft model says that follows."""
    extras: tuple[str, ...] = ()
    """What else tells sequences apart that may not learn from each other, as in the prefix cache."""


class Drafter(Protocol):
    """Guesses how sequences go on. Called on the step loop's thread, while nothing computes."""

    def propose(self, requests: Tokens[DraftRequest]) -> Tokens[Tokens[int]]:
        """The tokens that may follow, the likeliest, for each request: none where there is no guess."""


@runtime_checkable
class LearningDrafter(Drafter, Protocol):
    """A drafter that also wants to see what became of sequences."""

    def finished(self, request: DraftRequest) -> None:
        """The sequence has ended, with all its `outputs`. Called on the step loop's thread."""


class Speculation:
    """Asks drafters for tokens, and says how many of them a step verifies."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        most: int,
        vocab_size: int,
        most_sampled: int = 1 << 30,
        draft_model: bool = False,
    ) -> None:
        self._drafters = drafters
        """By name; each drafts for the sequences for which those before it have no guess. The one called PREDICTION is
        asked for sequences with a prediction, for PREDICTED_DRAFTS, also where `most` is 0."""
        self.most = most
        """Tokens that are drafted for a sequence in a step at most."""
        self._vocab_size = vocab_size
        self.most_sampled = most_sampled
        """Tokens of a step that may be sampled."""
        self.draft_model = draft_model
        """The executor has one, and the last drafter says what it proposes."""
        self.possible_drafts: Callable[[int, list[int], int], list[int]] = lambda key, drafts, most: []
        """What the host makes of drafts for the constrained sequence with this key, so many at most."""
        self.costs = DraftCosts(draft_model)
        self.drafters_off = 0
        """Drafters that were turned off, see `GuardedDrafter`."""
        self._rounds = 0
        self._fruitless = 0  # latest rounds of drafts of which none was verified
        self._in_trial = False
        self._cooldown = self._cooling = 0  # steps in which the draft model is not asked, and how many are left
        self.reset_totals()

    def reset_totals(self) -> None:
        self.totals = {name: DrafterTotals() for name in (*self._drafters, GRAMMAR)}
        self._reported: dict[str, DrafterTotals] | None = {}
        self._acceptance_rate = FIRST_RATE
        self.costs.reset_credit()

    def copied_totals(self) -> dict[str, DrafterTotals]:
        """The totals of drafters that did anything, as they are now: the same object as long as none did more."""
        if self._reported is None:
            active = ((name, total) for name, total in self.totals.items() if total.seconds or total.draft_tokens)
            self._reported = {name: total.copied() for name, total in active}
        return self._reported

    def note_off(self) -> None:
        """A drafter was turned off."""
        self.drafters_off += 1

    def drafts_for(self, spec: SequenceSpec) -> SequenceDrafts | None:
        """What is remembered of a sequence that arrives; None where nothing is drafted for it."""
        most = self.most if spec.prediction is None else max(self.most, PREDICTED_DRAFTS)
        most = most if spec.drafts_wanted is None else min(most, spec.drafts_wanted)
        return SequenceDrafts(most) if most else None

    def is_due(self, step: int) -> bool:
        """Whether anything is drafted in this step: drafts cost no more than they saved, and their share of all steps,
        and brought something of late."""
        if self.costs.overdrawn:
            return False
        return self._fruitless < FRUITLESS_STEPS or self.draft_model or step % FRUITLESS_STEPS == 0

    def draft(self, asked: Tokens[tuple[Sequence, int]], decoding: int, step: int) -> list[list[int]]:
        """Tokens to verify for each sequence, so many at most, in a `step` that decodes `decoding` tokens else."""
        self._rounds += 1
        self.costs.learn()
        if self.costs.is_probe(decoding, self._rounds):
            return [[] for _ in asked]
        self._reported, began = None, perf_counter()
        verified = self._draft(asked, decoding, step)
        self.costs.note_drafting(perf_counter() - began, len(asked))
        return verified

    def _draft(self, asked: Tokens[tuple[Sequence, int]], decoding: int, step: int) -> list[list[int]]:
        guesses = list[list[int]]()
        for (sequence, _), guess in zip(asked, self._guesses(asked), strict=True):
            drafts = drafts_of(sequence)
            if drafts.guess.tokens and drafts.guess.drafter != GRAMMAR:
                self._judge(drafts, sequence.outputs)
            drafts.guess = guess
            guesses.append([] if self._cools_down(sequence, step) else guess.tokens)
        if not any(guesses):
            self._fruitless += len(asked) >= MANY_SEQUENCES
            return guesses
        lengths = self._lengths_to_verify([sequence for sequence, _ in asked], [*map(len, guesses)], decoding)
        self._fruitless = 0 if any(lengths) else self._fruitless + 1
        verified = [guess[:length] for guess, length in zip(guesses, lengths, strict=True)]
        for index, (sequence, _) in enumerate(asked):
            if sequence.spec.constrained and verified[index]:  # by now the grammar need not read what is not verified
                verified[index] = self._cut(sequence, verified[index], lengths[index])
        return verified

    def _guesses(self, asked: Tokens[tuple[Sequence, int]]) -> list[DraftGuess]:
        """What the first drafter that has a guess says; where none has, what the sequence's grammar forces."""
        requests = [_draft_request(sequence, most) for sequence, most in asked]
        guesses = [DraftGuess(len(request.outputs)) for request in requests]
        for name, drafter in self._drafters.items():
            left = [index for index, guess in enumerate(guesses) if not guess.tokens]
            if name == PREDICTION:
                left = [index for index in left if requests[index].prediction is not None]
            if not left:
                continue
            theirs = [requests[index] for index in left]
            if name != PREDICTION:
                theirs = [request if request.k <= self.most else request._replace(k=self.most) for request in theirs]
            began = perf_counter()
            proposed = drafter.propose(theirs)
            self.totals[name].seconds += perf_counter() - began
            for index, tokens, request in zip(left, proposed, theirs, strict=True):
                if possible := self._in_vocabulary(tokens, request.k):
                    guesses[index] = guesses[index]._replace(tokens=possible, drafter=name, own=len(possible))
        for index, (sequence, most) in enumerate(asked):
            if sequence.spec.constrained and not guesses[index].tokens:
                tokens = self._possible_drafts(sequence, [], most)
                guesses[index] = guesses[index]._replace(tokens=tokens, drafter=GRAMMAR)
        return guesses

    def _in_vocabulary(self, tokens: Tokens[int], most: int) -> list[int]:
        """The tokens up to the first that there is not."""
        for index, token in enumerate(tokens[:most]):
            if not 0 <= token < self._vocab_size:
                return list(tokens[:index])
        return list(tokens[:most])

    def _possible_drafts(self, sequence: Sequence, drafts: list[int], most: int) -> list[int]:
        began = perf_counter()
        possible = self.possible_drafts(sequence.spec.key, drafts, most)
        self.totals[GRAMMAR].seconds += perf_counter() - began
        return possible

    def _cut(self, sequence: Sequence, drafts: list[int], most: int) -> list[int]:
        """What the sequence's grammar makes of drafts: those from the first other token on are not the drafter's."""
        possible = self._possible_drafts(sequence, drafts, most)
        known = drafts_of(sequence)
        pairs = enumerate(zip(possible, drafts, strict=False))
        same = next((index for index, (one, other) in pairs if one != other), min(len(possible), len(drafts)))
        known.guess = known.guess._replace(own=min(same, known.guess.own))
        return possible

    def _judge(self, drafts: SequenceDrafts, outputs: Tokens[int]) -> None:
        """Compare the last guess with what has come since, whether it was verified or not: that costs nothing."""
        rate = self._rate_of(drafts)
        guess = drafts.guess
        sampled = outputs[guess.outputs : guess.outputs + len(guess.tokens)]
        for token, guessed in zip(sampled, guess.tokens, strict=False):
            right = token == guessed
            rate += RATE_WEIGHT * (right - rate)
            self._acceptance_rate += RATE_WEIGHT / 8 * (right - self._acceptance_rate)
            if not right:
                break
        drafts.acceptance_rate = rate

    def _cools_down(self, sequence: Sequence, step: int) -> bool:
        """Whether drafts were wrong so often that none are asked for its next tokens, each time for longer. A draft
        model is asked by what it costs, and a grammar says what has to come."""
        drafts = drafts_of(sequence)
        if self._rate_of(drafts) >= HOPELESS_RATE:
            drafts.cooldown = 0
        elif self.costs.known and not (self.draft_model or sequence.spec.constrained):
            drafts.cooldown = min(max(2 * drafts.cooldown, FIRST_COOLDOWN), LONGEST_COOLDOWN)
            drafts.resume_at = sequence.known + drafts.cooldown - step % drafts.cooldown
        return drafts.resume_at > sequence.known

    def _rate_of(self, drafts: SequenceDrafts) -> float:
        return self._acceptance_rate if drafts.acceptance_rate is None else drafts.acceptance_rate

    def _lengths_to_verify(self, sequences: Tokens[Sequence], mosts: list[int], decoding: int) -> list[int]:
        if not self.costs.known:
            return mosts
        rates = [
            HIGHEST_RATE if drafts.guess.drafter == GRAMMAR else self._rate_of(drafts)
            for drafts in map(drafts_of, sequences)
        ]
        return self.costs.worthwhile(rates, mosts, decoding, self._rounds)

    @property
    def asks_draft_model(self) -> bool:
        """Whether `propose` is to be called in this step of an executor with a draft model: more and more seldom while
        nothing is worth it."""
        self._cooling -= 1
        return self._cooling < 0

    def propose(self, asked: Tokens[tuple[Sequence, int]], decoding: int) -> list[int]:
        """How many tokens the draft model is to propose for each sequence, so many at most, for a step that decodes
        `decoding` tokens else."""
        self.costs.learn()
        sequences, mosts = [sequence for sequence, _ in asked], [most for _, most in asked]
        if not self.costs.known:
            return mosts
        rates = [*map(self._rate_of, map(drafts_of, sequences))]
        lengths = self.costs.worthwhile(rates, mosts, decoding, self._rounds, proposing=True)
        if not any(lengths) and self.costs.may_try:
            at_best = [HIGHEST_RATE] * len(asked)
            if any(self.costs.worthwhile(at_best, mosts, decoding, self._rounds, proposing=True)):
                ages = [drafts_of(sequence).proposed[0] - sequence.known for sequence in sequences]
                oldest = ages.index(min(ages))
                lengths[oldest], self._in_trial = mosts[oldest], True
        self._cooldown = 0 if any(lengths) else min(2 * self._cooldown + 1, LONGEST_COOLDOWN)
        self._cooling = self._cooldown
        return lengths

    def take_proposals(self, proposals: Proposals) -> None:
        """Learn what it took to propose."""
        self._reported = None
        rows = len(proposals.rows)
        self.totals[[*self._drafters][-1]].seconds += proposals.seconds
        if self._in_trial:
            self.costs.note_trial(proposals.seconds)
            self._in_trial = False
        if rows and proposals.first <= rows * (2 + self.most):  # no prompts
            self.costs.observe_passes(rows, proposals.seconds / proposals.passes)

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Note that of `drafted` tokens of the sequence the first `accepted` were right."""
        guess, self._reported = drafts_of(sequence).guess, None
        own = min(guess.own, drafted)
        if own:
            self.totals[guess.drafter].count(0, own, accepted)
        if own < drafted:
            self.totals[GRAMMAR].count(own, drafted, accepted)

    def finished(self, sequence: Sequence) -> None:
        """A sequence has ended: a drafter that learns is told."""
        self._reported = None
        for name, drafter in self._drafters.items():
            if isinstance(drafter, LearningDrafter):
                began = perf_counter()
                drafter.finished(_draft_request(sequence, 0))
                seconds = perf_counter() - began
                self.totals[name].seconds += seconds
                self.costs.note_spent(seconds)


def drafts_of(sequence: Sequence) -> SequenceDrafts:
    """What is remembered of a sequence that is drafted for."""
    assert sequence.drafts is not None, "nothing is drafted for it"
    return sequence.drafts


def _draft_request(sequence: Sequence, most: int) -> DraftRequest:
    spec = sequence.spec
    return DraftRequest(
        spec.prompt,
        sequence.outputs,
        most,
        drafts_of(sequence).state,
        spec.tenant,
        spec.prediction,
        _continuing(sequence),
        spec.extras,
    )


def _continuing(sequence: Sequence) -> Tokens[int]:
    """What the draft model's last proposals say that follows now: nothing, where they said something else before."""
    known, proposed = drafts_of(sequence).proposed
    came = sequence.known - known
    if came >= len(proposed):
        return ()
    if came and sequence.outputs[-came:] != proposed[:came]:
        return ()
    return proposed[came:]
