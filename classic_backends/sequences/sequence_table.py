"""Which sequences are open, on which seat of which instance; who waits for a seat; and who was idle for too long.

Pure bookkeeping over the times it is told (nanoseconds). Knows nothing of how requests are executed.

    enter(start)     seat()                      answered, after its end, cancelled or idle
    -> backlog  ->  seated: pending <-> idle  -> gone; the seat is the next one's
       cancelled, or out of time              -> gone
"""

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from ...core.errors import InvalidArgument
from ..batching.dispatcher import QueuedJob
from .sequence_config import SlotRules
from .sequence_context import SequenceContext, SequenceFlags, SequenceId

log = logging.getLogger(__name__)

H = TypeVar("H", bound=Hashable)


class SequenceSlot(NamedTuple, Generic[H]):
    """Room for one sequence on the instance `host`. The first rows are taken first: then instances share the work, and
    batches of pinned rows are short."""

    row: int
    serial: int
    instance: H


@dataclass(slots=True, eq=False)
class OpenSequence(Generic[H]):
    """`pending`: requests that are not answered, in order. `closed`: no more of them come. `deadline`: until when it
    waits for a seat, None for ever."""

    context: SequenceContext
    pending: dict[QueuedJob, None] = field(default_factory=dict)
    slot: SequenceSlot[H] | None = None
    closed: bool = False
    slot_deadline: int | None = None


