"""The executor over rank processes: a step plan goes to all of them, its result comes back from one.

Knows nothing of where they run, see `LaunchedRanks`. Imports no torch.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic
from typing import Any, TypeAlias, TypeVar

import msgspec

from ...core.adapter import Adapter
from ...core.errors import CharoniaError, InvalidArgument, Unavailable, error_from_code
from ...scheduler.plan import MaskSource, StepPlan, StepResult
from ..config import EngineConfig
from ..worker.executor import Capacity, ProgressCallback
from .local_ranks import LaunchedRanks, LocalRanks, RankLayout
from .rank_messages import (
    AdapterReport,
    AllocateCache,
    CacheAllocated,
    ComputeStep,
    JoinRanks,
    LeaveRanks,
    LoadRankAdapter,
    ProvideMasks,
    RankAdapterLoaded,
    RankAdapterRefused,
    RankCommand,
    RankJoined,
    RankLoaded,
    RankReport,
    RankStarted,
    SampledBatch,
    UnloadRankAdapter,
    WeightsProgress,
    encode_message,
)
from .rank_monitor import RankMonitor

R = TypeVar("R", RankStarted, RankJoined, RankLoaded, CacheAllocated)

StartRanks: TypeAlias = Callable[[EngineConfig, RankLayout], LaunchedRanks]
"""Starts the ranks of an engine."""

JOIN_SECONDS = 300.0
"""How long ranks may take to start and to join each other: torch may come from a cold disk."""

_LEAVE_SECONDS = 3.0


class RanksExecutor:
    """A model on `config.parallel.world` ranks, which `start_ranks` starts.

    When one is lost the others are killed at once, and all pending steps fail with an error that names it.
    """

    def __init__(
        self, config: EngineConfig, start_ranks: StartRanks = LocalRanks, join_seconds: float = JOIN_SECONDS
    ) -> None:
        self._config, self._start_ranks, self._join_seconds = config, start_ranks, join_seconds
        self._layout = RankLayout(config.parallel.tensor, config.parallel.pipeline)
        self._pending = PendingSteps()
        self._sampled: deque[StepResult] = deque()
        self._adapters = AdapterLoads(self._layout.world)
        self._monitor: RankMonitor | None = None
        # By kind and rank: a quick rank may report the next thing before a slow one reports this.
        self._reports: defaultdict[type[RankReport], dict[int, Any]] = defaultdict(dict)

    def load(self, progress: ProgressCallback) -> Capacity:
        """Start the ranks and let each load its share; `progress` is called on the caller's thread.

        Raises:
            Unavailable: one does not join, or died; the message names it.
            CharoniaError: what one of them raised.
        """
        progress("ranks", 0.0)
        ranks = self._start_ranks(self._config, self._layout)
        self._monitor = RankMonitor(ranks, self._layout, self._on_result, self._on_loss, self._adapters.add_report)
        deadline = monotonic() + self._join_seconds
        store = self._wait_for_all(RankStarted, deadline)[0]
        self._command(JoinRanks(store.host, store.port))
        self._wait_for_all(RankJoined, deadline)
        progress("ranks", 1.0)
        loaded = self._wait_for_all(RankLoaded, progress=progress)
        progress("weights", 1.0)
        # All have as many blocks as the rank with room for the fewest.
        smallest = min((each.capacity for each in loaded.values()), key=lambda each: each.free_bytes / each.block_bytes)
        machine = loaded[0].capacity.machine
        return smallest._replace(machine=f"{self._layout}, each {machine}" if machine else str(self._layout))

    def allocate(self, blocks: int) -> None:
        """Allocate every rank's part of the cache, and begin anew."""
        self._sampled.clear()
        self._command(AllocateCache(blocks))
        self._wait_for_all(CacheAllocated)

    def execute(self, plan: StepPlan, masks: MaskSource | None = None) -> Future[StepResult]:
        step = self._pending.add_step()
        if not step.done():
            # For the stages that do not sample: a sequence's next plan comes after its last result. More may come
            # meanwhile.
            results = [self._sampled.popleft() for _ in range(len(self._sampled))]
            sampled = SampledBatch.from_results(results) if any(len(result.rows) for result in results) else None
            self._command(ComputeStep(plan, sampled))
            if masks is not None and len(plan.masked):
                self._command(ProvideMasks(masks()))
        return step

    def load_adapter(self, path: str) -> Future[Adapter]:
        for digest in self._adapters.take_strays():
            self._command(UnloadRankAdapter(digest))
        loading = self._adapters.add_load()
        if not loading.done():
            self._command(LoadRankAdapter(path))
        return loading

    def unload_adapter(self, digest: str) -> None:
        self._adapters.held.discard(digest)
        self._command(UnloadRankAdapter(digest))

    def watch(self, tell: Callable[[CharoniaError], None]) -> None:
        """Call `tell`, from any thread, when a rank is lost; at once if one is already."""
        self._pending.on_loss(tell)

    def close(self) -> None:
        if self._monitor is None:
            return
        monitor, ranks = self._monitor, self._monitor.ranks
        monitor.expect_exits()
        self._command(LeaveRanks())
        ranks.wait_for_exit(0.0 if self._pending.loss else _LEAVE_SECONDS)
        monitor.join()
        ranks.close()
        self._pending.cancel_all()
        self._adapters.cancel_all()
        self._monitor = None

    @property
    def _loaded(self) -> RankMonitor:
        if self._monitor is None:
            raise RuntimeError("the executor is not loaded")
        return self._monitor

    def _command(self, command: RankCommand) -> None:
        """Send `command` to all ranks. Waits for a rank that has not read more than its connection holds."""
        message = encode_message(command)
        with suppress(OSError):  # a rank is gone: the monitor fails whatever waits for it
            for connection in self._loaded.ranks.connections:
                connection.send_bytes(message)

    def _wait_for_all(
        self, kind: type[R], deadline: float | None = None, progress: ProgressCallback = lambda phase, fraction: None
    ) -> dict[int, R]:
        """Every rank's report of this kind; until all are there, `progress` is called as weights are read."""
        reported = 0.0
        while len(self._reports[kind]) < self._layout.world:
            received = self._loaded.next_report(deadline)
            if received is None:
                absent = [rank for rank in range(self._layout.world) if rank not in self._reports[kind]]
                names = ", ".join(map(self._layout.rank_name, absent))
                raise Unavailable(f"{names} did not join within {self._join_seconds:g} s")
            self._reports[type(received.report)][received.rank] = received.report
            read = sum(report.fraction for report in self._reports[WeightsProgress].values()) / self._layout.world
            if reported < read < 1.0:
                reported = read
                progress("weights", read)
        return self._reports.pop(kind)

    def _on_loss(self, error: CharoniaError) -> None:
        self._adapters.fail_all(error)
        self._pending.fail_all(error)

    def _on_result(self, result: StepResult) -> None:
        """Called by the monitor's thread."""
        if self._layout.pipeline > 1:
            self._sampled.append(result)
        self._pending.resolve_oldest(result)


