"""A server's engine in a simulated time: admission, routing, schedulers and caches are the real ones, but no model
computes, and each core's clock goes on by what its steps would take.

Figures are exact and the same everywhere. Knows neither traces nor where the times of steps come from.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from math import inf
from random import Random
from time import monotonic
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
import numpy as np

from ...core.errors import InvalidArgument, QueueFull
from ...engine.client.admission import AdmissionControl, QueueLimits, QueueTicket
from ...engine.client.routing import NOT_CACHED, TOKENS_PER_REQUEST, ExpectedPrefix, PrefixIndex, route_prompt
from ...engine.core.warm_up import WARM_UP_NEW_TOKENS, WARM_UP_PROMPT_TOKENS
from ...kvcache.layer_groups import ONE_GROUP, LayerGroups
from ...kvcache.manager import KVCacheManager
from ...kvcache.retention.session_retention import RetentionBudget
from ...scheduler.config import SchedulerConfig
from ...scheduler.plan import IntArray, StepPlan, StepResult, StepUpdates
from ...scheduler.prefill_budget import PrefillBudget
from ...scheduler.scheduler import Scheduler
from ...scheduler.sequence import SequenceSpec
from .simulated_machine import SimulatedMachine, StepLoadReader
from .simulated_request import FIRST_TEXT, MOST_TEXTS, SimulatedRequest, SimulatedResult

MakeBudget = Callable[[SchedulerConfig], PrefillBudget]
WatchStep = Callable[[StepPlan, float], None]


_AtLeastOne: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
_NotNegative: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class EngineShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine as far as a simulation goes: its scheduler, the cache of each of its replicas, and what may wait."""

    scheduler: SchedulerConfig
    blocks: _AtLeastOne
    """The blocks of the cache, each for one of the `groups` of layers."""
    snapshots: _NotNegative = 0
    """Snapshots of recurrent states, if the model has any."""
    host_blocks: _NotNegative = 0
    """Blocks in the host's memory. Copies there and back take no time in a simulation."""
    host_snapshots: _NotNegative = 0
    """Snapshots in the host's memory, in the same way."""
    retained_blocks: _NotNegative = 0
    """The most blocks that sessions retain together; see `SimulatedRequest.retained`."""
    groups: LayerGroups = ONE_GROUP
    """The groups of the model's layers."""
    block_size: _AtLeastOne = 16
    """Tokens of a block."""
    prefix_caching: bool = True
    """Whether prompts share the cache of equal beginnings."""
    max_queued_requests: _AtLeastOne = 512
    """Requests that may wait; more are refused."""
    max_queued_tokens: _AtLeastOne = 1_048_576
    """Prompt tokens that may wait, over all requests."""

    def make_cache(self, clock: Callable[[], float] = monotonic) -> KVCacheManager:
        """An empty cache of a replica; `clock`: seconds."""
        groups = self.groups._replace(in_flight=self.scheduler.tokens_in_flight)
        sizes = self.blocks, self.block_size, self.prefix_caching, self.host_blocks, self.snapshots
        budget = RetentionBudget(self.retained_blocks, self.snapshots * self.retained_blocks // self.blocks)
        cache = KVCacheManager(*sizes, groups=groups, host_snapshots=self.host_snapshots, retention=budget)
        if cache.retention is not None:
            cache.retention.clock = clock
        return cache


def unlimited_engine(scheduler: SchedulerConfig) -> EngineShape:
    """An engine whose cache is never full, shares nothing and refuses nobody: its scheduler alone is looked at."""
    size = EngineShape(scheduler=scheduler, blocks=1).block_size
    return EngineShape(
        scheduler=scheduler,
        blocks=scheduler.max_num_seqs * (scheduler.max_model_len // size + 1),
        prefix_caching=False,
        max_queued_requests=sys.maxsize,
        max_queued_tokens=sys.maxsize,
    )


class _FlyingStep(NamedTuple):
    plan: StepPlan
    seconds: float
    end: float


class SimulatedReplica:
    """One engine core. It steps at `next_at` (seconds; `inf` while it is idle), as long as there is work.

    `prefix_index` is the frontend's. `busy`: seconds of all steps; `steps`: how many. `blocks`: of its cache. `held`:
    those in use, summed over the seconds of steps; `most_held`: the most at once.
    """

    def __init__(
        self, machine: SimulatedMachine, engine: EngineShape, make_budget: MakeBudget, seed: int, watch: WatchStep
    ) -> None:
        self.prefix_index = PrefixIndex()
        self.next_at = inf
        self.blocks = engine.blocks
        self.busy = self.held = 0.0
        self.steps = self.most_held = 0
        self._machine = machine
        self._watch = watch
        self._random = Random(seed)
        self._now = 0.0
        self.cache = engine.make_cache(lambda: self._now)
        self.scheduler = Scheduler(engine.scheduler, self.cache, make_budget)
        self._inbox: list[tuple[SequenceSpec, float]] = []
        self._flying = deque[_FlyingStep]()
        self._uncomputed: dict[int, int] = {}
        self._expected: dict[int, ExpectedPrefix] = {}
        self._uncomputed_tokens = self._drawn = 0
        self._texts: dict[int, int] = {}
        """By row the token that a conversation goes on with."""
        self._loads = StepLoadReader()
        self._warm_up()

    def _warm_up(self) -> None:
        """Run the steps that an engine begins with, and learn what they cost from the later ones, as it does."""
        for request in (
            SimulatedRequest(0.0, 1, 1),
            SimulatedRequest(0.0, WARM_UP_PROMPT_TOKENS, WARM_UP_NEW_TOKENS),
        ):
            self.scheduler.reset_step_times()
            with suppress(InvalidArgument):  # an engine too small for it needs none
                self.submit(-1, request, 0.0)
            while self.next_at < inf:
                self.step()
        self.scheduler.reset_totals()
        self.busy = self.held = 0.0
        self.steps = self.most_held = 0

    @property
    def pending_work(self) -> int:
        """The work ahead of it, in tokens as `routing.ReplicaCandidate` counts."""
        return len(self._uncomputed) * TOKENS_PER_REQUEST + self._uncomputed_tokens

    @property
    def cache_tokens(self) -> int:
        """Tokens of the longest sequence that its cache has room for."""
        return self.cache.longest

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """Tokens that the cache blocks in use hold, and that all of them would."""
        size, groups = self.cache.block_size, self.cache.groups.total
        used = self.cache.blocks - self.cache.free_blocks
        return used * size // groups, self.cache.blocks * size // groups

    def submit(self, key: int, request: SimulatedRequest, now: float, expected: ExpectedPrefix = NOT_CACHED) -> None:
        """A request comes, of which the cache likely has what is `expected`. An idle core takes it at once, a busy one
        before its next step.

        Raises:
            InvalidArgument: it can never run.
        """
        prompt = request.tokens(key)
        sequence = SequenceSpec(
            key=key,
            prompt=prompt,
            max_tokens=request.new,
            hashes=self.cache.digest(prompt, ("", request.tenant, "")),
            priority=request.priority,
            tenant=request.tenant,
            weight=request.weight,
            target_ttft=request.target_ttft,
            target_itl=request.target_itl,
            retention=request.retention,
        )
        sequence.check_fits(self.scheduler.config.max_model_len, self.cache)
        self._inbox.append((sequence, now))
        self._expected[key] = expected
        self._uncomputed[key] = request.prompt - expected.tokens
        self._uncomputed_tokens += request.prompt - expected.tokens
        if self.next_at == inf:
            self.next_at = now

    def release(self, request: SimulatedRequest) -> None:
        """The conversation that this request is of goes on no more."""
        self.scheduler.release_scope(request.tenant, str(request.conversation))

    def step(self) -> StepUpdates:
        """End the step that ends at `next_at`, if one does, and launch what may be launched then."""
        self._now = now = begin = self.next_at
        updates = StepUpdates([], [], [], [], [])
        if self._flying:
            updates = self._land(self._flying.popleft())
            begin += self._machine.seconds_between(len(updates.keys))
        for request, at in self._inbox:
            self.scheduler.add(request, now - at)
        self._inbox.clear()
        while (plan := self.scheduler.schedule()) is not None:
            self._launch(plan, begin)
        self.next_at = self._flying[0].end if self._flying else inf
        return updates

    def _launch(self, plan: StepPlan, begin: float) -> None:
        began = max(begin, self._flying[-1].end if self._flying else begin)
        seconds = self._machine.draw_seconds(self._loads.read(plan), self._random)
        self._watch(plan, seconds)
        for new in plan.new:
            self._texts[new.row] = int(new.tokens[-1])
        self._flying.append(_FlyingStep(plan, seconds, began + seconds))

    def _land(self, step: _FlyingStep) -> StepUpdates:
        plan = step.plan
        used = self.cache.blocks - self.cache.free_blocks
        rows = plan.rows[plan.samples]
        ends = (plan.starts + plan.counts)[plan.samples]
        result = StepResult(plan.step, rows, ends, np.ones_like(rows), self._draw_tokens(rows))
        updates = self.scheduler.apply(result, step.seconds)
        self.busy += step.seconds
        self.steps += 1
        self.held += used * step.seconds
        self.most_held = max(self.most_held, used)
        for key, cached in updates.started:
            self.prefix_index.correct(self._expected.pop(key), cached)
        for key in updates.keys:
            self._uncomputed_tokens -= self._uncomputed[key]
            self._uncomputed[key] = 0
        for key, _ in updates.finished:
            del self._uncomputed[key]
        return updates

    def _draw_tokens(self, rows: IntArray) -> IntArray:
        """Generated tokens, none of which is in another text: what is generated is never found in the cache, but by
        its own conversation."""
        count = len(rows)
        self._drawn += count
        drawn = -1 - np.arange(self._drawn - count, self._drawn, dtype=np.int64).astype(np.int32)
        texts = np.array([self._texts[row] for row in rows.tolist()], np.int32)
        return np.where(texts < FIRST_TEXT + MOST_TEXTS, texts, drawn)


class Simulation:
    """`replicas` alike behind one queue, as one server has them. `now`: seconds, of the last event. `watch` sees every
    plan and the seconds it takes."""

    def __init__(
        self,
        machine: SimulatedMachine,
        engine: EngineShape,
        replicas: int = 1,
        watch: WatchStep = lambda plan, seconds: None,
        make_budget: MakeBudget = PrefillBudget,
    ) -> None:
        self.now = 0.0
        self.replicas = [SimulatedReplica(machine, engine, make_budget, seed, watch) for seed in range(replicas)]
        self._machine = machine
        self._engine = engine
        self._affinity = engine.prefix_caching and replicas > 1
        limits = QueueLimits(engine.max_queued_requests, engine.max_queued_tokens)
        self._admission = AdmissionControl(limits, clock=lambda: self.now)
        self._tickets: dict[int, QueueTicket] = {}
        self._due: list[tuple[float, int]] = []
        """A heap of when requests come."""
        self._next_of_session: dict[int, int] = {}

    @property
    def busy(self) -> float:
        """Seconds of all steps of all replicas."""
        return sum(replica.busy for replica in self.replicas)

    def run(self, arrivals: Iterable[SimulatedRequest]) -> list[SimulatedResult]:
        """Run all to their ends; the results in the order of arrival, as far as sessions do not wait for answers."""
        heard = [SimulatedResult(arrival) for arrival in sorted(arrivals, key=lambda arrival: arrival.at)]
        last: dict[int, int] = {}
        for key, result in enumerate(heard):
            if (session := result.arrival.session) in last and session:
                self._next_of_session[last[session]] = key
            else:
                self._expect(key, result)
            last[session] = key
        while True:
            due, key = self._due[0] if self._due else (inf, -1)
            replica = min(self.replicas, key=lambda replica: replica.next_at)
            if replica.next_at < due:
                self._step(replica, heard)
            elif key < 0:
                return heard
            else:
                heappop(self._due)
                self.now = due
                self._admit(key, heard)

    def _expect(self, key: int, result: SimulatedResult) -> None:
        """Let a request be in the engine as long after its arrival as it takes to get there."""
        arrival = result.arrival
        heappush(self._due, (arrival.at + self._machine.arrival_seconds(arrival.prompt), key))

    def _step(self, replica: SimulatedReplica, heard: Sequence[SimulatedResult]) -> None:
        """Let the replica's next step end."""
        self.now = replica.next_at
        updates = replica.step()
        for key, cached in updates.started:
            self._tickets.pop(key).release(started=True)
            heard[key].cached = cached
        for key in updates.keys:
            heard[key].tokens.append(self.now)
        for key, _ in updates.finished:
            if (arrival := heard[key].arrival).retained and arrival.last:
                replica.release(arrival)
            self._go_on(key, heard)

    def _go_on(self, key: int, heard: Sequence[SimulatedResult]) -> None:
        """The next request of the session comes, for this one was answered, or refused."""
        following = self._next_of_session.pop(key, None)
        if following is not None:
            arrival = heard[following].arrival
            heard[following].arrival = arrival._replace(at=max(arrival.at, self.now + arrival.pause))
            self._expect(following, heard[following])

    def _admit(self, key: int, heard: Sequence[SimulatedResult]) -> None:
        request = heard[key].arrival
        try:
            ticket = self._tickets[key] = self._admission.admit(request.tenant)
            self._admission.add_prompt(ticket, request.prompt)
            replica, expected = self._choose_replica(key, request)
            replica.submit(key, request, self.now, expected)
        except (InvalidArgument, QueueFull) as error:
            too_long = self._why_too_long(request)
            heard[key].refused = f"max_queued_{error.limit}" if isinstance(error, QueueFull) else too_long
            if key in self._tickets:
                self._tickets.pop(key).release()
            self._go_on(key, heard)

    def _choose_replica(self, key: int, request: SimulatedRequest) -> tuple[SimulatedReplica, ExpectedPrefix]:
        if not self._affinity:
            return min(self.replicas, key=lambda replica: replica.pending_work), NOT_CACHED
        return route_prompt(self.replicas, request.tokens(key), ("", request.tenant, ""))

    def _why_too_long(self, request: SimulatedRequest) -> str:
        """The limit that a request can never keep, without its own numbers: so that refusals can be counted."""
        longest = self._engine.scheduler.max_model_len
        capacity = self.replicas[0].cache_tokens
        limit = f"model's {longest}" if request.prompt + request.new > longest else f"cache's {capacity}"
        return f"tokens exceed the {limit}"

    def check_integrity(self) -> None:
        """Raises `AssertionError` where a scheduler, a cache or the queue lost something."""
        for replica in self.replicas:
            replica.scheduler.check_integrity()
        assert self._admission.waiting.requests == len(self._tickets), "a ticket leaked"
