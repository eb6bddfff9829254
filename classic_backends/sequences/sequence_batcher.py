"""Which requests of its open sequences an instance executes together: the next one of each, never two of the same.

Pure logic over the times it is told (nanoseconds). Of one instance: when it asks, what it took before is done, and what
that left to a sequence's next request is known. Knows nothing of which sequences there are.
"""

from collections import deque
from collections.abc import Sequence

from ..batching.dispatcher import QueuedJob
from ..batching.dynamic_batcher import BatchDecision, DynamicBatcher
from ..batching.inference_job import InferenceJob
from .sequence_config import SequenceConfig
from .sequence_context import SequenceContext
from .stateful_batch import state_shapes


class SequenceBatcher:
    """A `BatchQueue`. The first request of each sequence that has any stands in front, where a `DynamicBatcher`
    chooses; the others stand behind it until it is done."""

    def __init__(self, rules: SequenceConfig) -> None:
        self._front: DynamicBatcher[InferenceJob] = DynamicBatcher(rules.batching)
        self._pinned = rules.slots.fixed_rows
        self._free_states = tuple(state for state in rules.states if -1 in state.dims)
        self._behind: dict[SequenceContext, deque[QueuedJob]] = {}
        self._taken: Sequence[QueuedJob] = ()
        self._held = 0

    def __len__(self) -> int:
        return len(self._front) + self._held

    @property
    def work_per_instance(self) -> int:
        return self._front.work_per_instance

    @property
    def backlog(self) -> int:
        return len(self)

    def add(self, request: QueuedJob, now: int) -> bool:
        """True: there is room for any number."""
        request.arrived_at = request.arrived_at or now
        context = _context(request)
        if context in self._behind:
            self._behind[context].append(request)
            self._held += 1
        else:
            self._behind[context] = deque()
            self._step_forward(request)
        return True

    def remove(self, request: QueuedJob) -> bool:
        """It has given up. False: it was not here, or is being executed."""
        if self._front.remove(request):
            self._advance(_context(request))
            return True
        behind = self._behind.get(_context(request), ())
        if request not in behind:
            return False
        self._behind[_context(request)].remove(request)
        self._held -= 1
        return True

    def expire_requests(self, now: int) -> BatchDecision[InferenceJob]:
        return self._front.expire_requests(now)

    def peek_batch(self, now: int) -> BatchDecision[InferenceJob]:
        """Only while the instance executes nothing, as `take`."""
        self._resume()
        return self._front.peek_batch(now)

    def take_batch(self, now: int) -> BatchDecision[InferenceJob]:
        """In the order of their rows, if sequences have any."""
        self._resume()
        turn = self._front.take_batch(now)
        if turn.batch is None:
            return turn
        self._taken = turn.batch.requests
        if self._pinned:
            self._taken = sorted(self._taken, key=lambda request: _context(request).row)
        return turn._replace(batch=turn.batch._replace(requests=self._taken))

    def drain(self) -> list[QueuedJob]:
        """Everybody out."""
        waiting = [*self._front.drain(), *(request for behind in self._behind.values() for request in behind)]
        self._behind = {_context(request): deque() for request in self._taken}
        self._held = 0
        return waiting

    def _resume(self) -> None:
        taken, self._taken = self._taken, ()
        for request in taken:
            self._advance(_context(request))

    def _advance(self, context: SequenceContext) -> None:
        """Its first request has left: the next one takes its place."""
        behind = self._behind[context]
        if not behind:
            del self._behind[context]
            return
        self._held -= 1
        self._step_forward(behind.popleft())

    def _step_forward(self, request: QueuedJob) -> None:
        if self._free_states:
            request.batch_key = (request.batch_key, state_shapes(self._free_states, request.item))
        self._front.add(request, request.arrived_at)

    def check_integrity(self) -> None:
        """Recompute everything. Raises `AssertionError`."""
        self._front.check_integrity()
        assert self._held == sum(map(len, self._behind.values()))
        assert len(self._behind) == len(self._front) + len(self._taken)


def _context(request: QueuedJob) -> SequenceContext:
    assert request.item.sequence is not None
    return request.item.sequence
