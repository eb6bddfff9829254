"""Sequences that the host follows token by token: under a grammar, or with a limit to what they may think.

Their masks are made while the step is computed, on the step loop's thread; what they have to write is appended to what
was sampled. Knows rows only as numbers that stand for keys.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ...scheduler.plan import Continuation, MaskArray, MaskSource, StepPlan, StepResult
from ..grammars.backend import GrammarMatcher, TokenMask
from .messages import RequestRejected

_FREE_SECONDS, _SECONDS_PER_TOKEN = 0.25, 0.001
"""Processor time that the masks of a sequence may take: so much, and for each of its tokens so much more. They usually
take a tenth of a thousandth of a second; one that lets all others wait for it is ended."""


class ThinkingLimit:
    """After `budget` new tokens, unless `end` has been among them by then, it is `due`."""

    def __init__(self, budget: int, end: list[int]) -> None:
        self._left, self._end = budget, end
        self._last: list[int] = []
        self.ended = False

    @property
    def due(self) -> list[int]:
        return [] if self.ended or self._left > 0 else self._end

    def count(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._left -= 1
            self._last = [*self._last, token][-len(self._end) :]
            self.ended = self.ended or self._last == self._end


class SequenceGuide:
    """One sequence: what may come next, and what has to. `parameter`: of the request, for errors. `jumps`: tokens that
    have to come need not be sampled, because nothing is to be reported of them."""

    def __init__(
        self,
        matcher: GrammarMatcher | None,
        thinking: ThinkingLimit | None = None,
        parameter: str = "",
        jumps: bool = True,
    ) -> None:
        self._matcher, self._thinking, self._jumps = matcher, thinking, jumps
        self.parameter = parameter
        self._due: list[int] = []
        self._allowance = _FREE_SECONDS
        self._problem = ""
        self._note_due()

    @property
    def wants_mask(self) -> bool:
        return self._matcher is not None or bool(self._due)

    @property
    def error(self) -> str:
        """Why the sequence cannot go on; empty while it can."""
        return self._problem or ("" if self._matcher is None else self._matcher.error)

    def fill_mask(self, mask: TokenMask) -> None:
        """Write which tokens may come next; all, if that cannot be said any more."""
        began = time.thread_time()
        if self._due:
            mask[:] = 0
            mask[self._due[0] // 32] = np.array(1 << self._due[0] % 32, np.uint32).view(np.int32)
        elif self._matcher is not None:
            self._matcher.fill_mask(mask)
        self._allowance -= time.thread_time() - began - _SECONDS_PER_TOKEN
        if self._allowance < 0:
            self._problem = "this grammar takes too long to follow"
        if self.error:
            mask[:] = -1

    def follow(self, token: int) -> Continuation:
        """Go on by a token that was sampled; what comes after it without being sampled."""
        del self._due[:1]  # it was the only one allowed
        self._accept([token])
        forced: list[int] = []
        if self._jumps and (forced := self._due or self._forced()):
            self._due = []
            self._accept(forced)
        return Continuation(forced, self._matcher is not None and self._matcher.finished)

    def _forced(self) -> list[int]:
        return [] if self._matcher is None else self._matcher.forced_tokens()

    def _accept(self, tokens: list[int]) -> None:
        if self._matcher is not None:
            self._matcher.accept(tokens)
        if self._thinking is not None:
            self._thinking.count(tokens)
        if not self._due:
            self._note_due()

    def _note_due(self) -> None:
        if self._thinking is None or not self._thinking.due:
            return
        due, self._thinking = list(self._thinking.due), None
        # A grammar that begins within it says what the rest may be.
        self._due = due if self._matcher is None else due[: self._matcher.acceptable(due)]


@dataclass(slots=True)
class GuideTotals:
    """Masks made, the seconds of the step loop that took, and tokens that were not sampled because they had to come."""

    masks: int = 0
    seconds: float = 0.0
    forced: int = 0


class Guides:
    """The guided sequences that live, by key. `vocab_size`: logits that the model has."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._live: dict[int, SequenceGuide] = {}
        self.totals = GuideTotals()

    def __len__(self) -> int:
        return len(self._live)

    def add(self, key: int, guide: SequenceGuide) -> None:
        self._live[key] = guide

    def discard(self, keys: Iterable[int]) -> None:
        """These sequences have ended; unknown keys are ignored."""
        if self._live:
            for key in keys:
                self._live.pop(key, None)

    def mask_plan(self, plan: StepPlan, rows: Mapping[int, int]) -> tuple[StepPlan, MaskSource | None]:
        """The plan with its masked rows, and what makes their masks. `rows`: key by row of guided sequences."""
        if not self._live:
            return plan, None
        sampled = plan.rows[plan.samples].tolist()
        keys = {row: rows[row] for row in sampled if row in rows}
        guides = {row: self._live[key] for row, key in keys.items() if key in self._live}
        masked = {row: guide for row, guide in guides.items() if guide.wants_mask}
        if not masked:
            return plan, None
        return plan._replace(masked=np.array(list(masked), np.int32)), lambda: self._make_masks([*masked.values()])

    def follow(
        self, result: StepResult, rows: Mapping[int, int]
    ) -> tuple[dict[int, Continuation], list[RequestRejected]]:
        """Go on by the tokens of a result: how its guided rows go on, and those that cannot."""
        ways: dict[int, Continuation] = {}
        failed: list[RequestRejected] = []
        if not self._live:
            return ways, failed
        ends = np.cumsum(result.counts).tolist()
        for row, count, end in zip(result.rows.tolist(), result.counts.tolist(), ends, strict=True):
            guide = self._live.get(rows[row]) if row in rows else None
            if guide is None or not count:
                continue
            way = guide.follow(int(result.tokens[end - 1]))
            if guide.error:
                parameter = guide.parameter
                failed.append(RequestRejected(rows[row], f"{parameter}: {guide.error}", parameter))
            elif way.tokens or way.ends:
                ways[row] = way
                self.totals.forced += len(way.tokens)
        return ways, failed

    def _make_masks(self, guides: list[SequenceGuide]) -> MaskArray:
        began = time.perf_counter()
        masks = np.empty((len(guides), self._words), np.int32)
        for mask, guide in zip(masks, guides, strict=True):
            guide.fill_mask(mask)
        self.totals.masks += len(guides)
        self.totals.seconds += time.perf_counter() - began
        return masks
