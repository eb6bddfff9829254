"""How long the executions of one instance take, and whether the one that runs takes far too long.

The instance's thread starts and stops it, the event loop reads it.
"""

import threading
from collections import deque
from collections.abc import Callable
from statistics import median
from time import monotonic_ns

_SECOND = 1_000_000_000
_LEAST = 30 * _SECOND
_MEDIANS = 20
_RECENT = 64
"""Executions of which the median is taken."""


class ExecutionTimer:
    """`clock`: nanoseconds. An execution is overdue when it takes longer than 30 s and 20 times the median of the last
    ones; of a decoupled model, each response counts as one."""

    def __init__(self, clock: Callable[[], int] = monotonic_ns) -> None:
        self._clock = clock
        self._begun: int | None = None
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._lock = threading.Lock()

    def start(self) -> None:
        self._begun = self._clock()

    def stop(self) -> None:
        """There may be nothing to stop."""
        with self._lock:
            if self._begun is not None:
                self._recent.append(self._clock() - self._begun)
                self._begun = None

    @property
    def running_seconds(self) -> float:
        """For which the execution has been running that runs now; 0 without one."""
        return self._running() / _SECOND

    @property
    def overdue(self) -> bool:
        running = self._running()
        return running > _LEAST and running > _MEDIANS * (median(self._recent) if self._recent else 0)

    def call_if_longer_than(self, seconds: float, do: Callable[[], None]) -> bool:
        """Do it if the execution that runs now has taken longer; it does not end meanwhile, and no other one begins.
        Whether that was so."""
        with self._lock:
            beyond = self._running() > seconds * _SECOND
            if beyond:
                do()
        return beyond

    def _running(self) -> int:
        begun = self._begun
        return 0 if begun is None else self._clock() - begun
