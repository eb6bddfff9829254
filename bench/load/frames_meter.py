"""The CPU time of a server's frames while all streams of a load run."""

import os
import threading
import time
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from ...core.errors import Unavailable
from ..server_process import ServerAddress, children, process_name, process_times
from . import stage_sampler
from .driver import OK
from .worker import WorkerOutcome

_FRONTEND, _CORE = "charonia-front", "charonia-core"
_HEAD_START_SECONDS = 0.1
"""Between the generator's signal and its clock's zero."""
_MARK_SECONDS, _FEWEST_MARKS = 0.05, 10
SAMPLING_SECONDS = 2.0
"""Until samples of stages begin: most streams then run."""


class FramesRun(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one contender. CPU in microseconds a frame: of the server's own process, of other frontends, and what
    of both was the kernel's."""

    frames: int
    sent: int
    """Frames of a stream from its beginning to its end, on average."""
    size: int
    """Bytes of a frame, on average."""
    seconds: float
    own: float
    frontends: float
    kernel: float

    @property
    def cpu(self) -> float:
        return self.own + self.frontends

    @property
    def cores(self) -> float:
        """Used by all processes but the engine's."""
        return self.cpu * self.frames / self.seconds / 1e6


Mark: TypeAlias = tuple[float, dict[int, tuple[float, float]]]
"""A moment in seconds after the start of a load, and by process its `process_times`."""


def figures_between(marks: Sequence[Mark], own: int, outcomes: Sequence[WorkerOutcome]) -> FramesRun:
    """What marks of processes, `own` the server's, and outcomes say of the time in which all streams ran. Raises
    `Unavailable` if a request failed, or they did not."""
    records = [record for outcome in outcomes for record in outcome.records]
    if errors := {record.status for record in records if record.status != OK}:
        raise Unavailable(f"streams failed: {', '.join(errors)}")
    low = max(record.times[0] for record in records)
    high = min(record.times[-1] for record in records)
    within = [(at, times) for at, times in marks if low <= at <= high]
    if len(within) < _FEWEST_MARKS:
        raise Unavailable("the streams did not run at the same time for long: --tokens has more")
    (begin, before), (end, after) = within[0], within[-1]
    frames = sum(begin <= at < end for record in records for at in record.times)
    spent = {pid: [late - early for late, early in zip(after[pid], before[pid], strict=True)] for pid in before}
    return FramesRun(
        frames=frames,
        sent=round(sum(len(record.times) for record in records) / len(records)),
        size=round(sum(record.size for record in records) / sum(record.frames for record in records)),
        seconds=end - begin,
        own=sum(spent[own]) / frames * 1e6,
        frontends=sum(sum(times) for pid, times in spent.items() if pid != own) / frames * 1e6,
        kernel=sum(times[1] for times in spent.values()) / frames * 1e6,
    )


class FramesMeter:
    """CPU time of a server's processes, but engine cores, noted again and again from its start to the end of a load.
    `stages`: they sample meanwhile."""

    def __init__(self, place: ServerAddress, stages: bool) -> None:
        assert place.pid is not None
        names = {pid: process_name(pid) for pid in (place.pid, *children(place.pid))}
        self._processes = [pid for pid, name in names.items() if pid == place.pid or name == _FRONTEND]
        self._sampled = [pid for pid, name in names.items() if pid in self._processes or name == _CORE]
        self._pid = place.pid
        self._stages = stages
        self._marks: list[Mark] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._begun = time.perf_counter() + _HEAD_START_SECONDS
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(_MARK_SECONDS):
            now = time.perf_counter() - self._begun
            self._marks.append((now, {pid: process_times(pid) for pid in self._processes}))
            if self._stages and now > SAMPLING_SECONDS:
                self._switch_sampling()
                self._stages = False

    def _switch_sampling(self) -> None:
        for pid in self._sampled:
            os.kill(pid, stage_sampler.START_OR_STOP)

    def measured(self, outcomes: Sequence[WorkerOutcome]) -> FramesRun:
        """See `figures_between`."""
        self._ended.set()
        self._thread.join()
        return figures_between(self._marks, self._pid, outcomes)
