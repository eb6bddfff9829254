"""Reads the reports of ranks, and notices the first loss of one. Knows nothing of what ranks compute."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic
from typing import NamedTuple

import msgspec

from ...core.errors import CharoniaError, InvalidArgument, NotFound, Unavailable, Unsupported
from ...processes.log_forwarding import LogRecordMessage
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
        on_report: Callable[[int, messages.RankReport], bool],
        on_loss: Callable[[CharoniaError], None],
    ) -> None:
        """`on_report`: takes a report of a rank at once, in the thread that reads it; False: `next_report` gives it."""
        self.ranks = ranks
        self._layout = layout
        self._on_report = on_report
        self._on_loss = on_loss
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
        """The next report that was not taken at once, or None when there is none by `deadline`, of `time.monotonic`.
        Raises the `CharoniaError` of a lost rank."""
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
                if isinstance(report, LogRecordMessage):
                    report.log_here(name)
                elif not self._on_report(rank, report):
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
