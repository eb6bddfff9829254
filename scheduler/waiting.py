"""The lines of sequences that wait for a row, one for each tenant. Knows no blocks, no rows and no budget."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from .fairness import Fairness
from .sequence import Sequence

SENIORS_TURN = 8
"""One admission in so many goes by rank alone, whoever's it is: no crowd of tenants keeps anybody waiting forever."""


class WaitingLine:
    """A tenant's sequences by rank, then arrival; whose turn it is, `Fairness` knows. Parked ones stand aside until the
    block they wait for is settled."""

    def __init__(self, fairness: Fairness) -> None:
        self._fairness = fairness
        self._lines: dict[int, list[tuple[int, int, Sequence]]] = {}
        self._waiting = 0
        self._taken = 0
        self._parked: dict[bytes, list[Sequence]] = {}
        self._aside = 0

    def __len__(self) -> int:
        return self._waiting + self._aside

    def __iter__(self) -> Iterator[Sequence]:
        """Everyone, parked ones last."""
        for line in self._lines.values():
            yield from (sequence for _, _, sequence in line)
        for group in self._parked.values():
            yield from group

    @property
    def is_seniors_turn(self) -> bool:
        return self._taken % SENIORS_TURN == SENIORS_TURN - 1

    def first(self, now: int) -> Sequence | None:
        """Who is next at step `now`; parked ones are nobody's predecessors."""
        if len(self._lines) < 2:
            return next((line[0][2] for line in self._lines.values()), None)
        slots = self._fairness.first_in_rank() if self.is_seniors_turn else self._fairness.least_served(now)
        return min(self._lines[slot][0] for slot in slots)[2]

    def join(self, sequence: Sequence) -> None:
        line = self._lines.setdefault(sequence.slot, [])
        insort(line, (sequence.rank, sequence.number, sequence))
        self._waiting += 1
        self._show(sequence.slot)

    def take(self, sequence: Sequence) -> None:
        """It is admitted."""
        self.leave(sequence)
        self._taken += 1

    def leave(self, sequence: Sequence) -> None:
        """Out of the line, or from the side."""
        if sequence.awaited is None:
            line = self._lines[sequence.slot]
            place = bisect_left(line, (sequence.rank, sequence.number))
            assert line[place][2] is sequence
            del line[place]
            self._waiting -= 1
            self._show(sequence.slot)
            return
        group = self._parked[sequence.awaited]
        group.remove(sequence)
        if not group:
            del self._parked[sequence.awaited]
        self._aside -= 1
        sequence.awaited = None

    def _show(self, slot: int) -> None:
        line = self._lines[slot]
        if line:
            self._fairness.show(slot, line[0][2].seniority, line[0][2].rank)
        else:
            del self._lines[slot]
            self._fairness.hide(slot)

    def park(self, sequence: Sequence, awaited: bytes) -> None:
        """Stand aside until the block of this hash is settled."""
        self.leave(sequence)
        sequence.awaited = awaited
        self._parked.setdefault(awaited, []).append(sequence)
        self._aside += 1

    def wake(self, settled: Iterable[bytes]) -> None:
        """These blocks were committed, or their computation was given up: whoever waits for them lines up again."""
        if not self._parked:
            return
        for block_hash in settled:
            for sequence in self._parked.pop(block_hash, ()):
                sequence.awaited = None
                self._aside -= 1
                self.join(sequence)

    @property
    def awaited(self) -> Iterable[bytes]:
        """Hashes somebody stands aside for."""
        return self._parked.keys()
