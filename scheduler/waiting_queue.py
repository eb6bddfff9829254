"""The queue of sequences that hold no row, and which tenant is next. Knows no blocks, no rows and no budget."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Set
from typing import TypeAlias

import numpy as np

from .plan import LongArray
from .sequence import Sequence

RANK_ONLY_INTERVAL = 8
"""One admission in so many goes by rank alone, whatever its tenant: no crowd of tenants delays a sequence forever."""

OUTPUT_WEIGHT = 2.0
"""A generated token counts as much as so many computed prompt tokens, as in the paper."""

_NOT_WAITING = 1 << 62
_FIRST_SLOTS = 8


class Fairness:
    """A virtual token counter per tenant, after Sheng et al., "Fairness in Serving Large Language Models" (2024).

    Tenants are numbered by slots, in arrays: choosing one is a handful of array operations however many there are.
    Among those whose first waiting sequence has the same class, the one served least is next.
    """

    def __init__(self, ageing_steps: int, credit: float, step_tokens: int = 1) -> None:
        """`ageing_steps`: of waiting, by which a sequence counts as of the next more urgent class. `credit`: the most,
        in the unit of `service`, that a tenant may save that asks for less than its share; an idle tenant saves none.
        `step_tokens`: of a prompt, that count as a step of waiting in its rank."""
        self._ageing_steps = ageing_steps
        self.step_tokens = step_tokens
        self._credit = credit
        self._slots: dict[str, int] = {}
        self._live: list[int] = []
        self._last_service = 0.0  # of the last tenant in the queue, when it became empty
        self.service = np.zeros(_FIRST_SLOTS)
        """By slot: weighted tokens computed for a tenant, divided by the tenant's weight."""
        self._weights = np.ones(_FIRST_SLOTS)
        self._seniority = np.full(_FIRST_SLOTS, _NOT_WAITING)  # of the first of each tenant's waiting sequences
        self._ranks = np.full(_FIRST_SLOTS, _NOT_WAITING)

    @property
    def single_tenant(self) -> bool:
        """Whether there has been one tenant at most: nothing needs to be counted."""
        return len(self._slots) < 2

    def slot_of(self, tenant: str, weight: float) -> int:
        """The tenant's number; the latest weight holds."""
        slot = self._slots.setdefault(tenant, len(self._slots))
        if slot == len(self._live):
            self._live.append(0)
        if slot == len(self.service):
            self.service = np.concatenate([self.service, np.zeros(slot)])
            self._weights = np.concatenate([self._weights, np.ones(slot)])
            self._seniority = np.concatenate([self._seniority, np.full(slot, _NOT_WAITING)])
            self._ranks = np.concatenate([self._ranks, np.full(slot, _NOT_WAITING)])
        self._weights[slot] = weight
        return slot

    def sequence_arrived(self, slot: int) -> None:
        """Count a sequence that is about to be enqueued. A tenant without a waiting one is lifted to the one served
        least: service it did not ask for is no credit, but for a little while it has a sequence running. Without that,
        a tenant that asks for just its share would lose a bit of it in each pause."""
        self._live[slot] += 1
        if self._seniority[slot] != _NOT_WAITING:
            return
        waiting = self.service[self._seniority != _NOT_WAITING]
        floor = waiting.min() if len(waiting) else self._last_service
        credit = self._credit if self._live[slot] > 1 else 0.0
        self.service[slot] = max(self.service[slot], floor - credit)

    def sequence_ended(self, slot: int) -> None:
        self._live[slot] -= 1

    def charge_prompt(self, slot: int, tokens: int) -> None:
        """Count prompt tokens computed for a tenant."""
        if not self.single_tenant:
            self.service[slot] += tokens / self._weights[slot]

    def charge_outputs(self, slots: list[int], counts: list[int]) -> None:
        """Count `counts[i]` tokens generated for the tenant `slots[i]`; one may appear several times."""
        tokens = np.bincount(slots, weights=counts, minlength=len(self.service))
        self.service += OUTPUT_WEIGHT * tokens / self._weights

    def set_head(self, slot: int, head: Sequence | None) -> None:
        """The tenant's first waiting sequence is now this one."""
        if head is not None:
            self._seniority[slot], self._ranks[slot] = head.seniority, head.rank
        else:
            self._seniority[slot] = self._ranks[slot] = _NOT_WAITING
            self._last_service = float(self.service[slot])

    def next_tenants(self, now: int, by_rank: bool, among: list[int] | None = None) -> list[int]:
        """Waiting tenants, or those `among` them, that are next at step `now`: those served least, or those whose first
        sequence has the lowest rank. Several where they are alike."""
        if by_rank:
            ranks = _only(among, self._ranks)
            return np.flatnonzero(ranks == ranks.min()).tolist()
        classes = np.maximum(0, -((now - _only(among, self._seniority)) // self._ageing_steps))
        service = np.where(classes == classes.min(), self.service, np.inf)
        return np.flatnonzero(service == service.min()).tolist()

    def fair_share_key(self, sequence: Sequence, now: int) -> tuple[int, float]:
        """(class, service), which decide between sequences of two tenants, the lower first."""
        urgency = max(0, -((now - sequence.seniority) // self._ageing_steps))
        return urgency, float(self.service[sequence.tenant_slot])


def _only(slots: list[int] | None, values: LongArray) -> LongArray:
    """The values of these slots, as if no other tenant waited."""
    if slots is None:
        return values
    kept = np.full_like(values, _NOT_WAITING)
    kept[slots] = values[slots]
    return kept


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
