"""The lines of sequences that wait for a row, one for each tenant. Knows no blocks, no rows and no budget."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from .fairness import Fairness
from .sequence import Sequence

RANK_ONLY_INTERVAL = 8
"""One admission in so many goes by rank alone, whoever's it is: no crowd of tenants keeps anybody waiting forever."""


class _QueueEntry(NamedTuple):
    """Ranks decide, then numbers, which are distinct."""

    rank: int
    number: int
    sequence: Sequence


_TenantQueues: TypeAlias = dict[int, list[_QueueEntry]]
"""A line for each tenant's slot; none is empty."""


class WaitingQueue:
    """A tenant's sequences by rank, then arrival; whose turn it is, `Fairness` knows. Those with a long prompt, as
    `is_long` finds when they line up, stand in a lane of their own. Parked ones stand aside until the block they wait
    for is settled."""

    def __init__(self, fairness: Fairness, is_long: Callable[[Sequence], bool] = lambda _: False) -> None:
        self._fairness = fairness
        self._is_long = is_long
        self._lanes: tuple[_TenantQueues, _TenantQueues] = {}, {}
        self._waiting = 0
        self._taken = 0
        self._parked: dict[bytes, list[Sequence]] = {}
        self._aside = 0

    def __len__(self) -> int:
        return self._waiting + self._aside

    def __iter__(self) -> Iterator[Sequence]:
        """Everyone, parked ones last."""
        for lane in self._lanes:
            for line in lane.values():
                yield from (place.sequence for place in line)
        for group in self._parked.values():
            yield from group

    @property
    def has_runnable(self) -> bool:
        """Somebody may be next: not all stand aside."""
        return self._waiting > 0

    @property
    def is_rank_only_turn(self) -> bool:
        return self._taken % RANK_ONLY_INTERVAL == RANK_ONLY_INTERVAL - 1

    def peek(self, now: int) -> Sequence | None:
        """Who is next at step `now`; parked ones are nobody's predecessors."""
        return self._first([lane for lane in self._lanes if lane], now)

    def peek_lane(self, long: bool, now: int) -> Sequence | None:
        """Who is next in one lane."""
        return self._first([self._lanes[long]] if self._lanes[long] else [], now)

    def _first(self, lanes: list[_TenantQueues], now: int) -> Sequence | None:
        if not lanes:
            return None
        slots = self._turn(lanes, now)
        return min(lane[slot][0] for lane in lanes for slot in slots if slot in lane).sequence

    def _turn(self, lanes: list[_TenantQueues], now: int) -> list[int]:
        """Slots whose turn it is among those in these lanes."""
        slots = list(lanes[0] if len(lanes) == 1 else lanes[0].keys() | lanes[1].keys())
        if len(slots) < 2:
            return slots
        among = slots if len(lanes) == 1 and all(self._lanes) else None
        return (
            self._fairness.lowest_ranked(among) if self.is_rank_only_turn else self._fairness.least_served(now, among)
        )

    def enqueue(self, sequence: Sequence) -> None:
        sequence.long_prompt = self._is_long(sequence)
        line = self._lanes[sequence.long_prompt].setdefault(sequence.tenant_slot, [])
        insort(line, _QueueEntry(sequence.rank, sequence.arrival_number, sequence))
        self._waiting += 1
        self._show(sequence.tenant_slot)

    def pop(self, sequence: Sequence) -> None:
        """It is admitted."""
        self.remove(sequence)
        self._taken += 1

    def remove(self, sequence: Sequence) -> None:
        """Out of the line, or from the side."""
        if sequence.awaited_hash is None:
            self._step_out(sequence)
            return
        group = self._parked[sequence.awaited_hash]
        group.remove(sequence)
        if not group:
            del self._parked[sequence.awaited_hash]
        self._aside -= 1
        sequence.awaited_hash = None

    def _step_out(self, sequence: Sequence) -> None:
        lane = self._lanes[sequence.long_prompt]
        line = lane[sequence.tenant_slot]
        place = bisect_left(line, (sequence.rank, sequence.arrival_number))
        assert line[place].sequence is sequence
        del line[place]
        if not line:
            del lane[sequence.tenant_slot]
        self._waiting -= 1
        self._show(sequence.tenant_slot)

    def _head(self, slot: int) -> _QueueEntry:
        return min(lane[slot][0] for lane in self._lanes if slot in lane)

    def _show(self, slot: int) -> None:
        if any(slot in lane for lane in self._lanes):
            head = self._head(slot).sequence
            self._fairness.set_head(slot, head.seniority, head.rank)
        else:
            self._fairness.clear_head(slot)

    def park_until_computed(self, sequence: Sequence, awaited: bytes) -> None:
        """Stand aside until the block of this hash is settled."""
        self.remove(sequence)
        sequence.awaited_hash = awaited
        self._parked.setdefault(awaited, []).append(sequence)
        self._aside += 1

    def wake_waiting_for(self, settled: Iterable[bytes]) -> None:
        """These blocks were committed, or their computation was given up: whoever waits for them lines up again."""
        if not self._parked:
            return
        for block_hash in settled:
            for sequence in self._parked.pop(block_hash, ()):
                sequence.awaited_hash = None
                self._aside -= 1
                self.enqueue(sequence)

    @property
    def awaited_hashes(self) -> Iterable[bytes]:
        """Hashes somebody stands aside for."""
        return self._parked.keys()
