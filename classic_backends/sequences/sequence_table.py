"""The open sequences of a stateful model: their slots on instances, the backlog, and how long each may be idle.

Pure bookkeeping over times (nanoseconds) that its caller gives.

    add_request(start)   assign_slots()               finished after its end, cancelled or idle
    -> backlog       ->  has a slot: pending <-> idle -> gone; the slot is free
       cancelled, or past its deadline            -> gone
"""

import logging
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from ...core.errors import InvalidArgument
from ..batching.inference_job import SequenceContext, SequenceId
from ..batching.instance import Instance
from ..batching.queued_request import QueuedRequest
from .sequence_config import SlotRules

log = logging.getLogger(__name__)


class SequenceSlot(NamedTuple):
    """Room for one sequence on an instance. Low rows are assigned first: then instances share the work, and batches
    with fixed rows are short."""

    row: int
    serial: int
    instance: Instance


@dataclass(slots=True, eq=False)
class OpenSequence(SequenceContext):
    pending: dict[QueuedRequest, None] = field(default_factory=dict)
    """Requests without an answer, in order."""
    slot: SequenceSlot | None = None
    closed: bool = False
    """No more requests come."""
    slot_deadline: int | None = None
    """Until when it may wait for a slot; None for ever."""


class SequenceTable:
    """All open sequences of one model, and the slots of its instances."""

    def __init__(self, model: str, rules: SlotRules) -> None:
        self._model = model
        self._rules = rules
        self._open: dict[SequenceId, OpenSequence] = {}
        self._by_request: dict[QueuedRequest, OpenSequence] = {}
        self._backlog: dict[OpenSequence, None] = {}
        self._idle_since: dict[OpenSequence, int] = {}
        self._free: list[SequenceSlot] = []
        """Slots that were left, and of each instance the first that was never used."""
        self._used: dict[Instance, int] = {}
        """How many slots of each instance were ever used."""
        self._serial = count()
        self._id_serial = count()

    @property
    def waiting_requests(self) -> int:
        """Requests of sequences without a slot."""
        return sum(len(sequence.pending) for sequence in self._backlog)

    @property
    def waiting_sequences(self) -> int:
        return len(self._backlog)

    @property
    def total_slots(self) -> int:
        return len(self._used) * self._rules.slots_per_instance

    @property
    def used_slots(self) -> int:
        return sum(self._used.values()) - sum(slot.row < self._used[slot.instance] for slot in self._free)

    def add_instance(self, instance: Instance) -> None:
        self._used[instance] = 0
        heappush(self._free, SequenceSlot(0, next(self._serial), instance))

    def remove_instance(self, instance: Instance) -> None:
        """Forget an instance; its sequences are lost."""
        self._used.pop(instance, None)
        self._free = [slot for slot in self._free if slot.instance != instance]
        heapify(self._free)
        for sequence in {*self._idle_since, *self._by_request.values(), *self._open.values()} - self._backlog.keys():
            if sequence.slot is not None and sequence.slot.instance == instance:
                self.close_sequence(sequence)

    def add_request(self, request: QueuedRequest, now: int) -> OpenSequence:
        """The sequence of a new request; if it has no slot it is in the backlog. Raises `InvalidArgument` if it is not
        open, and the request does not start it."""
        flags = request.job.sequence_flags
        assert flags is not None
        if self._rules.iterative and not flags.id:
            flags = request.job.sequence_flags = flags._replace(id=self._new_id(isinstance(flags.id, str)))
        sequence = self._open.get(flags.id)
        if sequence is None:
            if not flags.start:
                message = f"inference request for sequence {flags.id} to model '{self._model}' must specify the START "
                raise InvalidArgument(f"{message}flag on the first request of the sequence", field="sequence_start")
            sequence = self._open[flags.id] = OpenSequence(flags.id)
            self._backlog[sequence] = None
        elif flags.start:
            log.warning("model '%s': sequence %s starts anew, though it had not ended", self._model, flags.id)
        if flags.end:
            sequence.closed = True
            del self._open[flags.id]
        request.job.sequence = sequence
        sequence.pending[request] = None
        self._by_request[request] = sequence
        self._idle_since.pop(sequence, None)
        if request.timeout_ns and sequence.slot is None:
            deadline = now + request.timeout_ns
            sequence.slot_deadline = min(sequence.slot_deadline or deadline, deadline)
        return sequence

    def _new_id(self, text: bool) -> SequenceId:
        """An id for a request that brings none."""
        ids = self._rules.ids
        numbers = (ids[serial % len(ids)] for serial in self._id_serial)
        new_ids = (str(number) if text else number for number in numbers)
        return next(new_id for new_id in new_ids if new_id not in self._open)

    def assign_slots(self) -> list[OpenSequence]:
        """Give free slots to the sequences that have waited longest, and return these: their requests may go there."""
        assigned = []
        while self._backlog and self._free:
            sequence = next(iter(self._backlog))
            del self._backlog[sequence]
            slot = heappop(self._free)
            if slot.row == self._used[slot.instance]:
                self._used[slot.instance] += 1
                if slot.row + 1 < self._rules.slots_per_instance:
                    heappush(self._free, slot._replace(row=slot.row + 1))
            sequence.slot = slot
            sequence.slot_deadline = None
            sequence.row = slot.row
            assigned.append(sequence)
        return assigned

    def sequence_of(self, request: QueuedRequest) -> OpenSequence | None:
        """None for a request that is finished."""
        return self._by_request.get(request)

    def finish_request(self, request: QueuedRequest, now: int) -> None:
        """Called when a request has its answer or error."""
        sequence = self._by_request.pop(request, None)
        if sequence is not None:
            del sequence.pending[request]
            if not sequence.pending:
                if self._rules.iterative:
                    self.close_sequence(sequence)
                self._rest(sequence, now)

    def _rest(self, sequence: OpenSequence, now: int) -> None:
        """A sequence without pending requests is idle or, once closed, frees its slot."""
        if not sequence.closed:
            self._idle_since[sequence] = now
        elif sequence.slot is not None and sequence.slot.instance in self._used:
            heappush(self._free, sequence.slot)
            sequence.slot = None

    def close_sequence(self, sequence: OpenSequence) -> None:
        """Let no more requests join; the slot is free when the pending ones are finished."""
        sequence.closed = True
        if self._open.get(sequence.id) is sequence:
            del self._open[sequence.id]
        self._backlog.pop(sequence, None)
        if self._idle_since.pop(sequence, None) is not None:
            self._rest(sequence, 0)

    def expire_sequences(self, now: int) -> list[OpenSequence]:
        """Close the sequences that were idle for too long, and those that waited too long for a slot; return the
        latter."""
        while self._idle_since:
            sequence, since = next(iter(self._idle_since.items()))
            if now < since + self._rules.max_idle_ns:
                break
            log.debug("model '%s': sequence %s was idle for too long", self._model, sequence.id)
            self.close_sequence(sequence)
        late = [
            sequence
            for sequence in self._backlog
            if sequence.slot_deadline is not None and sequence.slot_deadline <= now
        ]
        for sequence in late:
            self.close_sequence(sequence)
        return late

    def close_all(self) -> list[OpenSequence]:
        """Close all sequences; return those that waited for a slot."""
        backlog = list(self._backlog)
        for sequence in {*self._open.values(), *self._by_request.values()}:
            self.close_sequence(sequence)
        return backlog

    @property
    def next_expiry(self) -> int | None:
        """The time of the next `expire_sequences`; None if no sequence can expire."""
        times = [sequence.slot_deadline for sequence in self._backlog if sequence.slot_deadline is not None]
        if self._idle_since:
            times.append(next(iter(self._idle_since.values())) + self._rules.max_idle_ns)
        return min(times, default=None)

    def check_integrity(self) -> None:
        """Recompute everything. Raises `AssertionError`."""
        known = {*self._open.values(), *self._by_request.values()}
        assert {request: sequence for sequence in known for request in sequence.pending} == self._by_request
        assert all(not sequence.closed and self._open[sequence.id] is sequence for sequence in self._open.values())
        for sequence in self._idle_since:
            assert not sequence.pending
            assert not sequence.closed
            assert sequence.slot is not None
        assert all(sequence.pending and sequence.slot is None for sequence in self._backlog)
        assert all(sequence.pending or sequence in self._idle_since for sequence in known)
        slots = [sequence.slot for sequence in known if sequence.slot is not None]
        taken = [slot for slot in slots if slot.instance in self._used]
        assert len(taken) == self.used_slots
        for instance, used in self._used.items():
            rows = sorted(slot.row for slot in (*self._free, *taken) if slot.instance == instance)
            assert rows == list(range(min(used + 1, self._rules.slots_per_instance)))
