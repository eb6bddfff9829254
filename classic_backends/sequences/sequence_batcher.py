"""The batch queue of one instance of a stateful model: batches have the next request of each sequence, never two.

Pure logic over times (nanoseconds) that its caller gives. Its instance asks when it has finished a batch: then the
states for the sequences' next requests are known. Knows nothing of which sequences are open.
"""

from collections import deque
from collections.abc import Sequence

from ..batching.dynamic_batcher import BatchDecision, DynamicBatcher
from ..batching.queued_request import QueuedRequest, SequenceContext
from .sequence_config import SequenceConfig
from .sequence_support import state_shapes


class SequenceBatcher(DynamicBatcher):
    """A `DynamicBatcher` of each sequence's first request; its others wait until that one is done."""

    def __init__(self, config: SequenceConfig) -> None:
        super().__init__(config.batching)
        self._fixed_rows = config.slots.fixed_rows
        self._free_states = tuple(state for state in config.states if -1 in state.dims)
        self._later: dict[SequenceContext, deque[QueuedRequest]] = {}
        self._taken: Sequence[QueuedRequest] = ()
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
            self._add_first(request)
        return True

    def remove(self, request: QueuedRequest) -> bool:
        """Cancel a request. False: it does not wait here, or is being executed."""
        sequence = _sequence_of(request)
        if super().remove(request):
            self._advance(sequence)
            return True
        if request not in self._later.get(sequence, ()):
            return False
        self._later[sequence].remove(request)
        self._later_count -= 1
        return True

    def peek_batch(self, now: int) -> BatchDecision:
        """Called, as `take_batch`, only while the instance executes nothing."""
        taken, self._taken = self._taken, ()  # that batch is done
        for request in taken:
            self._advance(_sequence_of(request))
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

    def drain(self) -> list[QueuedRequest]:
        waiting = [*super().drain(), *(request for later in self._later.values() for request in later)]
        self._later = {_sequence_of(request): deque() for request in self._taken}
        self._later_count = 0
        return waiting

    def _advance(self, sequence: SequenceContext) -> None:
        """Let the next request take the place of the first one, which has left."""
        later = self._later[sequence]
        if later:
            self._later_count -= 1
            self._add_first(later.popleft())
        else:
            del self._later[sequence]

    def _add_first(self, request: QueuedRequest) -> None:
        if self._free_states:
            request.batch_key = (request.batch_key, state_shapes(self._free_states, request.job))
        super().add(request, request.arrived_at)

    def check_integrity(self) -> None:
        super().check_integrity()
        assert self._later_count == sum(map(len, self._later.values()))
        assert len(self._later) == super().__len__() + len(self._taken)


def _sequence_of(request: QueuedRequest) -> SequenceContext:
    assert request.job.sequence is not None
    return request.job.sequence
