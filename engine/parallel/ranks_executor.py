"""The executor over rank processes: a step plan goes to all of them, its result comes back from one.

Knows nothing of where they run, see `LaunchedRanks`. Imports no torch.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from ...core.adapter import Adapter
from ...core.eager_reason import EagerReason
from ...core.errors import CharoniaError, InvalidArgument, Unavailable
from ...scheduler.plan import MaskSource, StepPlan, StepResult
from ..config import EngineConfig
from ..worker.executor import NO_COPIES, CacheCopies, CachePlaces, Capacity, ImageLayout, ProgressCallback
from ..worker.image_files import ImageDirectorySettings
from . import rank_messages as messages
from .local_ranks import LocalRanks
from .rank_layout import LaunchedRanks, RankLayout
from .rank_monitor import RankMonitor
from .ranks_images import RanksImages

F = TypeVar("F")
R = TypeVar("R", messages.RankStarted, messages.RankJoined, messages.RankLoaded, messages.CacheAllocated)

StartRanks: TypeAlias = Callable[[EngineConfig, RankLayout], LaunchedRanks]
"""Starts the ranks of an engine."""

JOIN_SECONDS = 300.0
"""How long ranks may take to start and to join each other: torch may come from a cold disk."""

_LEAVE_SECONDS = 3.0


class RanksExecutor:
    """An `Executor` over `config.parallel.world` ranks. When one is lost the others are killed at once, and all pending
    steps fail with an error that names it."""

    def __init__(
        self, config: EngineConfig, start_ranks: StartRanks = LocalRanks, join_seconds: float = JOIN_SECONDS
    ) -> None:
        self._config = config
        self._start_ranks = start_ranks
        self._join_seconds = join_seconds
        self._layout = RankLayout(config.parallel.tensor, config.parallel.pipeline)
        self._pending = PendingFutures[StepResult]()
        self._lost: Future[CharoniaError] = Future()
        self._sampled: deque[StepResult] = deque()
        self._adapters = AdapterLoads(self._layout.world)
        self._images = RanksImages(self._layout.world, self._command)
        self._taken = [PendingFutures[bytes]() for _ in range(self._layout.world)]
        self.image_layouts: list[ImageLayout] = []
        self._monitor: RankMonitor | None = None
        self._on_gpu = False
        self._captures = [PendingFutures[float]() for _ in range(self._layout.world)]
        self._idle_captures: list[Future[float]] = []
        self.eager_steps: Mapping[EagerReason, int] = {}
        self.failed_captures = 0
        # By kind and rank: a quick rank may report the next thing before a slow one reports this.
        self._reports: defaultdict[type[messages.RankReport], dict[int, Any]] = defaultdict(dict)

    def load(self, progress: ProgressCallback) -> Capacity:
        """Start the ranks and let each load its share; `progress` is called on the caller's thread.

        Raises:
            Unavailable: a rank did not join, or died; the message names it.
            CharoniaError: a rank's own error.
        """
        progress("ranks", 0.0)
        ranks = self._start_ranks(self._config, self._layout)
        self._monitor = RankMonitor(ranks, self._layout, self._take_report, self._on_loss)
        deadline = monotonic() + self._join_seconds
        store = self._wait_for_all(messages.RankStarted, deadline)[0]
        self._command(messages.JoinRanks(store.host, store.port))
        self._wait_for_all(messages.RankJoined, deadline)
        progress("ranks", 1.0)
        loaded = self._wait_for_all(messages.RankLoaded, progress=progress)
        progress("weights", 1.0)
        machine = loaded[0].capacity.machine
        tightest = tightest_capacity([report.capacity for report in loaded.values()])
        self._on_gpu = tightest.on_gpu
        return tightest._replace(machine=f"{self._layout}, each {machine}" if machine else str(self._layout))

    def allocate(self, blocks: int, host_blocks: int = 0, snapshots: int = 0, host_snapshots: int = 0) -> None:
        """Allocate every rank's part of the cache, and begin anew."""
        self._sampled.clear()
        self._idle_captures.clear()
        self._command(messages.AllocateCache(blocks, host_blocks, snapshots, host_snapshots))
        allocated = self._wait_for_all(messages.CacheAllocated)
        self.image_layouts = [allocated[rank].layout for rank in range(self._layout.world)]

    def open_directory(self, settings: ImageDirectorySettings) -> RanksImages:
        self._command(messages.OpenDirectory(settings))
        return self._images

    def take_places(self, places: CachePlaces) -> Callable[[], list[bytes]]:
        taken = [of_rank.add() for of_rank in self._taken]
        self._command(messages.TakePlaces(places))
        return lambda: [content.result() for content in taken]

    def put_places(self, places: CachePlaces, content: Sequence[memoryview], copies: CacheCopies = NO_COPIES) -> None:
        with suppress(OSError):  # a rank is gone: the monitor fails whatever waits for it
            for connection, of_rank in zip(self._loaded.ranks.connections, content, strict=True):
                connection.send_bytes(messages.encode_message(messages.PutPlaces(places, of_rank, copies)))

    def execute(self, plan: StepPlan, masks: MaskSource | None = None) -> Future[StepResult]:
        step = self._pending.add()
        if not step.done():
            self._idle_captures.clear()
            # For the stages that do not sample: a sequence's next plan follows its last result. More results may come
            # while these are taken.
            results = [self._sampled.popleft() for _ in range(len(self._sampled))]
            has_tokens = any(len(result.rows) for result in results)
            sampled = messages.SampledBatch.from_results(results) if has_tokens else None
            self._command(messages.ComputeStep(plan, sampled, monotonic()))
            if masks is not None and len(plan.masked):
                self._command(messages.ProvideMasks(masks()))
        return step

    def load_adapter(self, path: str) -> Future[Adapter]:
        for digest in self._adapters.take_strays():
            self._command(messages.UnloadRankAdapter(digest))
        loading = self._adapters.add()
        if not loading.done():
            self._command(messages.LoadRankAdapter(path))
        return loading

    def unload_adapter(self, digest: str) -> None:
        self._adapters.held.discard(digest)
        self._command(messages.UnloadRankAdapter(digest))

    def capture_usual_steps(self, progress: ProgressCallback) -> None:
        """See `Executor.capture_usual_steps`. Raises the `CharoniaError` of a lost rank."""
        share = 0.0 if self._on_gpu else 1.0
        while share < 1.0:
            share = min(capture.result() for capture in self._capture_graph(usual=True))
            progress("graphs", share)

    def use_idle_time(self) -> None:
        """See `Executor.use_idle_time`: a graph at a time, until a step comes, or none is left."""
        captures = self._idle_captures
        if not self._on_gpu or not all(capture.done() for capture in captures):
            return
        if captures and all(not capture.exception() and capture.result() == 1.0 for capture in captures):
            return
        self._idle_captures = self._capture_graph(usual=False)

    def _capture_graph(self, usual: bool) -> list[Future[float]]:
        captures = [of_rank.add() for of_rank in self._captures]
        self._command(messages.CaptureGraph(monotonic(), usual))
        return captures

    def watch(self, tell: Callable[[CharoniaError], None]) -> None:
        """See `Executor.watch`: the loss is that of a rank."""
        self._lost.add_done_callback(lambda lost: tell(lost.result()))

    def close(self) -> None:
        if self._monitor is None:
            return
        monitor = self._monitor
        ranks = self._monitor.ranks
        monitor.expect_exits()
        self._command(messages.LeaveRanks())
        ranks.wait_for_exit(0.0 if self._pending.loss else _LEAVE_SECONDS)
        monitor.join()
        ranks.close()
        self._pending.cancel_all()
        self._adapters.cancel_all()
        self._images.forget()
        for taken in self._taken:
            taken.cancel_all()
        for captures in self._captures:
            captures.cancel_all()
        self._monitor = None

    @property
    def _loaded(self) -> RankMonitor:
        if self._monitor is None:
            raise RuntimeError("the executor is not loaded")
        return self._monitor

    def _command(self, command: messages.RankCommand) -> None:
        """Send `command` to all ranks. Waits where a connection is full."""
        message = messages.encode_message(command)
        with suppress(OSError):  # a rank is gone: the monitor fails whatever waits for it
            for connection in self._loaded.ranks.connections:
                connection.send_bytes(message)

    def _wait_for_all(
        self, kind: type[R], deadline: float | None = None, progress: ProgressCallback = lambda phase, fraction: None
    ) -> dict[int, R]:
        """Every rank's report of this kind. Meanwhile `progress` is called as weights are read."""
        reported = 0.0
        while len(self._reports[kind]) < self._layout.world:
            received = self._loaded.next_report(deadline)
            if received is None:
                absent = [rank for rank in range(self._layout.world) if rank not in self._reports[kind]]
                names = ", ".join(map(self._layout.rank_name, absent))
                raise Unavailable(f"{names} did not join within {self._join_seconds:g} s")
            self._reports[type(received.report)][received.rank] = received.report
            read = (
                sum(report.fraction for report in self._reports[messages.WeightsProgress].values()) / self._layout.world
            )
            if reported < read < 1.0:
                reported = read
                progress("weights", read)
        return self._reports.pop(kind)

    def _on_loss(self, error: CharoniaError) -> None:
        self._adapters.fail_all(error)
        self._images.forget()
        self._pending.fail_all(error)
        for taken in self._taken:
            taken.fail_all(error)
        for captures in self._captures:
            captures.fail_all(error)
        self._lost.set_result(error)

    def _take_report(self, rank: int, report: messages.RankReport) -> bool:
        """Called by the monitor's thread of the rank. False: it is one that somebody waits for."""
        match report:
            case messages.StepComputed(result, eager_steps, failed_captures):
                self.eager_steps = eager_steps
                self.failed_captures = failed_captures
                if self._layout.pipeline > 1:
                    self._sampled.append(result)
                self._pending.take_oldest().set_result(result)
            case messages.GraphsCaptured(share):
                self._captures[rank].take_oldest().set_result(share)
            case messages.RankAdapterLoaded() | messages.RankAdapterRefused():
                self._adapters.add_report(rank, report)
            case messages.ImagesMoved() | messages.ImagesCounted():
                self._images.add_report(rank, report)
            case messages.PlacesTaken(content):
                self._taken[rank].take_oldest().set_result(content)
            case _:
                return False
        return True


