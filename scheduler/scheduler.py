"""What runs in the next step: one rule, a token budget closing gaps.

A sequence has known tokens and computed tokens. A step computes some of the difference for some sequences; prompt
chunks, prefix hits, resuming after preemption and speculation are all this one case. Knows nothing of torch,
ranks, clocks or text: time is counted in steps, and what a step took in seconds it is told.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ..core.errors import InvalidArgument
from ..kvcache.manager import KVCacheManager
from .config import SchedulerConfig
from .fairness import Fairness
from .plan import StepPlan, StepResult, StepUpdates
from .prefill_budget import PrefillBudget
from .result_processing import ProcessedResult, process_result
from .rows import RowTable
from .running_set import RunningSet
from .sequence import Sequence, SequenceRequest
from .step_packer import StepPacker
from .validation import check_can_ever_run
from .waiting_queue import WaitingQueue

PRIORITY_CLASSES = 1 << 16
"""Priorities are clipped to this many classes."""

_CREDIT_STEPS = 16
"""A tenant who asks for less than his share may save what so many full steps compute."""


class SchedulerTotals(NamedTuple):
    """Sequences preempted, prompt tokens looked up in the prefix cache, and found there."""

    preemptions: int
    prefix_queries: int
    prefix_hits: int


class Scheduler:
    """Turns sequences into step plans and their results into updates; called by one thread.

    `schedule()` may be called again before the last plan's result is applied, up to `ahead` plans beyond the oldest
    unapplied one; results are applied in the order of the plans.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        self.config = config
        self._cache = cache
        self._rows = RowTable(config.max_num_seqs, cache.block_size)
        self._fairness = Fairness(config.ageing_steps, _CREDIT_STEPS * config.max_num_batched_tokens)
        self._pace = PrefillBudget(None if config.target_step_ms is None else config.target_step_ms / 1e3)
        self._line = WaitingQueue(self._fairness, self._is_long)
        self._stays = RunningSet(self._rows, cache, self._line)
        self._packer = StepPacker(config, self._stays, self._fairness, self._pace)
        self._live: dict[int, Sequence] = {}
        self._flights = self._rows.in_flight
        self._step = 0
        self._arrivals = 0

    def _is_long(self, sequence: Sequence) -> bool:
        shared = self._cache.shareable(sequence.hashes, sequence.shareable_tokens)
        return self._pace.is_long_prompt(sequence.known - shared, shared)

    @property
    def totals(self) -> SchedulerTotals:
        """Counted since the last `forget_totals`."""
        stays = self._stays
        return SchedulerTotals(stays.preemptions, stays.prefix_queries, stays.prefix_hits)

    def reset_totals(self) -> None:
        self._stays.reset_totals()

    def reset_step_times(self) -> None:
        """What steps took so far says nothing of those to come."""
        self._pace.time_model.reset()

    @property
    def running(self) -> int:
        """Sequences that hold a row, those about to leave it included."""
        return len(self._rows.sequences)

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def in_flight(self) -> int:
        """Plans without a result."""
        return len(self._flights)

    @property
    def has_work(self) -> bool:
        """Something runs, waits or is in flight. If nothing is in flight, `schedule()` then returns a plan."""
        return bool(self.running or self.waiting or self._flights)

    def add(self, request: SequenceRequest) -> None:
        """Put a sequence in line.

        Its rank is the step it arrived in, later by `ageing_steps` for each class and by one for each step its
        prompt may need: equal ranks are in order of arrival, a short prompt overtakes a long one, and
        nobody is overtaken forever, since ranks stand still while time passes. Between tenants of a class, service
        comes before rank: see `Fairness`.

        Raises:
            InvalidArgument: it can never run; nothing was done.
        """
        if request.key in self._live:
            raise InvalidArgument(f"sequence {request.key} is already being served")
        check_can_ever_run(request, self.config.max_model_len, self._cache)
        priority = min(max(request.priority, 0), PRIORITY_CLASSES - 1)
        seniority = self._step + priority * self.config.ageing_steps
        rank = seniority + len(request.prompt) // self.config.rank_step_tokens
        slot = self._fairness.slot_of(request.tenant, request.weight)
        sequence = Sequence(request, self._arrivals, seniority, rank, list(request.hashes), slot)
        self._fairness.sequence_arrived(slot)
        self._arrivals += 1
        self._live[request.key] = sequence
        self._line.enqueue(sequence)

    def abort(self, keys: Iterable[int]) -> None:
        """Forget these sequences: nothing of them is reported any more. Unknown keys are ignored.

        Blocks in use by plans in flight are free when the last of those is applied.
        """
        for key in keys:
            sequence = self._live.get(key)
            if sequence is None:
                continue
            if sequence.row is not None:
                self._end(sequence.row)
            else:
                del self._live[key]
                self._line.remove(sequence)
                self._fairness.sequence_ended(sequence.tenant_slot)
        self._stays.started = [(key, cached) for key, cached in self._stays.started if key in self._live]

    # One step

    def schedule(self) -> StepPlan | None:
        """The next step, or None: nothing can run now, or `ahead` plans are already under way."""
        if len(self._flights) > self.config.ahead:
            return None
        launched = self._packer.pack(self._step).finish_plan(self._step, self._stays.closed_rows)
        if launched is None:
            return None
        plan, flight = launched
        self._flights.push(flight)
        self._pace.note_launched(flight.work)
        self._stays.closed_rows.clear()
        self._step += 1
        return plan

    def _end(self, row: int) -> None:
        sequence = self._rows.sequences[row]
        del self._live[sequence.key]
        self._fairness.sequence_ended(sequence.tenant_slot)
        self._rows.ended[row] = True
        self._stays.remove(row)

    # Results

    def apply(self, result: StepResult, seconds: float | None = None) -> StepUpdates:
        """Take in the result of the oldest plan in flight; `seconds`: how long the step took, if somebody knows.

        Raises:
            RuntimeError: it is another plan's, or does not continue the known tokens.
        """
        flight = self._flights.pop_oldest(result.step)
        if seconds:
            self._pace.observe_step(flight.work, seconds)
        gathered = process_result(self._rows, flight, result)
        self._fairness.charge_outputs(self._rows.tenant_slot, gathered.rows, gathered.counts)
        self._commit()
        updates = self._updates(gathered)
        for row, _ in gathered.finished:
            self._end(row)
        self._stays.release_settled()
        return updates

    def _updates(self, gathered: ProcessedResult) -> StepUpdates:
        keys = self._rows.keys
        finished = [(keys[row], reason) for row, reason in gathered.finished]
        started, self._stays.started = self._stays.started, []
        owners = [keys[row] for row in gathered.rows]
        scores = [(keys[row], fresh) for row, fresh in gathered.prompt_logprobs] if gathered.prompt_logprobs else ()
        return StepUpdates(owners, gathered.counts, gathered.tokens, started, finished, gathered.logprobs, scores)

    def _commit(self) -> None:
        """Make blocks that became full findable, hashing generated ones here, outside of `schedule()`."""
        if not self._cache.prefix_caching:
            return
        rows, size = self._rows, self._cache.block_size
        for row in (rows.computed >= rows.next_commit_at).nonzero()[0].tolist():
            sequence, table = rows.sequences[row], rows.tables[row]
            first, end = table.committed, int(rows.computed[row]) // size
            self._hash(sequence, end)
            self._cache.commit(table, sequence.hashes[first:end])
            rows.next_commit_at[row] = (end + 1) * size
            self._line.wake_waiting_for(sequence.hashes[first:end])

    def _hash(self, sequence: Sequence, blocks: int) -> None:
        """Let the sequence have the hashes of its first `blocks` blocks."""
        size, hashes = self._cache.block_size, sequence.hashes
        if len(hashes) < blocks:
            tokens = sequence.token_window(len(hashes) * size, blocks * size)
            parent = hashes[-1] if hashes else None
            hashes.extend(self._cache.digest(tokens, sequence.request.extras, parent))

    def check_integrity(self) -> None:
        """Recompute everything, the cache's state included; for tests, and when idle.

        Raises:
            AssertionError: something leaked, or counters are out of order.
        """
        rows = self._rows
        self._cache.check_integrity()
        rows.check_integrity()
        assert self._cache.open_tables == len(rows.tables), "a table without a row"
        assert all(self._cache.being_computed(block_hash) for block_hash in self._line.awaited_hashes)
        assert self.config.admission == "optimistic" or rows.reserved_blocks() <= self._cache.free_blocks
        self._check_places()

    def _check_places(self) -> None:
        """Every live sequence waits or has a row, and not both."""
        waiting = [sequence.key for sequence in self._line]
        placed = [sequence.key for row, sequence in self._rows.sequences.items() if not self._rows.ended[row]]
        assert sorted(waiting + placed) == sorted(self._live)
        assert len(self._line) == len(waiting)
