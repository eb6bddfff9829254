"""The scheduler of a stateful model: a sequence stays on its instance, and each instance has a batch queue of its own,
which makes batches of the next request of each sequence, never two.

The scheduler lives in the event loop's thread; a batch queue is pure logic over times in nanoseconds.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ...core.errors import Cancelled, RequestTimeout
from ...core.metrics import Reading
from ...core.wait_graph import QueueWaits
from ...telemetry.model_metrics import ModelMetrics
from ..batching.batch_execution import BatchLayout
from ..batching.dispatcher import DeadlineTimer, Dispatcher, restarting_error, stopping_error
from ..batching.dynamic_batcher import BatchDecision, DynamicBatcher
from ..batching.inference_job import SequenceContext
from ..batching.instance import Instance
from ..batching.queued_request import QueuedRequest
from ..batching.response_router import ResponseRouter
from .sequence_config import SequenceConfig
from .sequence_support import state_shapes
from .sequence_table import OpenSequence, SequenceTable


class SequenceBatcher(DynamicBatcher):
    """A `DynamicBatcher` of each sequence's first request; its others wait until that one is done. `by_request`: the
    runtime takes requests as they are, and tells what becomes of each batch by `settle_batch`."""

    def __init__(self, config: SequenceConfig, by_request: bool = False) -> None:
        super().__init__(config.batching)
        self._fixed_rows = config.slots.fixed_rows
        self._free_states = () if by_request else tuple(state for state in config.states if -1 in state.dims)
        self._later: dict[SequenceContext, deque[QueuedRequest]] = {}
        self._taken: Sequence[QueuedRequest] = ()
        self._held: dict[QueuedRequest, bool] = {}
        self._later_count = 0

    def __len__(self) -> int:
        return super().__len__() + self._later_count

    @property
    def backlog(self) -> int:
        return len(self)

    def add(self, request: QueuedRequest, now: int) -> bool:
        """Queue a request; always True, any number may wait."""
        request.arrived_at = request.arrived_at or now
        sequence = _sequence_of(request)
        if sequence in self._later:
            self._later[sequence].append(request)
            self._later_count += 1
        else:
            self._later[sequence] = deque()
            self._add_first(request, request.arrived_at)
        return True

    def remove(self, request: QueuedRequest) -> bool:
        """Cancel a request. False: it does not wait here, or is being executed."""
        sequence = _sequence_of(request)
        if super().remove(request) or self._held.get(request):
            self._held.pop(request, None)
            self._advance(sequence)
            return True
        if request not in self._later.get(sequence, ()):
            return False
        self._later[sequence].remove(request)
        self._later_count -= 1
        return True

    def peek_batch(self, now: int) -> BatchDecision:
        """Called, as `take_batch`, only while the instance executes nothing."""
        self.settle_batch((), {}, now)
        return super().peek_batch(now)

    def take_batch(self, now: int) -> BatchDecision:
        """The instance's next batch, in the order of fixed rows."""
        decision = super().take_batch(now)
        if decision.batch is None:
            return decision
        self._taken = decision.batch.requests
        if self._fixed_rows:
            self._taken = sorted(self._taken, key=lambda request: _sequence_of(request).row)
        return decision._replace(batch=decision.batch._replace(requests=self._taken))

    def settle_batch(self, again: Sequence[QueuedRequest], held: Mapping[QueuedRequest, bool], now: int) -> None:
        """Requests that come `again` are queued behind those of other sequences, and before those of their own."""
        taken = self._taken
        self._taken = ()
        self._held.update(held)
        for request in again:
            self._add_first(request, now)
        for request in taken:
            if not (request.queued or request in held):
                self._advance(_sequence_of(request))

    def release(self, request: QueuedRequest, again: bool, now: int) -> bool:
        if self._held.pop(request, None) is None:
            return not again and self.remove(request)
        if again:
            self._add_first(request, now)
        else:
            self._advance(_sequence_of(request))
        return True

    def drain(self) -> list[QueuedRequest]:
        """Requests that the runtime still works on stay."""
        later = [request for requests in self._later.values() for request in requests]
        waiting = [*super().drain(), *(request for request, for_reader in self._held.items() if for_reader), *later]
        self._held = {request: False for request, for_reader in self._held.items() if not for_reader}
        self._later = {_sequence_of(request): deque() for request in (*self._taken, *self._held)}
        self._later_count = 0
        return waiting

    def _advance(self, sequence: SequenceContext) -> None:
        """Let the next request take the place of the first one, which has left."""
        later = self._later[sequence]
        if later:
            self._later_count -= 1
            request = later.popleft()
            self._add_first(request, request.arrived_at)
        else:
            del self._later[sequence]

    def _add_first(self, request: QueuedRequest, now: int) -> None:
        if self._free_states:
            request.batch_key = (request.batch_key, state_shapes(self._free_states, request.job))
        super().add(request, now)

    def check_integrity(self) -> None:
        super().check_integrity()
        assert self._later_count == sum(map(len, self._later.values()))
        assert len(self._later) == super().__len__() + len(self._taken) + len(self._held)
        assert not any(request.queued for request in (*self._taken, *self._held))


def _sequence_of(request: QueuedRequest) -> SequenceContext:
    assert request.job.sequence is not None
    return request.job.sequence


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

    @property
    def open_sequences(self) -> int:
        """The number of sequences that have a slot."""
        return self._table.used_slots

    def readings(self) -> Iterator[Reading]:
        """The metrics of sequences, for a scrape."""
        yield Reading("charonia_sequences_open", self.open_sequences)
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
            pending
            for pending in reversed(sequence.pending)
            if dispatcher is None or dispatcher.cancel_request(pending)
        ]
        cancelled = Cancelled(f"sequence {sequence.id} of model '{self._model}' was cancelled")
        for pending in reversed(withdrawn):
            if pending is not request:
                self._router.on_rejected(pending, cancelled)
        self._router.on_finished([request] if request in withdrawn else [])

    def queue_waits(self) -> list[QueueWaits]:
        """See `WaitingModel`. Requests of sequences without a slot wait in none of these queues."""
        return [waits for dispatcher in self._dispatchers.values() for waits in dispatcher.queue_waits()]

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