def tightest_capacity(capacities: Sequence[Capacity]) -> Capacity:
    """What fits into every rank, for all have as many blocks and states: the capacity of the rank whose memory one
    block and one state take the largest share of. Where no rank has both, as when a stage holds no states, it is the
    largest of both in the least memory, though a little more may fit."""

    def shares(capacity: Capacity) -> tuple[float, float]:
        free_bytes = max(capacity.free_bytes, 1)
        return capacity.block_bytes / free_bytes, capacity.state_bytes / free_bytes

    largest = tuple(max(kind) for kind in zip(*map(shares, capacities), strict=True))
    for capacity in capacities:
        if shares(capacity) == largest:
            return capacity
    state_bytes = max(capacity.state_bytes for capacity in capacities)
    block_bytes = max(capacity.block_bytes for capacity in capacities)
    free_bytes = min(capacity.free_bytes for capacity in capacities)
    return capacities[0]._replace(block_bytes=block_bytes, free_bytes=free_bytes, state_bytes=state_bytes)


class PendingFutures(Generic[F]):
    """The futures of results, in order; for any thread. `loss`: the error after which none will come."""

    def __init__(self) -> None:
        self._futures: deque[Future[F]] = deque()
        self._lock = threading.Lock()
        self.loss: CharoniaError | None = None

    def add(self) -> Future[F]:
        """The future of one more result, which has failed already after a loss."""
        added: Future[F] = Future()
        with self._lock:
            if self.loss is None:
                self._futures.append(added)
                return added
        added.set_exception(self.loss)
        return added

    def take_oldest(self) -> Future[F]:
        """Of a result that comes after a loss, when all have failed, it is one that nobody waits for."""
        with self._lock:
            return self._futures.popleft() if self._futures else Future()

    def fail_all(self, error: CharoniaError) -> None:
        """Fail all futures, those that are added later included."""
        with self._lock:
            self.loss = error
        for future in self._take_all():
            future.set_exception(error)

    def cancel_all(self) -> None:
        for future in self._take_all():
            future.cancel()

    def _take_all(self) -> deque[Future[F]]:
        with self._lock:
            taken = self._futures
            self._futures = deque()
        return taken


