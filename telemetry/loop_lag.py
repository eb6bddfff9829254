"""The lag of the event loop, measured by a timer, and an alarm that names what holds the loop."""

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple, Self

import msgspec

from ..core.metrics import Histogram, Labels, Measurement, Reading

log = logging.getLogger(__name__)

HOLDER = "__holds_event_loop_as__"
"""The global by which a module whose code runs in the event loop names itself in the alarm."""

_PROBE_INTERVAL = 0.25
"""Seconds between two probes."""

_DELAYS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""The bounds of the histogram of delays, in seconds."""

_ALARM = 1.0
"""The delay, in seconds, that raises the alarm."""

_IDLE = ("uvloop", "asyncio", "selectors")
"""Packages whose code runs while a loop waits, when nothing holds it."""

_WINDOW = 10.0
"""A delay is remembered for so many seconds, at most for twice as many."""


_OWN: Labels = {}


class LoopState(msgspec.Struct, array_like=True, frozen=True):
    lag: float
    """Its longest recent delay, in seconds."""
    delays: list[int]
    """Counts by the bounds `_DELAYS`."""
    delay_sum: float
    cpu: float
    """Seconds that its thread computed."""

    def readings(self, labels: Labels = _OWN) -> Iterator[Reading]:
        delays = Histogram(_DELAYS)
        delays.counts, delays.sum = self.delays, self.delay_sum
        yield Reading("charonia_event_loop_lag_seconds", self.lag, labels)
        yield Reading("charonia_event_loop_delay_seconds", delays, labels)
        yield Reading("charonia_event_loop_cpu_seconds_total", self.cpu, labels)


class BusyLimit(NamedTuple):
    """An event loop's thread that computed for more than `busy` of the last `seconds` has too much to do."""

    busy: float = 0.7
    seconds: float = 5.0


class BusyWindow:
    """The busy part of the calling thread's time: over the `count` pauses between the last looks at it, once there were
    as many. `cpu`: seconds that the thread computed."""

    def __init__(
        self,
        count: int,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock = clock
        self._cpu = cpu
        self._looks = deque[tuple[float, float]](maxlen=count + 1)

    def look(self) -> float:
        """The busy part, 0 to 1; 0 while there were too few looks."""
        self._looks.append((self._clock(), self._cpu()))
        if len(self._looks) < (self._looks.maxlen or 0):
            return 0.0
        (began, computed), (now, computed_now) = self._looks[0], self._looks[-1]
        return min((computed_now - computed) / max(now - began, 1e-9), 1.0)


class LoopLag:
    """Watches the running loop inside a `with` block. A delay of `bound` seconds means that it is stuck; `name` is its
    name in the alarm."""

    def __init__(self, bound: float, clock: Callable[[], float] = time.monotonic, name: str = "the event loop") -> None:
        self._bound, self._name = bound, name
        self._clock = clock
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began = self._window_began = clock()
        self._started = time.time()
        self._delays = Histogram(_DELAYS)
        self._longest = self._longest_before = 0.0
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        self._start_timer()
        threading.Thread(target=self._watch, args=(threading.get_ident(),), name="loop-lag", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._due = None
        self._closed.set()
        if self._timer is not None:
            self._timer.cancel()

    def _start_timer(self) -> None:
        self._due = self._clock() + _PROBE_INTERVAL
        self._timer = asyncio.get_running_loop().call_later(_PROBE_INTERVAL, self._on_timer)

    @property
    def seconds(self) -> float:
        """The longest recent delay, a present one included."""
        return max(self._longest, self._longest_before, self._late())

    @property
    def stuck(self) -> bool:
        return self.seconds > self._bound

    def state(self) -> LoopState:
        """The state, read by the loop's own thread, whose CPU time is in it."""
        return LoopState(self.seconds, [*self._delays.counts], self._delays.sum, time.thread_time())

    def measure(self) -> Iterator[Measurement]:
        """The readings of a scrape; called by the loop's thread."""
        uptime = Reading("charonia_uptime_seconds", self._clock() - self._began)
        started = Reading("charonia_start_time_seconds", self._started)
        yield Measurement({}, [*self.state().readings(), uptime, started])

    def _on_timer(self) -> None:
        time_now = self._clock()
        if time_now - self._window_began > _WINDOW:
            self._window_began = time_now
            self._longest, self._longest_before = 0.0, self._longest
        self._delays.observe(late := self._late())
        self._longest = max(self._longest, late)
        self._start_timer()

    def _late(self) -> float:
        return 0.0 if self._due is None else max(0.0, self._clock() - self._due)

    def _watch(self, thread: int) -> None:
        """Log what the loop's thread does, once for each long delay. Runs in a thread."""
        reported = None
        while not self._closed.wait(_PROBE_INTERVAL):
            due = self._due
            if due is not None and due != reported and (late := self._clock() - due) > _ALARM:
                reported = due
                log.warning("%s has been held for %.1f s, by %s", self._name, late, _holder(thread))


def _holder(thread: int) -> str:
    """The model's code that a thread is in, or the innermost function. If the thread is in the loop's own code, the
    holder has ended, or the process had no processor."""
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None:
        if (name := frame.f_globals.get(HOLDER)) is not None:
            return f"{name}, at {_place(frame)}"
        frame = frame.f_back
    if innermost is None:
        return "a thread that has ended"
    if str(innermost.f_globals.get("__name__")).partition(".")[0] in _IDLE:
        return "nothing that still runs: what held it is over, or the process had no processor, or was stopped"
    return _place(innermost)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
