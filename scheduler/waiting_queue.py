"""The queue of sequences that hold no row, one line for each tenant. Knows no blocks, no rows and no budget."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from .fairness import Fairness
from .sequence import Sequence

RANK_ONLY_INTERVAL = 8
"""One admission in so many goes by rank alone, whatever its tenant: no crowd of tenants delays a sequence forever."""


class _QueueEntry(NamedTuple):
    """Entries are in order of rank, then of arrival numbers, which are distinct."""

    rank: int
    arrival_number: int
    sequence: Sequence


_TenantQueues: TypeAlias = dict[int, list[_QueueEntry]]
"""The line of each tenant's slot; none is empty."""


class WaitingQueue:
    """A tenant's sequences by rank, then arrival; `Fairness` knows which tenant is next. Sequences whose prompt is
    long when they are enqueued, by `is_long`, stand in a lane of their own. Parked ones are left out until the block
    they wait for is settled."""

    def __init__(self, fairness: Fairness, is_long: Callable[[Sequence], bool] = lambda _: False) -> None:
        self._fairness = fairness
        self._is_long = is_long
        self._lanes: tuple[_TenantQueues, _TenantQueues] = {}, {}
        self._num_enqueued = 0
        self._num_admitted = 0
        self._parked: dict[bytes, list[Sequence]] = {}
        self._num_parked = 0

    def __len__(self) -> int:
        return self._num_enqueued + self._num_parked

    def __iter__(self) -> Iterator[Sequence]:
        """Every sequence, parked ones last."""
        for lane in self._lanes:
            for line in lane.values():
                yield from (entry.sequence for entry in line)
        for group in self._parked.values():
            yield from group

    @property
    def has_runnable(self) -> bool:
        """Whether a sequence is not parked."""
        return self._num_enqueued > 0

    @property
    def is_rank_only_turn(self) -> bool:
        return self._num_admitted % RANK_ONLY_INTERVAL == RANK_ONLY_INTERVAL - 1

    @property
    def awaited_hashes(self) -> Iterable[bytes]:
        """Hashes of the blocks that parked sequences wait for."""
        return self._parked.keys()

    def peek(self, now: int, long: bool | None = None) -> Sequence | None:
        """The next sequence at step `now`: of all, or of the lane of long prompts or of short ones."""
        lanes = (
            [lane for lane in self._lanes if lane] if long is None else [self._lanes[long]] * bool(self._lanes[long])
        )
        if not lanes:
            return None
        slots = list(lanes[0] if len(lanes) == 1 else lanes[0].keys() | lanes[1].keys())
        if len(slots) > 1:
            among = slots if len(lanes) == 1 and all(self._lanes) else None
            rank_only = self.is_rank_only_turn
            slots = self._fairness.lowest_ranked(among) if rank_only else self._fairness.least_served(now, among)
        return min(lane[slot][0] for lane in lanes for slot in slots if slot in lane).sequence

    def enqueue(self, sequence: Sequence) -> None:
        sequence.long_prompt = self._is_long(sequence)
        line = self._lanes[sequence.long_prompt].setdefault(sequence.tenant_slot, [])
        insort(line, _QueueEntry(sequence.rank, sequence.arrival_number, sequence))
        self._num_enqueued += 1
        self._show_head(sequence.tenant_slot)

    def pop(self, sequence: Sequence) -> None:
        """Remove a sequence that is admitted."""
        self.remove(sequence)
        self._num_admitted += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of its line, or from the parked ones."""
        if sequence.awaited_hash is not None:
            group = self._parked[sequence.awaited_hash]
            group.remove(sequence)
            if not group:
                del self._parked[sequence.awaited_hash]
            self._num_parked -= 1
            sequence.awaited_hash = None
            return
        lane, slot = self._lanes[sequence.long_prompt], sequence.tenant_slot
        line = lane[slot]
        place = bisect_left(line, (sequence.rank, sequence.arrival_number))
        assert line[place].sequence is sequence
        del line[place]
        if not line:
            del lane[slot]
        self._num_enqueued -= 1
        self._show_head(slot)

    def park_until_computed(self, sequence: Sequence, awaited: bytes) -> None:
        """Leave the sequence out until the block of this hash is settled."""
        self.remove(sequence)
        sequence.awaited_hash = awaited
        self._parked.setdefault(awaited, []).append(sequence)
        self._num_parked += 1

    def wake_waiting_for(self, settled: Iterable[bytes]) -> None:
        """Enqueue the sequences parked for these blocks, which were committed or whose computation was given up."""
        if not self._parked:
            return
        for block_hash in settled:
            for sequence in self._parked.pop(block_hash, ()):
                sequence.awaited_hash = None
                self._num_parked -= 1
                self.enqueue(sequence)

    def _show_head(self, slot: int) -> None:
        """Tell `Fairness` the first of a tenant's line."""
        heads = [lane[slot][0] for lane in self._lanes if slot in lane]
        if heads:
            first = min(heads).sequence
            self._fairness.set_head(slot, first.seniority, first.rank)
        else:
            self._fairness.clear_head(slot)
