"""Room for different adapters among running sequences, and who waits for it. Knows no rows, and nothing of matrices."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable

from ..sequence import Sequence
from ..waiting_queue import WaitingQueue

MAX_WAIT_STEPS = 256
"""After so many steps of waiting for room a sequence goes before its juniors with an adapter: those that are asked for
all the time do not keep it out forever."""

ADAPTER_ROOM = b"room for another adapter"
"""In place of a block's hash: what sequences wait for while too many adapters run."""


class AdapterRoom:
    """At most `most` adapters run; sequences with others are set aside in the `waiting` queue."""

    def __init__(self, most: int, waiting: WaitingQueue) -> None:
        self._most = most
        self._waiting = waiting
        self._rows: Counter[str] = Counter()
        """How many rows have each adapter that runs."""
        self._waits_since: dict[Sequence, int] = {}
        """By sequence that was set aside, is not admitted since and not overdue: the step in which it was, the longest
        wait first."""
        self._overdue: list[Sequence] = []
        """Those that have waited for `MAX_WAIT_STEPS`, the most senior first. None holds up one that is senior to it,
        as a more urgent one is."""

    def admits(self, sequence: Sequence, step: int) -> bool:
        """Whether the sequence's adapter may run beside those that do. If not, it is set aside until fewer run."""
        adapter = sequence.spec.adapter
        if not adapter:
            return True
        self._note_overdue(step)
        has_turn = not self._overdue or _age(sequence) <= _age(self._overdue[0])
        if has_turn and (adapter in self._rows or len(self._rows) < self._most):
            return True
        if self._overdue_index(sequence) is None:
            self._waits_since.setdefault(sequence, step)
        self._waiting.set_aside(sequence, ADAPTER_ROOM)
        return False

    def _note_overdue(self, step: int) -> None:
        while self._waits_since:
            sequence, since = next(iter(self._waits_since.items()))
            if step - since < MAX_WAIT_STEPS:
                return
            del self._waits_since[sequence]
            insort(self._overdue, sequence, key=_age)

    def _overdue_index(self, sequence: Sequence) -> int | None:
        index = bisect_left(self._overdue, _age(sequence), key=_age)
        return index if self._overdue[index : index + 1] == [sequence] else None

    def enter(self, sequence: Sequence) -> None:
        """The sequence gets a row."""
        if sequence.spec.adapter:
            self._rows[sequence.spec.adapter] += 1
        self.forget(sequence)

    def leave(self, sequence: Sequence) -> None:
        """The sequence has left its row: if no other has its adapter, there is room."""
        adapter = sequence.spec.adapter
        if not adapter:
            return
        self._rows[adapter] -= 1
        if not self._rows[adapter]:
            del self._rows[adapter]
            self._waiting.wake((ADAPTER_ROOM,))

    def forget(self, sequence: Sequence) -> None:
        """The sequence waits no more. The others may have waited for this one."""
        if (index := self._overdue_index(sequence)) is not None:
            del self._overdue[index]
        elif self._waits_since.pop(sequence, None) is None:
            return
        self._waiting.wake((ADAPTER_ROOM,))

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Recompute what runs. Raises `AssertionError`."""
        assert self._rows == Counter(filter(None, (sequence.spec.adapter for sequence in running))), "miscounted"
        assert {*self._waits_since, *self._overdue} <= {*self._waiting}, "an admitted sequence waits for room"
        assert self._overdue == sorted(self._overdue, key=_age)
        assert not self._waits_since.keys() & {*self._overdue}


def _age(sequence: Sequence) -> tuple[int, int]:
    """The lowest is the most senior; no two have the same."""
    return sequence.seniority, sequence.arrival_number
