"""The batch queue of one instance of a stateful model: batches have the next request of each sequence, never two.

Pure logic over times (nanoseconds) that its caller gives. Its instance asks when it has finished a batch: then the
states for the sequences' next requests are known. Knows nothing of which sequences are open.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from ..batching.dynamic_batcher import BatchDecision, DynamicBatcher
from ..batching.queued_request import QueuedRequest, SequenceContext
from .sequence_config import SequenceConfig
from .sequence_support import state_shapes


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
        """Those `again` come behind the requests of other sequences, and before those of their own."""
        taken, self._taken = self._taken, ()
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
