"""The queue in front of an engine that batches by itself: the order of its requests, and how many it has at once.

The order is by class, then fair share of the tenants, then arrival, as in our own scheduler, whose parts these are; its
steps are ticks of a clock here. Requests that were handed over are scheduled by the engine.
"""

import time
from collections.abc import Callable

import numpy as np

from ...scheduler.sequence import Sequence, SequenceRequest
from ...scheduler.waiting_queue import OUTPUT_WEIGHT, Fairness, WaitingQueue
from ..core.messages import AddRequest

TICKS_PER_SECOND = 50
"""Ticks of the clock that stand for steps."""
_AGEING = 5 * TICKS_PER_SECOND
"""Ticks after which a waiting request is as urgent as the next class."""
_CREDIT = 8192.0
"""Tokens that a tenant may save by asking for less than its share."""
_NO_TOKENS = np.empty(0, np.int32)


class AdmissionQueue:
    """`places`: sequences that may be on the way at once."""

    def __init__(self, places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._places = places
        self._clock = clock
        self._fairness = Fairness(_AGEING, _CREDIT)
        self._waiting = WaitingQueue(self._fairness)
        self._arrivals = 0
        self.running = 0

    def __len__(self) -> int:
        """The number of sequences that wait."""
        return len(self._waiting)

    def enqueue(self, add: AddRequest) -> Sequence:
        """Append a request; the sequence stands for it in the other methods."""
        seniority = self._now() + add.priority * _AGEING
        slot = self._fairness.slot_of(add.tenant, add.weight)
        request = SequenceRequest(key=add.key, prompt=_NO_TOKENS, max_tokens=add.max_tokens)
        sequence = Sequence(request, self._arrivals, seniority, seniority, [], slot)
        self._arrivals += 1
        self._fairness.sequence_arrived(slot)
        self._waiting.enqueue(sequence)
        return sequence

    def pop_next(self) -> Sequence | None:
        """The next sequence to hand over, which counts as running from then on; None if none waits or all places are
        taken."""
        if self.running >= self._places or not len(self._waiting):
            return None
        sequence = self._waiting.peek(self._now())
        assert sequence is not None
        self._waiting.pop(sequence)
        sequence.admitted = True
        self.running += 1
        return sequence

    def release(self, sequence: Sequence) -> None:
        """The sequence has ended, or was given up while it waited."""
        if sequence.admitted:
            self.running -= 1
        else:
            self._waiting.remove(sequence)
        self._fairness.sequence_ended(sequence.tenant_slot)

    def charge(self, sequence: Sequence, prompt: int, outputs: int = 0) -> None:
        """Charge the tenant for so many prompt tokens computed and so many generated."""
        self._fairness.charge_prompt(sequence.tenant_slot, prompt + round(OUTPUT_WEIGHT * outputs))

    def check_integrity(self) -> None:
        """Raises `AssertionError` where the counts do not add up."""
        assert 0 <= self.running <= self._places
        assert len(self._waiting) == sum(1 for _ in self._waiting)

    def _now(self) -> int:
        return int(self._clock() * TICKS_PER_SECOND)
