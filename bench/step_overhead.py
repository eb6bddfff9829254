"""CPU time of the step loop's own thread in a decode step: `python -m charonia.bench.step_overhead`.

A real engine core runs with real sockets; its executor answers at once, after it has read so much memory on every core
that the caches hold nothing else, as after a model's step. Cold code takes several times as long as the same in a loop
of its own, which `charonia.bench.scheduler` measures.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, TypeVar

import numpy as np
import zmq
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from ..engine.core.messages import AddRequest, FromCore, RequestUpdates, Shutdown
from ..engine.core.sockets import CoreEndpoints, CoreSockets
from ..engine.core.step_loop import EngineCore
from ..engine.worker.executor import StepFuture
from ..engine.worker.fake_executor import FakeExecutor
from ..kvcache.manager import KVCacheManager
from ..processes.host import usable_cores
from ..scheduler.config import SchedulerConfig
from ..scheduler.plan import MaskArray, MaskSource, StepPlan, StepResult, StepUpdates
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import SequenceSpec
from .command import Count
from .scheduler import BLOCK_SIZE, sampled

PARTS = ("schedule", "execute", "wait", "apply", "send", "loop")
"""`loop` is what is left: receiving, and the making of messages."""

_WARM_UP = 64
"""Steps in which all decode and that are not counted."""

T = TypeVar("T")
app = App(name="python -m charonia.bench.step_overhead", help=__doc__)


@dataclass(frozen=True, slots=True)
class StepCase:
    """`megabytes`: what each core reads in a step."""

    sequences: int
    ahead: int
    steps: int
    megabytes: int

    @property
    def longest(self) -> int:
        """Tokens of a sequence that outlives the measurement."""
        return 2 * (BLOCK_SIZE + _WARM_UP + self.steps)


class StepClock:
    """CPU time of the thread that asks: seconds of each step and of its parts."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, dict[str, float]]] = []
        self._parts: dict[str, float] = {}
        self._began = 0.0

    def time(self, part: str, action: Callable[[], T]) -> T:
        began = time.thread_time()
        try:
            return action()
        finally:
            self._parts[part] = self._parts.get(part, 0.0) + time.thread_time() - began

    def turn(self) -> None:
        """Note the end of a step."""
        self._steps.append((time.thread_time() - self._began, self._parts))
        self._parts = {}
        self._began = time.thread_time()

    def medians(self, steps: int) -> dict[str, float]:
        """Microseconds of a step, its parts and the rest, over the last `steps`."""
        times = [{**parts, "step": whole, "loop": whole - sum(parts.values())} for whole, parts in self._steps[-steps:]]
        return {name: 1e6 * float(np.median([step.get(name, 0.0) for step in times])) for name in ("step", *PARTS)}


class ColdExecutor(FakeExecutor):
    """Every row's next token is its position. Before it says so, each core reads `megabytes`."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        threads = usable_cores().threads
        self._memory = [np.ones(megabytes << 18, np.float32) for _ in range(threads)]
        self._readers = ThreadPoolExecutor(threads)

    def _step(self, plan: StepPlan, masks: MaskArray | None) -> StepResult:
        list(self._readers.map(np.sum, self._memory))
        return sampled(plan)


class TimedExecutor(ColdExecutor):
    """One that times itself, and waiting for it."""

    def __init__(self, megabytes: int, clock: StepClock) -> None:
        super().__init__(megabytes)
        self._clock = clock

    def execute(self, plan: StepPlan, masks: MaskSource | None = None) -> StepFuture:
        return TimedFuture(self._clock.time("execute", partial(super().execute, plan, masks)), self._clock)


class TimedFuture:
    def __init__(self, future: StepFuture, clock: StepClock) -> None:
        self._future, self._clock = future, clock

    def result(self, timeout: float | None = None) -> StepResult:
        return self._clock.time("wait", partial(self._future.result, timeout))


class TimedScheduler(Scheduler):
    """One that times itself."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager, clock: StepClock) -> None:
        super().__init__(config, cache)
        self._clock = clock

    def schedule(self) -> StepPlan | None:
        return self._clock.time("schedule", super().schedule)

    def apply(self, result: StepResult, seconds: float | None = None, host_seconds: float = 0.0) -> StepUpdates:
        return self._clock.time("apply", partial(super().apply, result, seconds, host_seconds))


