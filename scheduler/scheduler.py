"""What runs in the next step: one rule, a token budget closing gaps.

A sequence has known tokens and computed tokens. A step computes some of the difference for some sequences; prompt
chunks, prefix hits, resuming after preemption and speculation are all this one case. Knows nothing of torch,
ranks, clocks or text; time is counted in steps.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..core.errors import InvalidArgument
from ..kvcache.manager import BlockTable, KVCacheManager
from .config import SchedulerConfig
from .draft import Draft, Flight
from .fairness import Fairness
from .harvest import Harvest, harvest
from .plan import StepPlan, StepResult, StepUpdates
from .rows import Rows
from .sequence import Sequence, SequenceRequest
from .waiting import WaitingLine

CLASSES = 1 << 16
"""Priorities are clipped to this many classes."""

_CREDIT_STEPS = 16
"""A tenant who asks for less than his share may save what so many full steps compute."""


class Gap(NamedTuple):
    """What a half-computed prompt still lacks, in the order of `Scheduler._close_gaps`."""

    urgency: int
    served: float
    rank: int
    number: int
    row: int
    tokens: int


class Scheduler:
    """Turns sequences into step plans and their results into updates; called by one thread.

    `schedule()` may be called again before the last plan's result is applied, up to `ahead` plans beyond the oldest
    unapplied one; results are applied in the order of the plans.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        if not 1 <= config.max_num_seqs <= config.max_num_batched_tokens:
            raise ValueError(
                f"a step must have room for one token of each sequence: max_num_seqs {config.max_num_seqs}, "
                f"max_num_batched_tokens {config.max_num_batched_tokens}"
            )
        self._config = config
        self._cache = cache
        self._in_flight_cap = config.in_flight_per_sequence or config.ahead + 1
        self._rows = Rows(config.max_num_seqs)
        self._fairness = Fairness(config.ageing_steps, _CREDIT_STEPS * config.max_num_batched_tokens)
        self._line = WaitingLine(self._fairness)
        self._live: dict[int, Sequence] = {}
        self._flights: deque[Flight] = deque()
        self._closed: list[int] = []
        self._started: list[tuple[int, int]] = []
        self._step = 0
        self._arrivals = 0
        self._blocked: tuple[Sequence | None, int] = None, 0
        self.forget_totals()

    def forget_totals(self) -> None:
        """Count from zero again: sequences preempted, prompt tokens looked up in the prefix cache, and found there."""
        self.preemptions = self.prefix_queries = self.prefix_hits = 0

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
        prompt would fill alone: equal ranks are in order of arrival, a short prompt overtakes a long one, and
        nobody is overtaken forever, since ranks stand still while time passes. Between tenants of a class, service
        comes before rank: see `Fairness`.

        Raises:
            InvalidArgument: it can never run; nothing was done.
        """
        self._refuse_impossible(request)
        priority = min(max(request.priority, 0), CLASSES - 1)
        seniority = self._step + priority * self._config.ageing_steps
        rank = seniority + len(request.prompt) // self._config.max_num_batched_tokens
        slot = self._fairness.slot(request.tenant, request.weight)
        sequence = Sequence(request, self._arrivals, seniority, rank, list(request.hashes), slot)
        self._fairness.arrive(slot)
        self._arrivals += 1
        self._live[request.key] = sequence
        self._line.join(sequence)

    def _refuse_impossible(self, request: SequenceRequest) -> None:
        prompt, new, cache = len(request.prompt), request.max_tokens, self._cache
        if request.key in self._live:
            raise InvalidArgument(f"sequence {request.key} is already being served")
        if prompt < 1:
            raise InvalidArgument("the prompt is empty", field="prompt")
        if new < 1:
            raise InvalidArgument(f"max_tokens must be at least 1, got {new}", field="max_tokens")
        if prompt + new > self._config.max_model_len:
            raise InvalidArgument(
                f"{prompt} prompt tokens and {new} new ones exceed the model's {self._config.max_model_len}",
                field="max_tokens" if prompt < self._config.max_model_len else "prompt",
            )
        if cache.blocks_for(prompt + new - 1) > cache.blocks:
            raise InvalidArgument(
                f"{prompt} prompt tokens and {new} new ones exceed the cache's {cache.blocks * cache.block_size}",
                field="max_tokens" if cache.blocks_for(prompt) <= cache.blocks else "prompt",
            )

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
                self._line.leave(sequence)
                self._fairness.depart(sequence.slot)
        self._started = [(key, cached) for key, cached in self._started if key in self._live]

    # One step

    def schedule(self) -> StepPlan | None:
        """The next step, or None: nothing can run now, or `ahead` plans are already under way."""
        if len(self._flights) > self._config.ahead:
            return None
        draft = Draft(self._rows, self._config.max_num_batched_tokens)
        self._decode(draft)
        self._close_gaps(draft)
        launched = draft.launch(self._step, self._closed)
        if launched is None:
            return None
        plan, flight = launched
        self._flights.append(flight)
        self._closed.clear()
        self._step += 1
        return plan

    def _decode(self, draft: Draft) -> None:
        """Sequences that caught up once compute what their last result brought; senior ones first if the budget
        is short (never with one token each)."""
        gaps = self._rows.gaps(self._in_flight_cap)
        rows = np.flatnonzero(self._rows.caught_up & (gaps > 0))
        counts = gaps[rows]
        if counts.sum() > draft.left:
            rows = np.array(self._rows.by_seniority(rows))
            counts = np.clip(draft.left - np.cumsum(gaps[rows]) + gaps[rows], 0, gaps[rows])
        draft.add(rows, counts)
        lacking = rows[self._rows.scheduled[rows] + counts > self._rows.capacity[rows]]
        for row in self._rows.by_seniority(lacking):
            self._grow(draft, row)

    def _close_gaps(self, draft: Draft) -> None:
        """What remains of the budget goes to half-computed and waiting sequences alike: of one tenant by rank, of
        several to the one of the most urgent class that was served least."""
        gaps = self._half_computed()
        while draft.left:
            waiting = self._admissible(draft)
            if gaps and (waiting is None or self._precedes(gaps[-1], waiting)):
                gap = gaps.pop()
                self._chunk(draft, gap.row, gap.tokens)
            elif waiting is None:
                return
            else:
                self._admit(draft, waiting)

    def _half_computed(self) -> list[Gap]:
        """Of running sequences that never caught up; the next one is the last here."""
        rows, budget = self._rows, self._config.max_num_batched_tokens
        gaps = rows.gaps(self._in_flight_cap)
        behind = np.flatnonzero(~rows.caught_up & (gaps > 0))
        ranks = rows.seniority[behind] + gaps[behind] // budget
        standings = self._fairness.standings(rows.slot[behind], rows.seniority[behind], self._step)
        columns = (*standings, ranks, rows.number[behind], behind, gaps[behind])
        return sorted(map(Gap._make, zip(*(column.tolist() for column in columns), strict=True)), reverse=True)

    def _precedes(self, gap: Gap, waiting: Sequence) -> bool:
        slot, seniority = int(self._rows.slot[gap.row]), int(self._rows.seniority[gap.row])
        if slot != waiting.slot and not self._line.is_seniors_turn:
            mine = self._fairness.standing(slot, seniority, self._step)
            other = self._fairness.standing(waiting.slot, waiting.seniority, self._step)
            if mine != other:
                return mine < other
        return (gap.rank, gap.number) < (waiting.rank, waiting.number)

    def _admissible(self, draft: Draft) -> Sequence | None:
        """Who is to be admitted next, unless rows or blocks are short. Nobody overtakes who waits for blocks."""
        if draft.short_of_blocks or self._rows.full:
            return None
        first = self._line.first(self._step)
        return None if first is None or self._still_blocked(first) else first

    def _still_blocked(self, sequence: Sequence) -> bool:
        """No more blocks are to be had than when it last did not fit."""
        blocked, available = self._blocked
        return sequence is blocked and self._cache.free_blocks - self._spare() <= available

    def _spare(self) -> int:
        """Blocks a newcomer must leave: what others were promised, and optimistically one for each to grow."""
        claims = self._rows.claims(self._cache.block_size)
        return claims if self._config.admission == "no_evict" else claims + int(self._rows.running.sum())

    def _admit(self, draft: Draft, sequence: Sequence) -> None:
        """Give it a row and its first chunk; or set it aside until a block it can share is computed; or note that it
        does not fit, whereupon nobody is admissible until more blocks are free."""
        awaited = self._cache.awaits(sequence.hashes, sequence.known)
        if awaited is not None:
            self._line.park(sequence, awaited)
            return
        spare, free = self._spare(), self._cache.free_blocks
        table = self._cache.open(sequence.hashes, sequence.known)
        reserve = sequence.limit - 1 if self._config.admission == "no_evict" else sequence.known
        if not self._cache.room_for(table, reserve, spare):
            self._cache.close(table)
            self._blocked = (sequence, free - spare)
            return
        self._line.take(sequence)
        row = self._rows.occupy(sequence, table, reserve)
        draft.new.append(row)
        draft.grown.append(row)
        self._chunk(draft, row, sequence.known - table.cached)
        self._tell_started(sequence, table)

    def _tell_started(self, sequence: Sequence, table: BlockTable) -> None:
        if not sequence.admitted:
            sequence.admitted = True
            self.prefix_queries += len(sequence.request.prompt) if self._cache.prefix_caching else 0
            self.prefix_hits += table.cached
            self._started.append((sequence.key, table.cached))

    def _chunk(self, draft: Draft, row: int, gap: int) -> None:
        if self._rows.running[row]:  # it may have been preempted a moment ago
            draft.add(row, min(gap, draft.left))
            self._grow(draft, row)
            self._fairness.charge(int(self._rows.slot[row]), int(draft.counts[row]))

    # Blocks

    def _grow(self, draft: Draft, row: int) -> None:
        """Let the row's table hold what the draft computes, at the cost of its juniors; or leave it out."""
        if not draft.counts[row]:
            return
        table, end = self._rows.tables[row], draft.end(row)
        if self._cache.blocks_for(end) <= len(table.blocks):
            return
        while not self._cache.extend(table, end):
            if not self._make_room(draft, row, self._cache.blocks_for(end) - len(table.blocks)):
                draft.drop(row)
                return
        self._rows.capacity[row] = len(table.blocks) * self._cache.block_size
        draft.grown.append(row)

    def _make_room(self, draft: Draft, row: int, missing: int) -> bool:
        """Preempt one sequence for `missing` blocks. False: the row itself was it, or blocks come back only when
        plans in flight are applied."""
        draft.short_of_blocks = True
        returning = sum(len(self._rows.tables[leaver].blocks) for leaver in self._rows.leaving)
        if returning + self._cache.free_blocks >= missing:
            return False
        victim = self._rows.junior()
        draft.drop(victim)
        self.preemptions += 1
        self._leave(victim)
        return victim != row and victim not in self._rows.sequences

    def _leave(self, row: int) -> None:
        """Out of the running set: at once, or when the last plan in flight is applied."""
        self._rows.running[row] = False
        if not self._rows.in_flight[row]:
            self._release(row)

    def _end(self, row: int) -> None:
        sequence = self._rows.sequences[row]
        del self._live[sequence.key]
        self._fairness.depart(sequence.slot)
        self._rows.ended[row] = True
        self._leave(row)

    def _release(self, row: int) -> None:
        """Free row and blocks; a preempted sequence lines up again with all tokens it knows."""
        self._closed.append(row)
        ended = self._rows.ended[row]
        sequence, table = self._rows.vacate(row)
        self._cache.close(table)
        self._line.wake(table.promised[table.committed :])
        if not ended:
            sequence.rank = sequence.seniority  # most of it is still cached
            self._line.join(sequence)

    # Results

    def apply(self, result: StepResult) -> StepUpdates:
        """Take in the result of the oldest plan in flight.

        Raises:
            RuntimeError: it is another plan's, or does not continue the known tokens.
        """
        if not self._flights or self._flights[0].step != result.step:
            raise RuntimeError(f"the result of step {result.step} came out of turn")
        flight = self._flights.popleft()
        gathered = harvest(self._rows, flight, result)
        self._fairness.charge_outputs(self._rows.slot[gathered.rows], gathered.counts)
        self._commit(flight)
        updates = self._updates(gathered)
        for row, _ in gathered.finished:
            self._end(row)
        self._release_landed(flight)
        return updates

    def _updates(self, gathered: Harvest) -> StepUpdates:
        keys = self._rows.keys
        finished = [(keys[row], reason) for row, reason in gathered.finished]
        started, self._started = self._started, []
        owners = [keys[row] for row in gathered.rows]
        return StepUpdates(owners, gathered.counts, gathered.tokens, started, finished, gathered.logprobs)

    def _release_landed(self, flight: Flight) -> None:
        rows = self._rows
        for row in flight.rows[~rows.running[flight.rows] & (rows.in_flight[flight.rows] == 0)].tolist():
            if row in rows.sequences:
                self._release(row)

    def _commit(self, flight: Flight) -> None:
        """Make blocks that became full findable, hashing generated ones here, outside of `schedule()`."""
        if not self._cache.prefix_caching:
            return
        rows, size = self._rows, self._cache.block_size
        computed = rows.computed[flight.rows]
        for row in flight.rows[computed - rows.committed[flight.rows] >= size].tolist():
            sequence, table = rows.sequences[row], rows.tables[row]
            first, end = table.committed, int(rows.computed[row]) // size
            self._hash(sequence, end)
            self._cache.commit(table, sequence.hashes[first:end])
            rows.committed[row] = end * size
            self._line.wake(sequence.hashes[first:end])

    def _hash(self, sequence: Sequence, blocks: int) -> None:
        """Let the sequence have the hashes of its first `blocks` blocks."""
        size, hashes = self._cache.block_size, sequence.hashes
        if len(hashes) < blocks:
            tokens = sequence.window(len(hashes) * size, blocks * size)
            parent = hashes[-1] if hashes else None
            hashes.extend(self._cache.digest(tokens, sequence.request.extras, parent))

    def check_integrity(self) -> None:
        """Recompute everything, the cache's state included; for tests, and when idle.

        Raises:
            AssertionError: something leaked, or counters are out of order.
        """
        rows, size = self._rows, self._cache.block_size
        self._cache.check_integrity()
        rows.check_integrity(size)
        assert self._cache.open_tables == len(rows.tables), "a table without a row"
        assert all(self._cache.being_computed(block_hash) for block_hash in self._line.awaited)
        assert self._config.admission == "optimistic" or rows.claims(size) <= self._cache.free_blocks
        self._check_flights()
        self._check_places()

    def _check_flights(self) -> None:
        """Plans in flight and pending tokens are those of the flights."""
        rows = self._rows
        in_flight, pending = np.zeros_like(rows.in_flight), np.zeros_like(rows.pending)
        for flight in self._flights:
            in_flight[flight.rows] += 1
            pending[flight.rows] += flight.samples
        occupied = sorted(rows.sequences)
        assert (in_flight == rows.in_flight).all()
        assert (pending == rows.pending)[occupied].all()

    def _check_places(self) -> None:
        """Every live sequence waits or has a row, and not both."""
        waiting = [sequence.key for sequence in self._line]
        placed = [sequence.key for row, sequence in self._rows.sequences.items() if not self._rows.ended[row]]
        assert sorted(waiting + placed) == sorted(self._live)
        assert len(self._line) == len(waiting)