class AdapterLoads(PendingFutures[Adapter]):
    """Adapters that `world` ranks are loading, each its share. A rank reports in the order of the loads."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self._reports: list[deque[messages.AdapterReport]] = [deque() for _ in range(world)]
        self.held: set[str] = set()
        """Digests of adapters that all ranks have."""
        self.strays: set[str] = set()
        """Digests of adapters that some ranks may have and others could not load."""

    def add_report(self, rank: int, report: messages.AdapterReport) -> None:
        """Settle the oldest load when all ranks have reported on it."""
        with self._lock:
            self._reports[rank].append(report)
            if not self._futures or not all(self._reports):
                return
            loading = self._futures.popleft()
            reports = [of_rank.popleft() for of_rank in self._reports]
            loaded = [report.adapter for report in reports if isinstance(report, messages.RankAdapterLoaded)]
            refused = next((report for report in reports if isinstance(report, messages.RankAdapterRefused)), None)
            digests = {adapter.digest for adapter in loaded}
            (self.held if len(digests) == 1 and refused is None else self.strays).update(digests)
        if refused is not None:
            loading.set_exception(refused.error.error())
        elif len(digests) > 1:
            message = f"{loaded[0].path}: ranks read different files"
            loading.set_exception(InvalidArgument(message, field="lora_path"))
        else:
            loading.set_result(msgspec.structs.replace(loaded[0], bytes=sum(adapter.bytes for adapter in loaded)))

    def take_strays(self) -> set[str]:
        """Digests of adapters that the ranks are to forget."""
        with self._lock:
            strays = self.strays - self.held
            self.strays = set()
        return strays
