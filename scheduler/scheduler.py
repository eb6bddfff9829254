"""Which tokens run in the next step. One rule: a token budget closes gaps.

A sequence has known tokens and computed tokens, and a step computes some of the difference: prompt chunks, prefix hits,
resuming after preemption and speculation are all this one case. Knows nothing of torch, ranks, clocks or text: time is
steps, and the seconds they took.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from math import inf

from msgspec.structs import replace

from ..core.errors import InvalidArgument
from ..core.metrics import EngineTotals, SequenceState
from ..kvcache.block_table import BlockTable
from ..kvcache.manager import KVCacheManager
from .adapters.adapter_room import ADAPTER_ROOM
from .config import SchedulerConfig
from .drafts.speculation import Speculation
from .drafts.step_drafts import NO_DRAFTS, StepDrafts
from .encoders.encoder_rows import check_spans
from .events.block_contents import block_contents
from .plan import StepPlan, StepResult, StepUpdates
from .prefill_budget import PrefillBudget
from .running_set import InFlightStep, RunningSet
from .sequence import Sequence, SequenceSpec
from .step_packer import StepPacker
from .step_results import process_result
from .tenants.fairness import Fairness
from .waiting_queue import WaitingQueue

PRIORITY_CLASSES = 1 << 16
"""Priorities are clipped to this many classes."""

_CREDIT_STEPS = 16
"""A tenant that asks for less than its share may save as much as so many full steps compute."""


class Scheduler:
    """Turns sequences into step plans and their results into updates; called by one thread.

    `schedule()` may be called again before the last plan's result is applied, up to `ahead` plans beyond the oldest
    unapplied one; results are applied in the order of the plans. `make_budget`: another policy for prompts, to be
    compared with. `speculation`: None drafts nothing.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        make_budget: Callable[[SchedulerConfig], PrefillBudget] = PrefillBudget,
        speculation: Speculation | None = None,
    ) -> None:
        self.config = config
        self.speculation = speculation
        self._cache = cache
        credit = _CREDIT_STEPS * config.max_num_batched_tokens
        self._fairness = Fairness(config.ageing_steps, credit)
        self._prefill = make_budget(config)
        self.step_times = self._prefill.times
        self._waiting = WaitingQueue(self._fairness, self._measure_prompt)
        self._rows = RunningSet(config, cache, self._waiting)
        self._drafting = None
        if speculation is not None:
            self._drafting = StepDrafts(speculation, self._rows, self._fairness, config.admission == "no_evict")
        self.totals = self._rows.totals
        self._live: dict[int, Sequence] = {}
        self._step = 0
        self._arrivals = 0
        self._elapsed = 0.0  # seconds of all steps so far
        self._wait_reason = SequenceState.NO_TOKENS  # what those in line wait for

    def _measure_prompt(self, sequence: Sequence) -> None:
        sequence.shared = self._cache.shareable(sequence.hashes, sequence.shareable_tokens)
        shared, calm = sequence.shared, sequence.has_media_after(sequence.shared)
        sequence.long_prompt = self._prefill.is_long_prompt(sequence.known - shared, shared, calm)
        rows = self._rows
        if rows.states is not None:
            rows.states.ask_for_fork(sequence, rows.tables, rows.running, rows.scheduled)

    def reset_totals(self) -> None:
        """Let `totals` and those of speculation begin at 0."""
        self.totals = self._rows.totals = EngineTotals()
        if self.speculation is not None:
            self.speculation.reset_totals()

    def reset_step_times(self) -> None:
        """Forget the times of steps so far: they say nothing of those to come."""
        self.step_times.reset()
        if self.speculation is not None:
            self.speculation.costs.reset_step_times()

    @property
    def running(self) -> int:
        """Sequences that hold a row, releasing ones included."""
        return len(self._rows.sequences)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _states(self) -> dict[SequenceState, int]:
        states, waiting = {SequenceState.RUNNING: self.running}, self._waiting
        if len(waiting):
            states[SequenceState.PREEMPTED] = waiting.num_preempted
            states[SequenceState.PARKED] = waiting.num_set_aside
            # One that was preempted and is set aside is in two of them.
            states[self._wait_reason] = max(len(waiting) - waiting.num_preempted - waiting.num_set_aside, 0)
        return states

    @property
    def spare_blocks(self) -> int:
        """Blocks that are to stay free for running sequences to grow."""
        return self._rows.spare_blocks(self.config.admission == "no_evict")

    @property
    def in_flight(self) -> int:
        """Plans without a result."""
        return len(self._rows.in_flight)

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits, or a plan is in flight. If none is, `schedule()` then returns a plan."""
        return bool(self.running or self.waiting or self.in_flight)

    def add(self, request: SequenceSpec, waited: float = 0.0) -> None:
        """Put a sequence into the waiting queue; it has `waited` so many seconds before. Raises `InvalidArgument` if it
        can never run.

        Its rank is its arrival's step, later by `ageing_steps` for each class and by one for each step of its prompt:
        ranks stand still, so none is overtaken forever. Between tenants of a class, service comes first: see
        `Fairness`.
        """
        if request.key in self._live:
            raise InvalidArgument(f"sequence {request.key} is already being served")
        request.check_fits(self.config.max_model_len, self._cache)
        if request.embedded:
            room = self.config.max_num_batched_tokens - self.config.max_num_seqs + 1
            check_spans(request.embedded, len(request.prompt), room)
        priority = min(max(request.priority, 0), PRIORITY_CLASSES - 1)
        seniority = self._step + priority * self.config.ageing_steps
        rank = seniority + len(request.prompt) // self.config.rank_step_tokens
        slot = self._fairness.slot_of(request.tenant, request.weight)
        ttft, itl = request.target_ttft, request.target_itl
        sequence = Sequence(
            request,
            self._arrivals,
            seniority,
            rank,
            list(request.hashes),
            slot,
            arrived_at=self._elapsed - waited,
            target_ttft=_seconds(self.config.target_ttft_ms) if ttft is None else ttft,
            target_itl=_seconds(self.config.target_itl_ms) if itl is None else itl,
        )
        if self.speculation is not None:
            sequence.drafts = self.speculation.drafts_for(request)
        self._fairness.sequence_arrived(slot)
        self._arrivals += 1
        self._live[request.key] = sequence
        self._waiting.enqueue(sequence)

    def abort(self, keys: Iterable[int]) -> None:
        """Forget these sequences: nothing of them is reported any more, and their blocks are free as soon as no plan in
        flight uses them. Unknown keys are ignored."""
        for key in keys:
            if key in self._live:
                self._end(key)
        self._rows.started = [(key, cached) for key, cached in self._rows.started if key in self._live]

    def release_scope(self, tenant: str, scope: str) -> None:
        """Retain nothing more of this scope of a tenant's, sequences that have just ended included. Those that run may
        have something retained again."""
        for row in self._rows.releasing:
            spec = self._rows.sequences[row].spec
            if (
                self._rows.ended[row]
                and spec.retention is not None
                and (spec.tenant, spec.retention.scope) == (tenant, scope)
            ):
                self._rows.sequences[row].spec = replace(spec, retention=None)
        if self._cache.retention is not None:
            self._cache.retention.release(tenant, scope)

    def _end(self, key: int) -> None:
        sequence = self._live.pop(key)
        if self.speculation is not None and sequence.drafts is not None:
            self.speculation.finished(sequence)
        self._fairness.sequence_ended(sequence.tenant_slot)
        if sequence.row is None:
            self._waiting.remove(sequence)
            if self._rows.adapters is not None:
                self._rows.adapters.forget(sequence)
        else:
            self._rows.ended[sequence.row] = True
            self._rows.remove(sequence.row)

    def uses_adapter(self, digest: str) -> bool:
        """Whether a sequence has this adapter, ended ones included that a plan in flight still has."""
        sequences = chain(self._live.values(), self._rows.sequences.values())
        return any(sequence.spec.adapter == digest for sequence in sequences)

    def schedule(self) -> StepPlan | None:
        """Plan the next step. None: nothing can run now, or `ahead` plans are already under way."""
        if self.in_flight > self.config.ahead:
            return None
        parts = self.config, self._rows, self._fairness, self._prefill
        packer = StepPacker(*parts, self._step, self._elapsed, self._drafting)
        packed = packer.pack()
        if self._waiting.has_runnable:
            self._wait_reason = packer.wait_reason()
        if packed is None:
            return None
        plan, flight = packed
        self._rows.in_flight.append(flight)
        self._prefill.note_launched(flight.work)
        self._step += 1
        return plan

    def pause_for_patient_work(self) -> float:
        """Seconds that the plan that was made last may wait for what only computes between steps."""
        targets = self._rows.itl_targets.values()
        return self._prefill.patient_seconds(self._rows.in_flight[-1].work, min(targets, default=inf))

    def note_pause(self, seconds: float) -> None:
        """Let the clock go on by a pause of so many seconds."""
        self._elapsed += seconds

    @property
    def constrained_rows(self) -> Mapping[int, int]:
        """The keys of constrained sequences, by the row they hold or leave."""
        return self._rows.constrained.keys

    def apply(self, result: StepResult, seconds: float | None = None, host_seconds: float = 0.0) -> StepUpdates:
        """Take in the result of the oldest plan in flight; `seconds`: how long the step took, if that is known, and
        `host_seconds` from the end of the step before to its launch.

        Raises:
            RuntimeError: it is another plan's, or does not continue the known tokens.
        """
        rows = self._rows
        if not rows.in_flight or rows.in_flight[0].step != result.step:
            raise RuntimeError(f"the result of step {result.step} came out of turn")
        flight = rows.in_flight.popleft()
        if seconds:
            self._elapsed += seconds
            self.totals.count_seconds(self._states(), seconds)
            seconds -= result.proposals.seconds
            if seconds > 0:
                self.step_times.observe(flight.work, seconds)
            else:  # the result lay there while the one before was awaited: what the step took is not known
                seconds = None
        verified = NO_DRAFTS
        if self._drafting is not None:
            verified = self._drafting.take_result(flight, result, seconds, host_seconds)
        updates = process_result(rows, flight, result, verified.rejected)
        if rows.states is not None:
            rows.states.verify_drafts(flight.drafts, rows.computed)
        if verified.counts:
            updates = updates._replace(drafts=verified.counts)
        if len(result.forced):
            rows.constrained.note_forced(result, rows.known, rows.running)
        if not self._fairness.single_tenant and updates.keys:
            slots = [self._live[key].tenant_slot for key in updates.keys]
            self._fairness.charge_outputs(slots, updates.counts)
        self._commit_full_blocks(flight)
        rows.slide()
        for key, _ in updates.finished:
            self._end(key)
        rows.release_settled()
        return updates

    def _commit_full_blocks(self, flight: InFlightStep) -> None:
        """Make blocks that became full findable, and the states that `flight` kept."""
        rows, size = self._rows, self._cache.block_size
        if not self._cache.prefix_caching:
            return
        committed = list[bytes]()
        for row in (rows.computed >= rows.next_commit_at).nonzero()[0].tolist():
            full = int(rows.computed[row]) // size
            table, first = rows.tables[row], rows.tables[row].committed
            committed += self._commit(rows.sequences[row], table, full)
            if first < len(table.promised) <= table.committed:
                rows.end_promises(row)
            rows.next_commit_at[row] = (full + 1) * size
        if flight.saves and rows.states is not None:
            rows.states.settle(flight.saves, rows.computed, rows.scheduled, rows.sequences)
        self._waiting.wake(committed)

    def _commit(self, sequence: Sequence, table: BlockTable, full: int) -> list[bytes]:
        """Commit the first `full` blocks, as far as they are not, hashing generated tokens here, outside of
        `schedule()`. Returns the hashes of those that are new."""
        size, hashes, first = self._cache.block_size, sequence.hashes, table.committed
        if len(hashes) < full:
            tokens = sequence.identity_window(len(hashes) * size, full * size)
            hashes.extend(self._cache.digest(tokens, sequence.spec.extras, hashes[-1] if hashes else None))
        if self._cache.events is not None:
            self._cache.events.describe(block_contents(sequence, first, full, size))
        committed = hashes[first:full]
        self._cache.commit(table, committed)
        return committed

    def check_integrity(self) -> None:
        """Recompute everything, the cache's state included; for tests, and when idle.

        Raises:
            AssertionError: something leaked, or counters are out of order.
        """
        rows = self._rows
        self._cache.check_integrity()
        rows.check_integrity()
        assert self._cache.open_tables == len(rows.tables), "a table without a row"
        assert all(map(self._cache.being_computed, self._waiting.awaited - {ADAPTER_ROOM})), "nobody settles it"
        assert self.config.admission == "optimistic" or rows.reserved_blocks() <= self._cache.admissible_blocks
        waiting = [sequence.spec.key for sequence in self._waiting]
        placed = [sequence.spec.key for row, sequence in rows.sequences.items() if not rows.ended[row]]
        assert sorted(waiting + placed) == sorted(self._live), "a live sequence neither waits nor has a row, or both"
        assert len(self._waiting) == len(waiting)
        assert self._waiting.num_preempted == sum(sequence.admitted for sequence in self._waiting)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
