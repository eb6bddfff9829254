"""Reads the reports of ranks, and notices the first loss of one. Knows nothing of what ranks compute."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic
from typing import NamedTuple

import msgspec

from ...core.errors import CharoniaError, InvalidArgument, NotFound, Unavailable, Unsupported
from ...processes.log_forwarding import LogRecordMessage
from ...scheduler.plan import StepResult
from . import rank_messages as messages
from .rank_layout import LaunchedRanks, RankLayout

_GRACE_SECONDS = 1.0
"""How long the report about a lost peer waits for the peer's own, which says more."""


class ReceivedReport(NamedTuple):
    rank: int
    report: messages.RankReport


class RankMonitor:
    """Reads with one thread for each rank, until all connections are closed. When a rank is lost, the others are
    killed, and then `on_loss` is called, once, with the reason."""

    def __init__(
        self,
        ranks: LaunchedRanks,
        layout: RankLayout,
        on_result: Callable[[StepResult], None],
        on_loss: Callable[[CharoniaError], None],
        on_adapter: Callable[[int, messages.AdapterReport], None],
        on_images: Callable[[int, messages.ImageReport], None],
        on_places: Callable[[int, bytes], None],
    ) -> None:
        self.ranks = ranks
        self._layout = layout
        self._on_result = on_result
        self._on_loss = on_loss
        self._on_adapter = on_adapter
        self._on_images = on_images
        self._on_places = on_places
        self._reports: SimpleQueue[ReceivedReport | CharoniaError] = SimpleQueue()
        self._over = threading.Event()
        self._deciding = threading.Lock()
        self._threads = [
            threading.Thread(target=self._listen, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(layout.world)
        ]
        for thread in self._threads:
            thread.start()

    def next_report(self, deadline: float | None = None) -> ReceivedReport | None:
        """The next report that no callback gets, or None when there is none by `deadline`, of `time.monotonic`. Raises
        the `CharoniaError` of a lost rank."""
        try:
            received = self._reports.get(timeout=None if deadline is None else max(0.0, deadline - monotonic()))
        except Empty:
            return None
        if isinstance(received, CharoniaError):
            raise received
        return received

    def expect_exits(self) -> None:
        """Take the end of a rank for no loss from now on."""
        with self._deciding:
            self._over.set()

    def join(self) -> None:
        """Return when no thread reads a connection any more."""
        for thread in self._threads:
            thread.join()

    def _listen(self, rank: int) -> None:
        connection = self.ranks.connections[rank]
        name = self._layout.rank_name(rank)
        try:
            while not isinstance(report := messages.decode_report(connection.recv_bytes()), messages.RankFailed):
                if isinstance(report, messages.StepComputed):
                    self._on_result(report.result)
                elif isinstance(report, messages.RankAdapterLoaded | messages.RankAdapterRefused):
                    self._on_adapter(rank, report)
                elif isinstance(report, messages.ImagesFetched | messages.ImagesCounted):
                    self._on_images(rank, report)
                elif isinstance(report, messages.PlacesTaken):
                    self._on_places(rank, report.content)
                elif isinstance(report, LogRecordMessage):
                    report.log_here(name)
                else:
                    self._reports.put(ReceivedReport(rank, report))
        except (EOFError, OSError):
            self._lose(lambda: Unavailable(f"{name} {self.ranks.exit_reason(rank)}"))
        else:
            if report.lost_peer:
                self._over.wait(_GRACE_SECONDS)
            # What is wrong with the configuration is wrong for all ranks alike.
            reported = report.error
            if not isinstance(reported.error(), InvalidArgument | Unsupported | NotFound):
                reported = msgspec.structs.replace(reported, message=f"{name}: {reported.message}")
            self._lose(reported.error)

    def _lose(self, reason: Callable[[], CharoniaError]) -> None:
        with self._deciding:
            if self._over.is_set():
                return
            self._over.set()
        error = reason()
        self.ranks.kill()
        self._on_loss(error)
        self._reports.put(error)
