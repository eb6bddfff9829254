"""Who comes into the running set and leaves it: row, blocks and place in line change together. Decides nothing."""

from ..kvcache.manager import BlockTable, KVCacheManager
from .rows import RowTable
from .sequence import Sequence
from .waiting_queue import WaitingQueue


class RunningSet:
    """`closed`: rows left since the last plan. `started`: (key, prompt tokens found in the prefix cache) of those that
    came in for the first time since the last updates. `preemptions`, `prefix_queries`, `prefix_hits`: counted since
    `forget_totals`.
    """

    def __init__(self, rows: RowTable, cache: KVCacheManager, line: WaitingQueue) -> None:
        self.rows = rows
        self.cache = cache
        self.waiting = line
        self.closed_rows: list[int] = []
        self.started: list[tuple[int, int]] = []
        self.reset_totals()

    def reset_totals(self) -> None:
        self.preemptions = self.prefix_queries = self.prefix_hits = 0

    def admit(self, sequence: Sequence, table: BlockTable, reserve: int) -> int:
        """Out of the line and into a row, which it is given with this table."""
        self.waiting.pop(sequence)
        row = self.rows.occupy(sequence, table, reserve)
        if not sequence.admitted:
            sequence.admitted = True
            looks = self.cache.prefix_caching and not sequence.lacks_prompt_logprobs
            self.prefix_queries += len(sequence.request.prompt) if looks else 0
            self.prefix_hits += table.cached
            self.started.append((sequence.key, table.cached))
        return row

    def preempt(self, row: int) -> None:
        """It makes way for others, and lines up again as soon as nothing of it is in flight."""
        self.preemptions += 1
        self.remove(row)

    def remove(self, row: int) -> None:
        """Out of the running set: at once, or when the last plan in flight is applied."""
        self.rows.stop_running(row)
        if not self.rows.in_flight.includes_row(row):
            self._release(row)

    def release_settled(self) -> None:
        """Those whose last plan is back."""
        for row in sorted(self.rows.releasing):
            if not self.rows.in_flight.includes_row(row):
                self._release(row)

    def _release(self, row: int) -> None:
        """Free row and blocks; a preempted sequence lines up again with all tokens it knows."""
        self.closed_rows.append(row)
        ended = self.rows.ended[row]
        sequence, table = self.rows.vacate(row)
        self.cache.close(table)
        self.waiting.wake_waiting_for(table.promised[table.committed :])
        if not ended:
            sequence.rank = sequence.seniority  # most of it is still cached
            self.waiting.enqueue(sequence)