class PendingSteps:
    """The steps without a result, in order; for any thread. `loss`: why none will come any more."""

    def __init__(self) -> None:
        self._steps: deque[Future[StepResult]] = deque()
        self._lock = threading.Lock()
        self._on_loss: Callable[[CharoniaError], None] = lambda error: None
        self.loss: CharoniaError | None = None

    def add_step(self) -> Future[StepResult]:
        """The future of one more step; it has failed already if there will be no result."""
        step: Future[StepResult] = Future()
        with self._lock:
            if self.loss is None:
                self._steps.append(step)
                return step
        step.set_exception(self.loss)
        return step

    def resolve_oldest(self, result: StepResult) -> None:
        with self._lock:
            step = self._steps.popleft()
        step.set_result(result)

    def fail_all(self, error: CharoniaError) -> None:
        """Fail these steps, and all to be added."""
        with self._lock:
            self.loss = error
            steps, self._steps = self._steps, deque()
            on_loss = self._on_loss
        for step in steps:
            step.set_exception(error)
        on_loss(error)

    def on_loss(self, callback: Callable[[CharoniaError], None]) -> None:
        """Call `callback` when `fail_all` is called, at once if it was."""
        with self._lock:
            self._on_loss = callback
            error = self.loss
        if error is not None:
            callback(error)

    def cancel_all(self) -> None:
        with self._lock:
            steps, self._steps = self._steps, deque()
        for step in steps:
            step.cancel()


class AdapterLoads:
    """The loads that not all of `world` ranks have reported on, in order; for any thread. `held`: adapters that all
    ranks have. `strays`: those that some may have, because others could not load them."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._loads: deque[tuple[Future[Adapter], dict[int, AdapterReport]]] = deque()
        self._lock = threading.Lock()
        self._loss: CharoniaError | None = None
        self.held, self.strays = set[str](), set[str]()

    def add_load(self) -> Future[Adapter]:
        """One more adapter; it has failed already if there will be no reports."""
        loading: Future[Adapter] = Future()
        with self._lock:
            if self._loss is None:
                self._loads.append((loading, {}))
                return loading
        loading.set_exception(self._loss)
        return loading

    def add_report(self, rank: int, report: AdapterReport) -> None:
        with self._lock:
            loading, reports = next(each for each in self._loads if rank not in each[1])
            reports[rank] = report
            if len(reports) < self._world:
                return
            self._loads.popleft()  # a rank reports in order, so the oldest is complete first
            digests = {each.adapter.digest for each in reports.values() if isinstance(each, RankAdapterLoaded)}
            agreed = len(digests) == 1 and all(isinstance(each, RankAdapterLoaded) for each in reports.values())
            (self.held if agreed else self.strays).update(digests)
        _settle(loading, list(reports.values()))

    def take_strays(self) -> set[str]:
        """Adapters that ranks are to be told to forget."""
        with self._lock:
            strays, self.strays = self.strays - self.held, set()
        return strays

    def fail_all(self, error: CharoniaError) -> None:
        """Fail these loads, and all to be added."""
        with self._lock:
            self._loss = error
            loads, self._loads = self._loads, deque()
        for loading, _ in loads:
            loading.set_exception(error)

    def cancel_all(self) -> None:
        with self._lock:
            loads, self._loads = self._loads, deque()
        for loading, _ in loads:
            loading.cancel()


def _settle(loading: Future[Adapter], reports: list[AdapterReport]) -> None:
    loaded = [each.adapter for each in reports if isinstance(each, RankAdapterLoaded)]
    refused = next((each for each in reports if isinstance(each, RankAdapterRefused)), None)
    if refused is not None:
        loading.set_exception(error_from_code(refused.code, refused.message, refused.field or None))
    elif len({adapter.digest for adapter in loaded}) > 1:
        error = InvalidArgument(f"{loaded[0].path}: ranks read different files", field="lora_path")
        loading.set_exception(error)
    else:
        loading.set_result(msgspec.structs.replace(loaded[0], bytes=sum(adapter.bytes for adapter in loaded)))
