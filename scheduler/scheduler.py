"""Which tokens run in the next step. One rule: a token budget closes gaps.

A sequence has known tokens and computed tokens. A step computes some of the difference for some sequences; prompt
chunks, prefix hits, resuming after preemption and speculation are all this one case. Knows nothing of torch, ranks,
clocks or text: time is counted in steps, and the seconds that a step took are told by the caller.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ..core.errors import InvalidArgument
from ..kvcache.manager import KVCacheManager
from .config import SchedulerConfig
from .plan import StepPlan, StepResult, StepUpdates
from .prefill_budget import PrefillBudget
from .result_processing import process_result
from .running_set import RunningSet
from .sequence import Sequence, SequenceRequest
from .step_packer import StepPacker
from .waiting_queue import Fairness, WaitingQueue

PRIORITY_CLASSES = 1 << 16
"""Priorities are clipped to this many classes."""

_CREDIT_STEPS = 16
"""A tenant that asks for less than its share may save as much as so many full steps compute."""


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
        self._fairness = Fairness(config.ageing_steps, _CREDIT_STEPS * config.max_num_batched_tokens)
        self._prefill = PrefillBudget(None if config.target_step_ms is None else config.target_step_ms / 1e3)
        self._waiting = WaitingQueue(self._fairness, self._has_long_prompt)
        self._rows = RunningSet(config.max_num_seqs, cache, self._waiting, config.max_in_flight)
        self._packer = StepPacker(config, self._rows, self._fairness, self._prefill)
        self._live: dict[int, Sequence] = {}
        self._step = 0
        self._arrivals = 0

    def _has_long_prompt(self, sequence: Sequence) -> bool:
        shared = self._cache.shareable(sequence.hashes, sequence.shareable_tokens)
        return self._prefill.is_long_prompt(sequence.known - shared, shared)

    @property
    def totals(self) -> SchedulerTotals:
        """Counted since the last `reset_totals`."""
        rows = self._rows
        return SchedulerTotals(rows.preemptions, rows.prefix_queries, rows.prefix_hits)

    def reset_totals(self) -> None:
        self._rows.preemptions = self._rows.prefix_queries = self._rows.prefix_hits = 0

    def reset_step_times(self) -> None:
        """Forget the times of steps so far: they say nothing of those to come."""
        self._prefill.time_model.reset()

    @property
    def running(self) -> int:
        """Sequences that hold a row, releasing ones included."""
        return len(self._rows.sequences)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Plans without a result."""
        return len(self._rows.in_flight)

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits, or a plan is in flight. If none is, `schedule()` then returns a plan."""
        return bool(self.running or self.waiting or self.in_flight)

    def add(self, request: SequenceRequest) -> None:
        """Put a sequence into the waiting queue.

        Its rank is the step it arrived in, later by `ageing_steps` for each class and by one for each step its prompt
        may need: equal ranks are in order of arrival, a short prompt overtakes a long one, and no sequence is overtaken
        forever, since ranks stand still while time passes. Between tenants of a class, service comes before rank: see
        `Fairness`.

        Raises:
            InvalidArgument: it can never run; nothing was done.
        """
        if request.key in self._live:
            raise InvalidArgument(f"sequence {request.key} is already being served")
        request.check_fits(self.config.max_model_len, self._cache)
        priority = min(max(request.priority, 0), PRIORITY_CLASSES - 1)
        seniority = self._step + priority * self.config.ageing_steps
        rank = seniority + len(request.prompt) // self.config.rank_step_tokens
        slot = self._fairness.slot_of(request.tenant, request.weight)
        sequence = Sequence(request, self._arrivals, seniority, rank, list(request.hashes), slot)
        self._fairness.sequence_arrived(slot)
        self._arrivals += 1
        self._live[request.key] = sequence
        self._waiting.enqueue(sequence)

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
                self._waiting.remove(sequence)
                self._fairness.sequence_ended(sequence.tenant_slot)
        self._rows.started = [(key, cached) for key, cached in self._rows.started if key in self._live]

    def schedule(self) -> StepPlan | None:
        """Plan the next step. None: nothing can run now, or `ahead` plans are already under way."""
        if self.in_flight > self.config.ahead:
            return None
        launched = self._packer.pack(self._step).finish_plan(self._step)
        if launched is None:
            return None
        plan, flight = launched
        self._rows.in_flight.append(flight)
        self._prefill.note_launched(flight.work)
        self._step += 1
        return plan

    def apply(self, result: StepResult, seconds: float | None = None) -> StepUpdates:
        """Take in the result of the oldest plan in flight; `seconds`: how long the step took, if that is known.

        Raises:
            RuntimeError: it is another plan's, or does not continue the known tokens.
        """
        rows = self._rows
        if not rows.in_flight or rows.in_flight[0].step != result.step:
            raise RuntimeError(f"the result of step {result.step} came out of turn")
        flight = rows.in_flight.popleft()
        if seconds:
            self._prefill.observe_step(flight.work, seconds)
        processed = process_result(rows, flight, result)
        self._fairness.charge_outputs(rows.tenant_slot, processed.rows, processed.counts)
        self._commit_full_blocks()
        keys, started = rows.keys, rows.started
        rows.started = []
        updates = StepUpdates(
            [keys[row] for row in processed.rows],
            processed.counts,
            processed.tokens,
            started,
            [(keys[row], reason) for row, reason in processed.finished],
            processed.logprobs,
            [(keys[row], fresh) for row, fresh in processed.prompt_logprobs] if processed.prompt_logprobs else (),
        )
        for row, _ in processed.finished:
            self._end(row)
        rows.release_settled()
        return updates

    def _end(self, row: int) -> None:
        sequence = self._rows.sequences[row]
        del self._live[sequence.key]
        self._fairness.sequence_ended(sequence.tenant_slot)
        self._rows.ended[row] = True
        self._rows.remove(row)

    def _commit_full_blocks(self) -> None:
        """Make blocks that became full findable, hashing generated ones here, outside of `schedule()`."""
        if not self._cache.prefix_caching:
            return
        rows, size = self._rows, self._cache.block_size
        for row in (rows.computed >= rows.next_commit_at).nonzero()[0].tolist():
            sequence, table = rows.sequences[row], rows.tables[row]
            hashes, first, end = sequence.hashes, table.committed, int(rows.computed[row]) // size
            if len(hashes) < end:
                tokens = sequence.token_window(len(hashes) * size, end * size)
                hashes.extend(self._cache.digest(tokens, sequence.request.extras, hashes[-1] if hashes else None))
            self._cache.commit(table, hashes[first:end])
            rows.next_commit_at[row] = (end + 1) * size
            self._waiting.wake_waiting_for(hashes[first:end])

    def check_integrity(self) -> None:
        """Recompute everything, the cache's state included; for tests, and when idle.

        Raises:
            AssertionError: something leaked, or counters are out of order.
        """
        rows = self._rows
        self._cache.check_integrity()
        rows.check_integrity()
        assert self._cache.open_tables == len(rows.tables), "a table without a row"
        assert all(self._cache.being_computed(block_hash) for block_hash in self._waiting.awaited_hashes)
        assert self.config.admission == "optimistic" or rows.reserved_blocks() <= self._cache.free_blocks
        waiting = [sequence.key for sequence in self._waiting]
        placed = [sequence.key for row, sequence in rows.sequences.items() if not rows.ended[row]]
        assert sorted(waiting + placed) == sorted(self._live), "a live sequence neither waits nor has a row, or both"
        assert len(self._waiting) == len(waiting)
