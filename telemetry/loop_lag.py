"""The lag of the event loop: the delay of a timer that does nothing else."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Self

from ..core.metrics import Measurement, Reading

HOLDER = "__holds_event_loop_as__"
"""The global of a module whose code runs in the event loop: what it is called in the alarm."""

_PROBE_INTERVAL = 0.25
"""Seconds between two probes."""

_WINDOW = 10.0
"""A delay is remembered for at least as many seconds, and at most twice as many."""


class LoopLag:
    """Watches the running loop inside a `with` block; `bound`: seconds of delay that can only mean that it is stuck."""

    def __init__(self, bound: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bound = bound
        self._clock = clock
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._window_began = clock()
        self._longest = self._longest_before = 0.0

    def __enter__(self) -> Self:
        self._start_timer()
        return self

    def __exit__(self, *_: object) -> None:
        self._due = None
        if self._timer is not None:
            self._timer.cancel()

    def _start_timer(self) -> None:
        self._due = self._clock() + _PROBE_INTERVAL
        self._timer = asyncio.get_running_loop().call_later(_PROBE_INTERVAL, self._on_timer)

    @property
    def seconds(self) -> float:
        """The longest recent delay, one that goes on included."""
        return max(self._longest, self._longest_before, self._late())

    @property
    def stuck(self) -> bool:
        return self.seconds > self._bound

    def measure(self) -> Iterator[Measurement]:
        yield Measurement({}, [Reading("charonia_event_loop_lag_seconds", self.seconds)])

    def _on_timer(self) -> None:
        now = self._clock()
        if now - self._window_began > _WINDOW:
            self._window_began = now
            self._longest, self._longest_before = 0.0, self._longest
        self._longest = max(self._longest, self._late())
        self._start_timer()

    def _late(self) -> float:
        return 0.0 if self._due is None else max(0.0, self._clock() - self._due)
