"""The queue of sequences that hold no row. Knows no blocks, no rows and no budget."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Set
from typing import TypeAlias

from .sequence import Sequence
from .tenants.fairness import Fairness

RANK_ONLY_INTERVAL = 8
"""One admission in so many goes by rank alone, whatever its tenant: no crowd of tenants delays a sequence forever."""


_Lane: TypeAlias = dict[int, list[Sequence]]
"""The waiting sequences of each tenant's slot, in order; none is empty."""


class WaitingQueue:
    """A tenant's sequences by rank, then arrival; `Fairness` knows which tenant is next. Sequences whose prompt was
    long when they were enqueued, as `measure` notes in them, stand in a lane of their own. Those that wait for more
    than their turn, such as a block that another one computes, are set aside until that is settled."""

    def __init__(self, fairness: Fairness, measure: Callable[[Sequence], None] = lambda _: None) -> None:
        self._fairness = fairness
        self._measure = measure
        self._lanes: tuple[_Lane, _Lane] = {}, {}
        self._num_enqueued = 0
        self._num_admitted = 0
        self._set_aside: dict[bytes, list[Sequence]] = {}
        self._num_set_aside = 0
        self.num_preempted = 0
        """Sequences that have run before."""

    def __len__(self) -> int:
        return self._num_enqueued + self._num_set_aside

    def __iter__(self) -> Iterator[Sequence]:
        """Every sequence, those set aside last."""
        for lane in (*self._lanes, self._set_aside):
            for line in lane.values():
                yield from line

    @property
    def has_runnable(self) -> bool:
        """Whether a sequence is not set aside."""
        return self._num_enqueued > 0

    @property
    def num_set_aside(self) -> int:
        return self._num_set_aside

    @property
    def is_rank_only_turn(self) -> bool:
        return self._num_admitted % RANK_ONLY_INTERVAL == RANK_ONLY_INTERVAL - 1

    @property
    def awaited(self) -> Set[bytes]:
        """What sequences are set aside for."""
        return self._set_aside.keys()

    def peek(self, now: int, long: bool | None = None) -> Sequence | None:
        """The next sequence at step `now`: of all, or of the lane of long prompts or of short ones."""
        lanes = [lane for lane in (self._lanes if long is None else (self._lanes[long],)) if lane]
        if not lanes:
            return None
        slots = list(lanes[0] if len(lanes) == 1 else lanes[0].keys() | lanes[1].keys())
        if len(slots) > 1:
            among = slots if len(lanes) == 1 and all(self._lanes) else None
            slots = self._fairness.next_tenants(now, self.is_rank_only_turn, among)
        heads = [lane[slot][0] for lane in lanes for slot in slots if slot in lane]
        return min(heads, key=queue_order)

    def first(self, most: int) -> list[Sequence]:
        """The first sequences of every line: as many of each, `most` in all."""
        lines = [line for lane in self._lanes for line in lane.values()][:most]
        share = -(-most // max(len(lines), 1))
        return [sequence for line in lines for sequence in line[:share]][:most]

    def enqueue(self, sequence: Sequence) -> None:
        self._measure(sequence)
        line = self._lanes[sequence.long_prompt].setdefault(sequence.tenant_slot, [])
        insort(line, sequence, key=queue_order)
        self._num_enqueued += 1
        self._update_head(sequence.tenant_slot)

    def enqueue_preempted(self, sequence: Sequence) -> None:
        self.num_preempted += 1
        self.enqueue(sequence)

    def pop(self, sequence: Sequence) -> None:
        """Remove a sequence that is admitted."""
        self.remove(sequence)
        self._num_admitted += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of its line, or from those set aside, for good."""
        self._take_out(sequence)
        self.num_preempted -= sequence.admitted

    def _take_out(self, sequence: Sequence) -> None:
        if sequence.awaited is not None:
            group = self._set_aside[sequence.awaited]
            group.remove(sequence)
            if not group:
                del self._set_aside[sequence.awaited]
            self._num_set_aside -= 1
            sequence.awaited = None
            return
        lane, slot = self._lanes[sequence.long_prompt], sequence.tenant_slot
        line = lane[slot]
        index = bisect_left(line, queue_order(sequence), key=queue_order)
        assert line[index] is sequence
        del line[index]
        if not line:
            del lane[slot]
        self._num_enqueued -= 1
        self._update_head(slot)

    def set_aside(self, sequence: Sequence, awaited: bytes) -> None:
        """Leave the sequence out until this is settled: the block of this hash, or what else it stands for."""
        self._take_out(sequence)
        sequence.awaited = awaited
        self._set_aside.setdefault(awaited, []).append(sequence)
        self._num_set_aside += 1

    def wake(self, settled: Iterable[bytes]) -> None:
        """Enqueue the sequences that wait for these: blocks that were committed, or whose computation was given up."""
        if not self._set_aside:
            return
        for awaited in settled:
            for sequence in self._set_aside.pop(awaited, ()):
                sequence.awaited = None
                self._num_set_aside -= 1
                self.enqueue(sequence)

    def _update_head(self, slot: int) -> None:
        heads = [lane[slot][0] for lane in self._lanes if slot in lane]
        self._fairness.set_head(slot, min(heads, key=queue_order, default=None))


def queue_order(sequence: Sequence) -> tuple[int, int]:
    """The lowest is first; no two have the same."""
    return sequence.rank, sequence.arrival_number
