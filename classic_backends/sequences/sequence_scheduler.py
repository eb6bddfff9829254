"""The scheduler of a stateful model: a sequence stays on its instance, and each instance has a queue of its own.

In the event loop's thread, between the model and its instances.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from ...core.errors import Cancelled, RequestTimeout
from ...core.metrics import Reading
from ...telemetry.model_metrics import ModelMetrics
from ..batching.batch_execution import BatchLayout
from ..batching.dispatcher import DeadlineTimer, Dispatcher, restarting_error, stopping_error
from ..batching.instance import Instance
from ..batching.queued_request import QueuedRequest
from ..batching.response_router import ResponseRouter
from .sequence_batcher import SequenceBatcher
from .sequence_config import SequenceConfig
from .sequence_table import OpenSequence, SequenceTable


class SequenceScheduler:
    """Stands where other models have a `Dispatcher`, before those of its instances. `decoupled`: the model makes any
    number of responses to a request. Its length is the number of requests that wait."""

    def __init__(self, config: SequenceConfig, layout: BatchLayout, metrics: ModelMetrics, decoupled: bool) -> None:
        self._config = config
        self._layout = layout
        self._router = ResponseRouter(metrics, layout.signature.batched, self._finish)
        self._decoupled = decoupled
        self._model = layout.signature.model_name
        self._table = SequenceTable(self._model, config.slots)
        self._dispatchers: dict[Instance, Dispatcher] = {}
        self._timer = DeadlineTimer(self._expire)
        self._closed = False

    def __len__(self) -> int:
        return self._table.waiting_requests + sum(map(len, self._dispatchers.values()))

    def readings(self) -> Iterator[Reading]:
        """The metrics of sequences, for a scrape."""
        yield Reading("charonia_sequences_open", self._table.used_slots)
        yield Reading("charonia_sequences_waiting", self._table.waiting_sequences)
        yield Reading("charonia_sequence_slots", self._table.total_slots)

    def add_instance(self, instance: Instance) -> None:
        batcher = SequenceBatcher(self._config, self._layout.by_request)
        dispatcher = Dispatcher(batcher, self._layout, self._router, self._decoupled)
        dispatcher.add_instance(instance)
        self._dispatchers[instance] = dispatcher
        self._table.add_instance(instance)
        self._assign_slots()

    def remove_instance(self, instance: Instance) -> None:
        """Forget a lost instance and its sequences. Without another one all requests are rejected: it is uncertain when
        there will be one."""
        if instance not in self._dispatchers:
            return  # a passive one
        self._table.remove_instance(instance)
        dispatcher = self._dispatchers.pop(instance)
        dispatcher.remove_instance(instance)
        dispatcher.close()
        if not self._dispatchers:
            self._reject(self._table.close_all(), restarting_error)

    def submit(self, request: QueuedRequest) -> None:
        """Queue a request. Raises `InvalidArgument` if its sequence is not open, and `Unavailable` if the model is
        stopping, or no instance is there."""
        if self._closed:
            raise stopping_error(request)
        if not self._dispatchers:
            raise restarting_error(request)
        request.arrived_at = time.monotonic_ns()
        sequence = self._table.add_request(request, request.arrived_at)
        if sequence.slot is not None:
            self._dispatchers[sequence.slot.instance].submit(request)
            return
        self._assign_slots()
        if sequence.slot_deadline is not None:
            self._timer.set_no_later_than(sequence.slot_deadline)

    def cancel_request(self, request: QueuedRequest) -> None:
        """Cancel a request, and with it its whole sequence."""
        sequence = self._table.sequence_of(request)
        if sequence is None:
            return
        self._table.close_sequence(sequence)
        dispatcher = None if sequence.slot is None else self._dispatchers.get(sequence.slot.instance)
        # From the last to the first: a request becomes executable when the one before it is withdrawn.
        withdrawn = [
            each for each in reversed(sequence.pending) if dispatcher is None or dispatcher.cancel_request(each)
        ]
        cancelled = Cancelled(f"sequence {sequence.id} of model '{self._model}' was cancelled")
        for each in reversed(withdrawn):
            if each is not request:
                self._router.on_rejected(each, cancelled)
        self._router.on_finished([request] if request in withdrawn else [])

    def close(self) -> None:
        """Reject the requests that wait, and those that come."""
        self._closed = True
        self._timer.stop()
        self._reject(self._table.close_all(), stopping_error)
        for dispatcher in self._dispatchers.values():
            dispatcher.close()

    def _assign_slots(self) -> None:
        for sequence in self._table.assign_slots():
            assert sequence.slot is not None
            for request in sequence.pending:
                self._dispatchers[sequence.slot.instance].submit(request)

    def _finish(self, requests: Sequence[QueuedRequest]) -> None:
        now = time.monotonic_ns()
        for request in requests:
            sequence = self._table.sequence_of(request)
            slot = None if sequence is None else sequence.slot
            self._table.finish_request(request, now)
            if slot is not None and self._layout.by_request and slot.instance in self._dispatchers:
                self._dispatchers[slot.instance].release(request)
        self._assign_slots()
        self._timer.set_no_later_than(now + self._config.slots.max_idle_ns)

    def _expire(self) -> None:
        late = self._table.expire_sequences(time.monotonic_ns())
        self._reject(late, lambda _: RequestTimeout("timeout of the corresponding sequence has been expired"))
        self._assign_slots()
        next_expiry = self._table.next_expiry
        if next_expiry is not None:
            self._timer.set_no_later_than(next_expiry)

    def _reject(self, sequences: Iterable[OpenSequence], error: Callable[[QueuedRequest], Exception]) -> None:
        for sequence in sequences:
            for request in tuple(sequence.pending):
                self._router.on_rejected(request, error(request))
