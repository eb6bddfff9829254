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
        self._model = form.signature.model_name
        self._roll: SequenceTable[JobInstance] = SequenceTable(self._model, rules.slots)
        self._hosts: dict[JobInstance, Dispatcher] = {}
        self._alarm = DeadlineTimer(self._ring)
        self._closed = False

    def __len__(self) -> int:
        """Requests that wait."""
        return self._roll.waiting_requests + sum(map(len, self._hosts.values()))

    def readings(self) -> Iterator[Reading]:
        """For a scrape, beside what it tells of requests."""
        yield Reading("charonia_sequences_open", self._roll.used_slots)
        yield Reading("charonia_sequences_waiting", self._roll.waiting_sequences)
        yield Reading("charonia_sequence_slots", self._roll.total_slots)

    def add_instance(self, worker: JobInstance) -> None:
        host = Dispatcher(SequenceBatcher(self._rules), self._form, self, self._decoupled)
        host.add_instance(worker)
        self._hosts[worker] = host
        self._roll.add_instance(worker)
        self._seat()

    def remove_instance(self, worker: JobInstance) -> None:
        """It is lost, and its sequences are. Without another one nobody waits: when there will be one is uncertain."""
        if worker not in self._hosts:
            return  # a passive one
        self._roll.remove_instance(worker)
        host = self._hosts.pop(worker)
        host.remove_instance(worker)
        host.close()
        if not self._hosts:
            self._refuse(self._roll.close_all(), restarting_error)

    def submit(self, request: QueuedJob) -> None:
        """Raises `InvalidArgument` for a request of no sequence, `Unavailable` where nobody is there to serve it."""
        if self._closed:
            raise stopping_error(request)
        if not self._hosts:
            raise restarting_error(request)
        request.arrived_at = time.monotonic_ns()
        sequence = self._roll.add_request(request, request.arrived_at)
        if sequence.slot is not None:
            self._hosts[sequence.slot.instance].submit(request)
            return
        self._seat()
        if sequence.slot_deadline is not None:
            self._alarm.set_no_later_than(sequence.slot_deadline)

    def cancel_request(self, request: QueuedJob) -> None:
        """It was given up, and with it its whole sequence."""
        sequence = self._roll.sequence_of(request)
        if sequence is None:
            return
        self._roll.close_sequence(sequence)
        # The last ones first: whose turn comes when another is withdrawn could begin to be executed.
        gone = [each for each in reversed(sequence.pending) if self._withdrawn(sequence, each)]
        cancelled = Cancelled(f"sequence {sequence.context.id} of model '{self._model}' was cancelled")
        for each in reversed(gone):
            if each is not request:
                self._clerk.on_rejected(each, cancelled)
        self._settle(gone)

    def close(self) -> None:
        """Refuse whoever waits or comes."""
        self._closed = True
        self._alarm.stop()
        self._refuse(self._roll.close_all(), stopping_error)
        for host in self._hosts.values():
            host.close()

    # What dispatchers tell

    def on_batch_done(self, done: BatchResult) -> None:
        self._clerk.on_batch_done(done)
        self._settle(done.batch.requests)

    def on_stream_response(self, done: BatchResult) -> None:
        self._clerk.on_stream_response(done)

    def on_stream_end(self, work: JobBatch, begun: int) -> None:
        self._clerk.on_stream_end(work, begun)
        self._settle(work.requests)

    def on_rejected(self, request: QueuedJob, error: Exception) -> None:
        self._clerk.on_rejected(request, error)
        self._settle([request])

    # Inside

    def _withdrawn(self, sequence: OpenSequence[JobInstance], request: QueuedJob) -> bool:
        host = None if sequence.slot is None else self._hosts.get(sequence.slot.instance)
        return host is None or host.cancel_request(request)

    def _seat(self) -> None:
        for sequence in self._roll.assign_slots():
            assert sequence.slot is not None
            for request in sequence.pending:
                self._hosts[sequence.slot.instance].submit(request)

    def _settle(self, requests: Iterable[QueuedJob]) -> None:
        now = time.monotonic_ns()
        for request in requests:
            self._roll.finish_request(request, now)
        self._seat()
        self._alarm.set_no_later_than(now + self._rules.slots.max_idle_ns)

    def _ring(self) -> None:
        late = self._roll.expire_sequences(time.monotonic_ns())
        self._refuse(late, lambda _: RequestTimeout("timeout of the corresponding sequence has been expired"))
        self._seat()
        due = self._roll.next_expiry
        if due is not None:
            self._alarm.set_no_later_than(due)

    def _refuse(self, sequences: Iterable[OpenSequence[JobInstance]], error: Callable[[QueuedJob], Exception]) -> None:
        for sequence in sequences:
            for request in tuple(sequence.pending):
                self.on_rejected(request, error(request))