class SequenceTable(Generic[H]):
    """The sequences of one `model`."""

    def __init__(self, model: str, seating: SlotRules) -> None:
        self._model = model
        self._seating = seating
        self._open: dict[SequenceId, OpenSequence[H]] = {}
        self._of: dict[QueuedJob, OpenSequence[H]] = {}
        self._backlog: dict[OpenSequence[H], None] = {}
        self._idle: dict[OpenSequence[H], int] = {}
        # Seats that were left, and of each host the first that no sequence had yet.
        self._free: list[SequenceSlot[H]] = []
        # How many seats of each host a sequence had at some time.
        self._hosts: dict[H, int] = {}
        self._serial = count()

    def __len__(self) -> int:
        """Sequences that requests may still join."""
        return len(self._open)

    @property
    def waiting_requests(self) -> int:
        """Requests of sequences without a seat."""
        return sum(len(sequence.pending) for sequence in self._backlog)

    @property
    def waiting_sequences(self) -> int:
        """Sequences without a seat."""
        return len(self._backlog)

    @property
    def total_slots(self) -> int:
        """On all hosts."""
        return len(self._hosts) * self._seating.slots_per_instance

    @property
    def used_slots(self) -> int:
        """Of those, the ones that sequences sit on."""
        return sum(self._hosts.values()) - sum(seat.row < self._hosts[seat.instance] for seat in self._free)

    def add_instance(self, host: H) -> None:
        self._hosts[host] = 0
        heappush(self._free, SequenceSlot(0, next(self._serial), host))

    def remove_instance(self, host: H) -> None:
        """Its sequences are lost."""
        self._hosts.pop(host, None)
        self._free = [seat for seat in self._free if seat.instance != host]
        heapify(self._free)
        seated = {*self._idle, *self._of.values(), *self._open.values()} - self._backlog.keys()
        for sequence in seated:
            if sequence.slot is not None and sequence.slot.instance == host:
                self.close_sequence(sequence)

    def add_request(self, request: QueuedJob, now: int) -> OpenSequence[H]:
        """The sequence that it belongs to; without a seat it is in the backlog.

        Raises:
            InvalidArgument: there is none, and it does not start one.
        """
        flags = request.item.sequence_flags
        assert flags is not None
        sequence = self._open.get(flags.id)
        if sequence is None:
            sequence = self._begin(flags)
        elif flags.start:
            log.warning("model '%s': sequence %s starts anew, though it had not ended", self._model, flags.id)
        if flags.end:
            sequence.closed = True
            del self._open[flags.id]
        request.item.sequence = sequence.context
        sequence.pending[request] = None
        self._of[request] = sequence
        self._idle.pop(sequence, None)
        if request.timeout_ns and sequence.slot is None:
            sequence.slot_deadline = min(sequence.slot_deadline or now + request.timeout_ns, now + request.timeout_ns)
        return sequence

    def _begin(self, flags: SequenceFlags) -> OpenSequence[H]:
        if not flags.start:
            message = "must specify the START flag on the first request of the sequence"
            raise InvalidArgument(
                f"inference request for sequence {flags.id} to model '{self._model}' {message}", field="sequence_start"
            )
        sequence = OpenSequence[H](SequenceContext(flags.id))
        self._open[flags.id] = sequence
        self._backlog[sequence] = None
        return sequence

    def assign_slots(self) -> list[OpenSequence[H]]:
        """Those who have waited longest get the seats that are free: their pending requests may go there."""
        seated = []
        while self._backlog and self._free:
            sequence = next(iter(self._backlog))
            del self._backlog[sequence]
            sequence.slot, sequence.slot_deadline = self._take(), None
            sequence.context.row = sequence.slot.row
            seated.append(sequence)
        return seated

    def _take(self) -> SequenceSlot[H]:
        """The first that is free; after one that nobody had yet, the next of its host is."""
        seat = heappop(self._free)
        if seat.row == self._hosts[seat.instance]:
            self._hosts[seat.instance] += 1
            if seat.row + 1 < self._seating.slots_per_instance:
                heappush(self._free, seat._replace(row=seat.row + 1))
        return seat

    def sequence_of(self, request: QueuedJob) -> OpenSequence[H] | None:
        """Whose request it is; None once it is settled."""
        return self._of.get(request)

    def finish_request(self, request: QueuedJob, now: int) -> None:
        """It is answered, one way or the other."""
        sequence = self._of.pop(request, None)
        if sequence is None:
            return
        del sequence.pending[request]
        if not sequence.pending:
            self._rest(sequence, now)

    def _rest(self, sequence: OpenSequence[H], now: int) -> None:
        if not sequence.closed:
            self._idle[sequence] = now
        elif sequence.slot is not None and sequence.slot.instance in self._hosts:
            heappush(self._free, sequence.slot)
            sequence.slot = None

    def close_sequence(self, sequence: OpenSequence[H]) -> None:
        """No more requests join it; its seat is free when those that are pending are settled."""
        sequence.closed = True
        if self._open.get(sequence.context.id) is sequence:
            del self._open[sequence.context.id]
        self._backlog.pop(sequence, None)
        if self._idle.pop(sequence, None) is not None:
            self._rest(sequence, 0)

    def expire_sequences(self, now: int) -> list[OpenSequence[H]]:
        """Close those who were idle for too long, and those whose time for a seat ran out: these."""
        while self._idle:
            sequence, since = next(iter(self._idle.items()))
            if now < since + self._seating.max_idle_ns:
                break
            log.debug("model '%s': sequence %s was idle for too long", self._model, sequence.context.id)
            self.close_sequence(sequence)
        late = [each for each in self._backlog if each.slot_deadline is not None and each.slot_deadline <= now]
        for sequence in late:
            self.close_sequence(sequence)
        return late

    def close_all(self) -> list[OpenSequence[H]]:
        """Close everything; whoever waited for a seat."""
        backlog = list(self._backlog)
        for sequence in {*self._open.values(), *self._of.values()}:
            self.close_sequence(sequence)
        return backlog

    @property
    def next_expiry(self) -> int | None:
        """When to `expire` next; None: nothing does by itself."""
        dues = [each.slot_deadline for each in self._backlog if each.slot_deadline is not None]
        if self._idle:
            dues.append(next(iter(self._idle.values())) + self._seating.max_idle_ns)
        return min(dues, default=None)

    def check_integrity(self) -> None:
        """Recompute everything. Raises `AssertionError`."""
        known = {*self._open.values(), *self._of.values()}
        assert {request: each for each in known for request in each.pending} == self._of
        assert all(not each.closed and self._open[each.context.id] is each for each in self._open.values())
        assert all(not each.pending and not each.closed and each.slot is not None for each in self._idle)
        assert all(each.pending and each.slot is None for each in self._backlog)
        assert all(each.pending or each in self._idle for each in known)
        taken = [each.slot for each in known if each.slot is not None and each.slot.instance in self._hosts]
        assert len(taken) == self.used_slots
        for host, had in self._hosts.items():
            rows = sorted(seat.row for seat in (*self._free, *taken) if seat.instance == host)
            assert rows == list(range(min(had + 1, self._seating.slots_per_instance)))
