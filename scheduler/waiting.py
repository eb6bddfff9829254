"""The line of sequences that wait for a row, in policy order. Knows no blocks, no rows and no budget."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from .sequence import Sequence


class WaitingLine:
    """Sequences by rank, then arrival. Parked ones stand aside until the block they wait for is settled."""

    def __init__(self) -> None:
        self._line: list[tuple[int, int, Sequence]] = []
        self._parked: dict[bytes, list[Sequence]] = {}
        self._aside = 0

    def __len__(self) -> int:
        return len(self._line) + self._aside

    def __iter__(self) -> Iterator[Sequence]:
        """Everyone, parked ones last."""
        yield from (sequence for _, _, sequence in self._line)
        for group in self._parked.values():
            yield from group

    @property
    def first(self) -> Sequence | None:
        """Who is next; parked ones are nobody's predecessors."""
        return self._line[0][2] if self._line else None

    def join(self, sequence: Sequence) -> None:
        insort(self._line, (sequence.rank, sequence.number, sequence))

    def leave(self, sequence: Sequence) -> None:
        """Out of the line, or from the side."""
        if sequence.awaited is None:
            place = bisect_left(self._line, (sequence.rank, sequence.number))
            assert self._line[place][2] is sequence
            del self._line[place]
            return
        group = self._parked[sequence.awaited]
        group.remove(sequence)
        if not group:
            del self._parked[sequence.awaited]
        self._aside -= 1
        sequence.awaited = None

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
