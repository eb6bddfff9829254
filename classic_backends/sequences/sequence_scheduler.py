"""Between the event loop and the instances of a stateful model: a sequence has its instance, an instance its queue.

In the event loop's thread. What becomes of requests is told to a `DispatchListener`, after the sequences have heard it.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from ...core.errors import Cancelled, RequestTimeout
from ...core.metrics import Reading
from ..batching.batch_execution import BatchLayout
from ..batching.deadline_timer import DeadlineTimer
from ..batching.dispatcher import (
    BatchResult,
    Dispatcher,
    DispatchListener,
    JobBatch,
    JobInstance,
    QueuedJob,
    restarting_error,
    stopping_error,
)
from .sequence_batcher import SequenceBatcher
from .sequence_config import SequenceConfig
from .sequence_table import OpenSequence, SequenceTable


class SequenceScheduler:
    """What a `Dispatcher` is to other models, and the `DispatchListener` of those of its instances. `decoupled`: they
    make any number of responses."""

    def __init__(self, rules: SequenceConfig, form: BatchLayout, clerk: DispatchListener, decoupled: bool) -> None:
        self._rules = rules
        self._form = form
        self._clerk = clerk
        self._decoupled = decoupled
        self._model = form.signature.model
        self._roll: SequenceTable[JobInstance] = SequenceTable(self._model, rules.seating)
        self._hosts: dict[JobInstance, Dispatcher] = {}
        self._alarm = DeadlineTimer(self._ring)
        self._closed = False

    def __len__(self) -> int:
        """Requests that wait."""
        return self._roll.waiting + sum(map(len, self._hosts.values()))

    def readings(self) -> Iterator[Reading]:
        """For a scrape, beside what it tells of requests."""
        yield Reading("charonia_sequences_open", self._roll.taken)
        yield Reading("charonia_sequences_waiting", self._roll.backlog)
        yield Reading("charonia_sequence_slots", self._roll.seats)

    def add_worker(self, worker: JobInstance) -> None:
        host = Dispatcher(SequenceBatcher(self._rules), self._form, self, self._decoupled)
        host.add_worker(worker)
        self._hosts[worker] = host
        self._roll.add_host(worker)
        self._seat()

    def remove_worker(self, worker: JobInstance) -> None:
        """It is lost, and its sequences are. Without another one nobody waits: when there will be one is uncertain."""
        if worker not in self._hosts:
            return  # a passive one
        self._roll.remove_host(worker)
        host = self._hosts.pop(worker)
        host.remove_worker(worker)
        host.close()
        if not self._hosts:
            self._refuse(self._roll.clear(), restarting_error)

    def submit(self, request: QueuedJob) -> None:
        """Raises `InvalidArgument` for a request of no sequence, `Unavailable` where nobody is there to serve it."""
        if self._closed:
            raise stopping_error(request)
        if not self._hosts:
            raise restarting_error(request)
        request.arrived = time.monotonic_ns()
        sequence = self._roll.enter(request, request.arrived)
        if sequence.seat is not None:
            self._hosts[sequence.seat.host].submit(request)
            return
        self._seat()
        if sequence.deadline is not None:
            self._alarm.set(sequence.deadline)

    def leave(self, request: QueuedJob) -> None:
        """It was given up, and with it its whole sequence."""
        sequence = self._roll.of(request)
        if sequence is None:
            return
        self._roll.close(sequence)
        # The last ones first: whose turn comes when another is withdrawn could begin to be executed.
        gone = [each for each in reversed(sequence.pending) if self._withdrawn(sequence, each)]
        cancelled = Cancelled(f"sequence {sequence.context.id} of model '{self._model}' was cancelled")
        for each in reversed(gone):
            if each is not request:
                self._clerk.refused(each, cancelled)
        self._settle(gone)

    def close(self) -> None:
        """Refuse whoever waits or comes."""
        self._closed = True
        self._alarm.stop()
        self._refuse(self._roll.clear(), stopping_error)
        for host in self._hosts.values():
            host.close()

    # What dispatchers tell

    def answered(self, done: BatchResult) -> None:
        self._clerk.answered(done)
        self._settle(done.work.requests)

    def streamed(self, done: BatchResult) -> None:
        self._clerk.streamed(done)

    def ended(self, work: JobBatch, begun: int) -> None:
        self._clerk.ended(work, begun)
        self._settle(work.requests)

    def refused(self, request: QueuedJob, error: Exception) -> None:
        self._clerk.refused(request, error)
        self._settle([request])

    # Inside

    def _withdrawn(self, sequence: OpenSequence[JobInstance], request: QueuedJob) -> bool:
        host = None if sequence.seat is None else self._hosts.get(sequence.seat.host)
        return host is None or host.leave(request)

    def _seat(self) -> None:
        for sequence in self._roll.seat():
            assert sequence.seat is not None
            for request in sequence.pending:
                self._hosts[sequence.seat.host].submit(request)

    def _settle(self, requests: Iterable[QueuedJob]) -> None:
        now = time.monotonic_ns()
        for request in requests:
            self._roll.settle(request, now)
        self._seat()
        self._alarm.set(now + self._rules.seating.idle)

    def _ring(self) -> None:
        late = self._roll.expire(time.monotonic_ns())
        self._refuse(late, lambda _: RequestTimeout("timeout of the corresponding sequence has been expired"))
        self._seat()
        due = self._roll.due
        if due is not None:
            self._alarm.set(due)

    def _refuse(self, sequences: Iterable[OpenSequence[JobInstance]], error: Callable[[QueuedJob], Exception]) -> None:
        for sequence in sequences:
            for request in tuple(sequence.pending):
                self.refused(request, error(request))