class ClockedOutbox:
    """Turns the clock, and calls `stop` after the last step that is counted."""

    def __init__(self, send: Callable[[FromCore], None], clock: StepClock, case: StepCase) -> None:
        self._send = send
        self._clock = clock
        self._sequences = case.sequences
        self._left = _WARM_UP + case.steps
        self.stop: Callable[[], None] = lambda: None

    def send(self, message: FromCore) -> None:
        self._send(message)
        if isinstance(message, RequestUpdates) and len(message.updates.keys) == self._sequences:
            self._left -= 1
        if self._left == 0:
            self.stop()
        self._clock.turn()


def measure(case: StepCase, parted: bool) -> dict[str, float]:
    """Median microseconds of a step, and of its parts where `parted`, which makes it longer."""
    clock = StepClock()
    cache = KVCacheManager(case.sequences * (case.longest // BLOCK_SIZE + 2), BLOCK_SIZE)
    config = SchedulerConfig(
        max_num_seqs=case.sequences,
        max_num_batched_tokens=max(512, case.sequences),
        max_model_len=case.longest,
        ahead=case.ahead,
    )
    executor = TimedExecutor(case.megabytes, clock) if parted else ColdExecutor(case.megabytes)
    scheduler = TimedScheduler(config, cache, clock) if parted else Scheduler(config, cache)
    core = EngineCore(scheduler, cache, executor)
    _add(core, case)
    with _wire() as wire:
        outbox = ClockedOutbox(partial(_timed, clock, wire.send) if parted else wire.send, clock, case)
        outbox.stop = lambda: core.inbox.accept(Shutdown())
        core.run(outbox.send)
    executor.close()
    return clock.medians(case.steps)


def _timed(clock: StepClock, send: Callable[[FromCore], None], message: FromCore) -> None:
    clock.time("send", partial(send, message))


def _add(core: EngineCore, case: StepCase) -> None:
    """Add sequences whose blocks do not all become full in the same step."""
    random = np.random.default_rng(0)
    for key in range(case.sequences):
        length = BLOCK_SIZE + key % BLOCK_SIZE
        prompt = random.integers(0, 30_000, length, np.int32)
        spec = SequenceSpec(key=key, prompt=prompt, max_tokens=case.longest - length)
        core.inbox.accept(AddRequest(spec))


@contextmanager
def _wire() -> Iterator[CoreSockets]:
    """Sockets to a process that reads the messages and drops them."""
    with TemporaryDirectory() as directory:
        address = CoreEndpoints.in_directory(directory)
        reader = get_context("spawn").Process(target=_read, args=(address,), daemon=True)
        reader.start()
        wire = CoreSockets(address)
        try:
            yield wire
        finally:
            wire.close()
            reader.terminate()
            reader.join()


def _read(address: CoreEndpoints) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox:
        inbox.bind(address.from_core)
        while True:
            inbox.recv()


@app.default
def main(
    *,
    sequences: Annotated[tuple[Count, ...], Parameter(consume_multiple=True)] = (1, 4, 32, 256),
    ahead: Literal[0, 1, 2] = 0,
    steps: Count = 300,
    megabytes: Count = 32,
) -> None:
    """Print a table of medians.

    Args:
        sequences: That decode at once; one line each.
        ahead: Plans scheduled beyond the oldest unapplied one.
        steps: That are counted.
        megabytes: What each core reads in a step.
    """
    table = Table("sequences", "step", *PARTS, title=f"microseconds a step, ahead {ahead}")
    for count in sequences:
        case = StepCase(count, ahead, steps, megabytes)
        whole, parts = measure(case, parted=False)["step"], measure(case, parted=True)
        table.add_row(str(count), f"{whole:.0f}", *(f"{parts[name]:.0f}" for name in PARTS))
    Console(width=100).print(table)


if __name__ == "__main__":
    app()
