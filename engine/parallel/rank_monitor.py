"""Hears what ranks say, and notices the first that is lost. Knows nothing of what they compute."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic
from typing import NamedTuple

import msgspec

from ...core.errors import CharoniaError, ErrorCode, Unavailable, error_from_code
from ...processes.log_forwarding import LogRecordMessage
from .layout import RankLayout
from .local_ranks import LaunchedRanks
from .rank_messages import EncodedResult, RankFailed, RankReport

_GRACE_SECONDS = 1.0
"""How long a rank that lost another one waits for that one's own end to be known, which says more."""


class ReceivedReport(NamedTuple):
    rank: int
    report: RankReport


class RankMonitor:
    """Threads of its own, one for each rank, until all lines are broken.

    `on_result` is told results as they come; `on_loss` why no more will come, once, having killed what is left.
    """

    def __init__(
        self,
        crew: LaunchedRanks,
        layout: RankLayout,
        on_result: Callable[[EncodedResult], None],
        on_loss: Callable[[CharoniaError], None],
    ) -> None:
        self._crew, self._layout = crew, layout
        self._on_result, self._on_loss = on_result, on_loss
        self._said: SimpleQueue[ReceivedReport | CharoniaError] = SimpleQueue()
        self._decode = msgspec.msgpack.Decoder[RankReport](RankReport).decode
        self._over = threading.Event()
        self._deciding = threading.Lock()
        self._threads = [
            threading.Thread(target=self._listen, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(layout.world)
        ]
        for thread in self._threads:
            thread.start()

    def next_report(self, deadline: float | None = None) -> ReceivedReport | None:
        """What a rank says next, results apart; None when it is later than `deadline`.

        Raises:
            CharoniaError: a rank is lost.
        """
        try:
            said = self._said.get(timeout=None if deadline is None else max(0.0, deadline - monotonic()))
        except Empty:
            return None
        if isinstance(said, CharoniaError):
            raise said
        return said

    def expect_exits(self) -> None:
        """From now on ranks may go."""
        with self._deciding:
            self._over.set()

    def join(self) -> None:
        """All lines are broken: return when nobody reads them any more."""
        for thread in self._threads:
            thread.join()

    def _listen(self, rank: int) -> None:
        line = self._crew.connections[rank]
        try:
            while not isinstance(report := self._decode(line.recv_bytes()), RankFailed):
                if isinstance(report, EncodedResult):
                    self._on_result(report)
                elif isinstance(report, LogRecordMessage):
                    report.log_here(self._layout.rank_name(rank))
                else:
                    self._said.put(ReceivedReport(rank, report))
        except (EOFError, OSError):
            self._lose(lambda: Unavailable(f"{self._layout.rank_name(rank)} {self._crew.exit_reason(rank)}"))
        else:
            if report.lost_peer:
                self._over.wait(_GRACE_SECONDS)
            self._lose(lambda: _error_of_rank(self._layout.rank_name(rank), report))

    def _lose(self, reason: Callable[[], CharoniaError]) -> None:
        with self._deciding:
            if self._over.is_set():
                return
            self._over.set()
        error = reason()
        self._crew.kill()
        self._on_loss(error)
        self._said.put(error)


def _error_of_rank(name: str, broken: RankFailed) -> CharoniaError:
    """What is wrong with the configuration is wrong for all ranks alike."""
    asked = broken.code in (ErrorCode.INVALID_ARGUMENT, ErrorCode.UNSUPPORTED, ErrorCode.NOT_FOUND)
    return error_from_code(broken.code, broken.message if asked else f"{name}: {broken.message}", broken.field or None)
