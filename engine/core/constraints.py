"""Sequences that the host follows token by token: under a grammar, or with a limit on their reasoning.

Masks are made on the step loop's thread while the step is computed. Forced tokens are appended to sampled ones. Knows
rows only as numbers that stand for keys.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass

import numpy as np

from ...core.errors import InvalidArgument, SentError
from ...scheduler.constraints.constrained_rows import ForcedTokens, with_forced_tokens
from ...scheduler.plan import MaskArray, MaskSource, StepPlan, StepResult
from ..grammars.backend import GrammarMatcher, TokenMask
from .messages import RequestRejected

_FREE_SECONDS, _SECONDS_PER_TOKEN = 0.25, 0.001
"""Processor time that a sequence's masks may take, at first and for each token; they usually take 0.1 ms. Beyond, the
sequence ends, since all others wait for it."""


class ThinkingLimit:
    """A limit on reasoning: `end` is `due` after `budget` new tokens, unless it was among them."""

    def __init__(self, budget: int, end: list[int]) -> None:
        self._left, self._end = budget, end
        self._last: list[int] = []
        self.ended = False

    @property
    def due(self) -> list[int]:
        return [] if self.ended or self._left > 0 else self._end

    def may_be_due(self, tokens: int) -> bool:
        """Whether the end may be due within so many more tokens."""
        return not self.ended and self._left <= tokens

    def count(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._left -= 1
            self._last = [*self._last, token][-len(self._end) :]
            self.ended = self.ended or self._last == self._end


class SequenceConstraint:
    """The tokens that may come next in one sequence, and those that must. `parameter`: the request's, for errors.
    `jumps`: forced tokens need no sampling, since no logprobs of them are wanted."""

    def __init__(
        self,
        grammar: Callable[[], GrammarMatcher] | None,
        thinking: ThinkingLimit | None = None,
        parameter: str = "",
        jumps: bool = True,
    ) -> None:
        self._grammar = grammar
        self._thinking = thinking
        self._jumps = jumps
        self._matcher = None if grammar is None else grammar()
        self.parameter = parameter
        self._due: list[int] = []
        self._due_is_forced = False
        self._text: list[int] = []  # the tokens that the matcher has accepted
        self._drafts = True
        self._allowance = _FREE_SECONDS
        self._problem = ""
        self._note_due()

    @property
    def error(self) -> str:
        """Why the sequence cannot go on; empty while it can."""
        return self._problem or ("" if self._matcher is None else self._matcher.error)

    def wants_masks(self, drafts: int = 0) -> bool:
        """Whether a token may be forbidden next, or within so many drafts."""
        return (
            self._matcher is not None
            or bool(self._due)
            or (self._thinking is not None and self._thinking.may_be_due(drafts))
        )

    def possible_drafts(self, drafts: Sequence[int], most: int) -> list[int]:
        """The first of `drafts` that may come, at most `most`. They end with a forced token that differs from theirs;
        without drafts they are the tokens that the grammar forces."""
        possible: list[int] = []
        remaining = deque(drafts)
        most = most if self._drafts and not self.error else 0
        with self._looking_ahead(drafting=most > 0):
            while len(possible) < most and not self.error:
                if not (self._due or remaining or self._jumps):
                    remaining.extend(self._forced())
                token = next(iter(self._due or remaining), None)
                if token is None or not self._allows(token):
                    break
                if remaining and remaining.popleft() != token:
                    remaining.clear()
                self._advance(token)
                if self._finished:  # nothing is chosen after this token
                    break
                possible.append(token)
        return possible

    def fill_masks(self, masks: MaskArray, drafts: Sequence[int]) -> None:
        """Write which tokens may come next, and after each of the possible `drafts`, into `masks` [1 + drafts, words];
        all tokens after an error."""
        with self._looking_ahead():
            for mask, token in zip(masks, [*drafts, None], strict=True):
                self._fill_mask(mask)
                if token is not None and not self.error:
                    self._advance(token)

    def _fill_mask(self, mask: TokenMask) -> None:
        began = time.thread_time()
        if self._due:
            mask[:] = 0
            mask[self._due[0] // 32] = np.array(1 << self._due[0] % 32, np.uint32).view(np.int32)
        elif self._matcher is not None:
            self._matcher.fill_mask(mask)
        else:
            mask[:] = -1
        self._allowance -= time.thread_time() - began - _SECONDS_PER_TOKEN
        if self._allowance < 0:
            self._problem = "this grammar takes too long to follow"
        if self.error:
            mask[:] = -1

    def follow(self, tokens: Iterable[int]) -> ForcedTokens:
        """Accept sampled tokens; the forced ones that follow them without sampling."""
        for token in tokens:
            self._advance(token)
        forced: list[int] = []
        while self._jumps and self._due:
            forced.append(self._due[0])
            self._advance(self._due[0])
        return ForcedTokens(forced, self._finished)

    @property
    def _finished(self) -> bool:
        return self._matcher is not None and self._matcher.finished

    def _advance(self, token: int) -> None:
        """Accept one token, the due one if there is any, and note what is due next."""
        was_forced = bool(self._due) and self._due_is_forced
        del self._due[:1]
        if self._matcher is not None:
            self._matcher.accept([token])
            self._text.append(token)
        if self._thinking is not None:
            self._thinking.count([token])
        if self._due:
            return
        self._note_due()
        if not self._due and self._jumps and not was_forced:
            self._due, self._due_is_forced = self._forced(), True

    def _allows(self, token: int) -> bool:
        return self._matcher is None or self._matcher.acceptable([token]) == 1

    def _forced(self) -> list[int]:
        return [] if self._matcher is None else self._matcher.forced_tokens()

    def _note_due(self) -> None:
        if self._thinking is None or not self._thinking.due:
            return
        due, self._thinking = list(self._thinking.due), None
        # A grammar that begins within these tokens decides about the rest.
        self._due = due if self._matcher is None else due[: self._matcher.acceptable(due)]
        self._due_is_forced = False

    @contextmanager
    def _looking_ahead(self, drafting: bool = False) -> Iterator[None]:
        """The block whose accepted tokens are taken back. If the matcher fails on a draft, a new one goes on from the
        text, and drafts no more. `drafting`: the block is about drafts alone."""
        before = self._due.copy(), self._due_is_forced, copy(self._thinking)
        length = len(self._text)
        try:
            yield
        finally:
            self._due, self._due_is_forced, self._thinking = before
            accepted = len(self._text) - length
            del self._text[length:]
            if self._matcher is not None and self._grammar is not None and (accepted or drafting):
                if not self._matcher.error:
                    self._matcher.rollback(accepted)
                else:
                    self._drafts, self._matcher = False, self._grammar()
                    self._matcher.accept(self._text)


@dataclass(slots=True)
class ConstraintTotals:
    """Counts of the masks of all sequences."""

    masks: int = 0
    seconds: float = 0.0
    """Seconds of the step loop."""
    forced: int = 0
    """Tokens that were forced and so not sampled."""


class ConstrainedSequences:
    """The live constrained sequences by key, of a model with `vocab_size` logits."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self.live: dict[int, SequenceConstraint] = {}
        """Those that run or wait; the methods are for when there are any."""
        self.totals = ConstraintTotals()

    def possible_drafts(self, key: int, drafts: Sequence[int], most: int) -> list[int]:
        began = time.perf_counter()
        possible = self.live[key].possible_drafts(drafts, most) if key in self.live else []
        self.totals.seconds += time.perf_counter() - began
        return possible

    def mask_plan(self, plan: StepPlan, rows: Mapping[int, int]) -> tuple[StepPlan, MaskSource | None]:
        """The plan with its masked rows, and the source of their masks. `rows`: the key of each constrained row."""
        drafts = plan.drafts_by_row()
        masked: dict[int, tuple[SequenceConstraint, list[int]]] = {}
        for row in plan.rows[plan.samples].tolist():
            constraint = self.live.get(rows[row]) if row in rows else None
            if constraint is not None and constraint.wants_masks(len(drafts.get(row, ()))):
                masked[row] = constraint, drafts.get(row, [])
        if not masked:
            return plan, None
        places = [row for row, (_, drafted) in masked.items() for _ in range(1 + len(drafted))]
        return plan._replace(masked=np.array(places, np.int32)), lambda: self._make_masks([*masked.values()])

    def follow(self, result: StepResult, rows: Mapping[int, int]) -> tuple[StepResult, list[RequestRejected]]:
        """Accept a result's tokens; the result with those that are forced behind them, and the sequences that cannot go
        on."""
        forced: dict[int, ForcedTokens] = {}
        failed: list[RequestRejected] = []
        ends = np.cumsum(result.counts).tolist()
        for row, count, end in zip(result.rows.tolist(), result.counts.tolist(), ends, strict=True):
            constraint = self.live.get(rows[row]) if row in rows else None
            if constraint is None or not count:
                continue
            follows = constraint.follow(result.tokens[end - count : end].tolist())
            if constraint.error:
                parameter = constraint.parameter
                error = InvalidArgument(f"{parameter}: {constraint.error}", field=parameter)
                failed.append(RequestRejected(rows[row], SentError.of(error)))
            elif follows.tokens or follows.ends:
                forced[row] = follows
                self.totals.forced += len(follows.tokens)
        return with_forced_tokens(result, forced) if forced else result, failed

    def _make_masks(self, places: list[tuple[SequenceConstraint, list[int]]]) -> MaskArray:
        began = time.perf_counter()
        ends = np.cumsum([1 + len(drafts) for _, drafts in places]).tolist()
        masks = np.empty((ends[-1], self._words), np.int32)
        for (constraint, drafts), end in zip(places, ends, strict=True):
            constraint.fill_masks(masks[end - 1 - len(drafts) : end], drafts)
        self.totals.masks += len(masks)
        self.totals.seconds += time.perf_counter() - began
        return masks
