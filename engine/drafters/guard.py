"""What a drafter may not do: end the server, or take longer than it can ever save."""

import logging
from collections.abc import Callable, Sequence
from time import perf_counter

from ...scheduler.speculation import Drafter, DraftRequest, LearningDrafter

CALLS = 16
"""A drafter's time is judged after so many calls."""

_logger = logging.getLogger(__name__)


class GuardedDrafter:
    """`drafter`, called `name` in the log, until it raises, or took longer in its last CALLS calls than all its drafts
    could have saved had they been right: then it is off, and drafts nothing. `step_seconds`: how long a step with so
    many tokens takes, None where that is not known; `on_off` is called when it is turned off."""

    def __init__(self, drafter: Drafter, name: str) -> None:
        self._drafter, self._name, self.off = drafter, name, False
        self.on_off: Callable[[], None] = lambda: None
        self.step_seconds: Callable[[int], float | None] = lambda tokens: None
        self._calls, self._taken, self._savable = 0, 0.0, 0.0

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """See `Drafter.propose`."""
        if self.off:
            return [()] * len(requests)
        began = perf_counter()
        try:
            proposed = self._drafter.propose(requests)
            if len(proposed) != len(requests):
                raise ValueError(f"{len(proposed)} drafts for {len(requests)} requests")
        except Exception as error:  # somebody's code, which is to end nothing else
            self._turn_off(f"{type(error).__name__}: {error}")
            return [()] * len(requests)
        self._judge(perf_counter() - began, requests)
        return proposed

    def finished(self, request: DraftRequest) -> None:
        """See `LearningDrafter`."""
        if not self.off and isinstance(self._drafter, LearningDrafter):
            try:
                self._drafter.finished(request)
            except Exception as error:  # likewise
                self._turn_off(f"{type(error).__name__}: {error}")

    def _judge(self, seconds: float, requests: Sequence[DraftRequest]) -> None:
        step = self.step_seconds(len(requests))
        if step is None:
            return
        self._calls += 1
        self._taken += seconds
        self._savable += step * max(request.k for request in requests)
        if self._calls < CALLS:
            return
        if self._taken > self._savable:
            taken, savable = 1000 * self._taken / CALLS, 1000 * self._savable / CALLS
            self._turn_off(f"it takes {taken:.1f} ms a call, and right drafts would save {savable:.1f} at most")
        self._calls, self._taken, self._savable = 0, 0.0, 0.0

    def _turn_off(self, reason: str) -> None:
        self.off = True
        self.on_off()
        _logger.error("the drafter %s is turned off, the server serves on: %s", self._name, reason)
