"""The step loop: receive, schedule, execute, apply, send.

Knows nothing of text, of tensors, or of how messages travel.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from ...core.errors import InvalidArgument, SentError
from ...kvcache.manager import KVCacheManager
from ...scheduler.plan import MaskSource, StepPlan, StepUpdates
from ...scheduler.scheduler import Scheduler
from ...scheduler.sequence import SequenceSpec
from ..checkpoint.encoder_shape import EncoderShape
from ..worker.executor import Executor, StepFuture
from .adapters import CoreAdapters
from .cache_events import CacheEventRecorder
from .constraints import ConstrainedSequences
from .core_figures import CoreFigures
from .deadlines import Deadlines
from .grammar_pool import GrammarPool
from .inbox import IDLE_SECONDS, Inbox, LoopCall, NewRequest
from .messages import (
    NO_STEP,
    AbortRequests,
    AdapterLoaded,
    AdapterRefused,
    FromCore,
    LoadAdapter,
    PatientWorkWaits,
    ReleaseScope,
    RequestRejected,
    RequestUpdates,
    Shutdown,
    StepStats,
    UnloadAdapter,
)
from .prefix_origins import PrefixOrigin

_LAST_STEP_WEIGHT = 0.1
"""Weight of the last step in the moving average of step times."""

_NO_UPDATES = StepUpdates([], [], [], [], [])


class LaunchedStep(NamedTuple):
    """A step without a result yet."""

    plan: StepPlan
    future: StepFuture
    launched_at: float
    """By `time.perf_counter`."""
    paused: float = 0.0
    """Seconds before that in which nothing was done."""


class EngineCore:
    """One scheduler and one executor, driven by one thread.

    `inbox` takes messages of the server's process, and errors that end the loop, from any thread. `clock`: seconds, for
    timeouts. Without `grammars` there are no constraints. `events`: who is told what the cache holds.
    `encoder`: what all sequences attend to beside their tokens, if the model has one. `leaves_time`: steps take all
    processors, and time is left between them while somebody waits for what needs one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: KVCacheManager,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarPool | None = None,
        vocab_size: int = 0,
        events: CacheEventRecorder | None = None,
        encoder: EncoderShape | None = None,
        leaves_time: bool = False,
    ) -> None:
        self.prefix_origins: list[PrefixOrigin] = []
        """What a new request may wait for, one after the other; filled before the loop runs."""
        self.inbox = Inbox(cache, clock, grammars)
        self._adapters = CoreAdapters(executor, self.inbox.reply, scheduler.uses_adapter)
        self._grammars = grammars
        self._events = events
        self.encoder = encoder
        self.scheduler = scheduler
        self._constraints = ConstrainedSequences(vocab_size)
        self._figures = CoreFigures(scheduler, cache, executor, self._constraints, grammars, events)
        if scheduler.speculation is not None:
            scheduler.speculation.possible_drafts = self._constraints.possible_drafts
        self._failed: list[RequestRejected] = []
        self._cache = cache
        self._executor = executor
        self._clock = clock
        self._below_threshold: list[tuple[int, int]] = []  # requests that end unbegun, and what is cached of them
        self._deadlines = Deadlines()
        self._launched: deque[LaunchedStep] = deque()
        self._step = -1
        self._step_seconds = 0.0
        self._landed_at = 0.0
        self._integrity_checked = True
        self._leaves_time = leaves_time
        self._patient_work_waits = False
        self._stopping = False
        self._stuck = False  # sequences wait, and none can run before something comes

    def close(self) -> None:
        """Compile no more grammars, and publish what is left."""
        if self._grammars is not None:
            self._grammars.close()
        for origin in self.prefix_origins:
            origin.close()
        if self._events is not None:
            self._events.publisher.close()

    def run_alone(self, spec: SequenceSpec) -> list[StepUpdates]:
        """Run one sequence before any request comes; one that the cache has no room for is left out."""
        with suppress(InvalidArgument):
            self.scheduler.add(spec)
        updates: list[StepUpdates] = []
        while self.scheduler.has_work:
            self._launch()
            updates.append(self._land())
        return updates

    def run(self, send: Callable[[FromCore], None]) -> None:
        """Turn until a `Shutdown` comes, or raise an error of the executor or the inbox. `send` takes messages to the
        server and never waits for their reader."""
        while not self._stopping:
            self._receive(send)
            expired = self._deadlines.pop_expired(self._clock()) if self._deadlines.by_key else []
            if expired:
                self._abort(expired)
            began = time.perf_counter()
            self._launch()
            if self._launched:
                plan = self._launched[0].plan
                updates = self._land()
                stats = StepStats(time.perf_counter() - began, plan.tokens, len(plan.rows))
                last = self._step_seconds or stats.seconds
                self._step_seconds = last + _LAST_STEP_WEIGHT * (stats.seconds - last)
            else:
                updates, stats = _NO_UPDATES, NO_STEP
            for rejected in self._failed:
                send(rejected)
            self._failed.clear()
            load = self._figures.load(self._step_seconds, self.prefix_origins)
            totals = self._figures.totals(self.prefix_origins)
            send(RequestUpdates(self._step, self._with_ended(updates, expired), load, stats, totals))
            if self._events is not None:
                self._events.flush()

    def _receive(self, send: Callable[[FromCore], None]) -> None:
        """Take the inbox's messages. An idle loop also prepares later steps, and checks its integrity once after each
        busy time."""
        busy = self.scheduler.has_work and not self._stuck
        patience = min((origin.patience() for origin in self.prefix_origins), default=IDLE_SECONDS)
        items = self.inbox.take_all(busy, patience)
        if not (busy or items):
            self._executor.use_idle_time()
            if self._grammars is not None:
                self._grammars.prepare()  # in a thread, which would compete with the first answers
            if not self._integrity_checked:
                self.scheduler.check_integrity()
                for origin in self.prefix_origins:
                    origin.check_integrity()
                self._integrity_checked = True
        for item in items:
            match item:
                case NewRequest():
                    if item.deadline is not None:
                        self._deadlines.set(item.spec.key, item.deadline)
                    self._begin(item, self.prefix_origins, send)
                case LoopCall():
                    item.run()
                case RequestRejected():
                    send(item)
                case AbortRequests(keys):
                    self._abort(keys)
                case ReleaseScope(tenant, scope):
                    self.scheduler.release_scope(tenant, scope)
                case LoadAdapter():
                    self._adapters.load(item)
                case UnloadAdapter(digest):
                    self._adapters.unload(digest)
                case AdapterLoaded() | AdapterRefused():
                    self._adapters.finish_load(item)
                    send(item)
                case PatientWorkWaits(waits):
                    self._patient_work_waits = waits and self._leaves_time
                case Shutdown():
                    self._stopping = True
                case BaseException():
                    raise item
        if self._adapters.leaving:
            self._adapters.forget_unused()
        for number, origin in enumerate(self.prefix_origins, 1):
            for ready in origin.turn():
                if isinstance(ready, NewRequest):
                    self._begin(ready, self.prefix_origins[number:], send)
                else:
                    self._forget([ready.key])
                    send(ready)

    def _begin(self, request: NewRequest, origins: Iterable[PrefixOrigin], send: Callable[[FromCore], None]) -> None:
        """Let the request wait for one of these origins, or give it to the scheduler; refuse what can never run."""
        try:
            if not any(origin.take(request) for origin in origins):
                self._add(request)
        except InvalidArgument as error:
            key = request.spec.key
            self._forget([key])
            refusal = SentError.of(error)
            if error.field is not None and error.field not in error.message:
                refusal = msgspec.structs.replace(refusal, message=f"{error.field}: {error.message}")
            send(RequestRejected(key, refusal))

    def _add(self, request: NewRequest) -> None:
        """Give the request to the scheduler, or end it, if too little of its prompt is cached. Raises `InvalidArgument`
        if it can never run."""
        spec = request.spec
        if spec.adapter and spec.adapter not in self._adapters:
            raise InvalidArgument("the adapter is not loaded", field="lora_name")
        if self.encoder is not None:
            self.encoder.check(spec.encoded)
        elif spec.encoded is not None:
            raise InvalidArgument("the model has no encoder, and the sequence attends to the output of one")
        threshold = spec.cache_hit_threshold
        if threshold is None:  # a decoder of what was encoded begins with a few tokens, which no cache has
            threshold = 0.0 if spec.encoded is not None else self.scheduler.config.cache_hit_threshold
        if threshold:
            cached = self._cache.found_tokens(spec.hashes, len(spec.prompt))
            if cached < threshold * len(spec.prompt):
                self._below_threshold.append((spec.key, cached))
                self._forget([spec.key])
                return
        self.scheduler.add(spec, self._clock() - request.arrived)
        if request.constraint is not None:
            self._constraints.live[spec.key] = request.constraint

    def _launch(self) -> None:
        """Execute all plans that may be scheduled before the next result is known."""
        while (plan := self.scheduler.schedule()) is not None:
            paused = 0.0
            if self._patient_work_waits and not self._stopping:
                began = time.perf_counter()
                self.inbox.pause(self.scheduler.pause_for_patient_work())
                paused = time.perf_counter() - began
                self.scheduler.note_pause(paused)
            launched_at = time.perf_counter()
            masks: MaskSource | None = None
            if self._constraints.live:
                plan, masks = self._constraints.mask_plan(plan, self.scheduler.constrained_rows)
            self._launched.append(LaunchedStep(plan, self._executor.execute(plan, masks), launched_at, paused))
            self._integrity_checked = False
        holding = [origin for origin in self.prefix_origins if origin.holds_blocks]
        self._stuck = bool(holding) and not self._launched and self.scheduler.waiting > 0
        if self._stuck and any(origin.make_room() for origin in holding):
            self._stuck = False

    def _land(self) -> StepUpdates:
        """Wait for the oldest step and apply its result."""
        launched = self._launched.popleft()
        result = launched.future.result()
        ended_before, self._landed_at = self._landed_at, time.perf_counter()
        began = max(launched.launched_at, ended_before)
        self._step = result.step
        if self._constraints.live:
            result, failed = self._constraints.follow(result, self.scheduler.constrained_rows)
            if failed:
                self._failed += failed
                self._abort([rejected.key for rejected in failed])
        host_seconds = max(began - ended_before - launched.paused, 0.0)
        updates = self.scheduler.apply(result, self._landed_at - began, host_seconds)
        for origin in self.prefix_origins:
            origin.on_updates(updates)
        if updates.finished:
            self._forget([key for key, _ in updates.finished])
        return updates

    def _abort(self, keys: Sequence[int]) -> None:
        self.scheduler.abort(keys)
        self._forget(keys)

    def _forget(self, keys: Sequence[int]) -> None:
        """What is kept of requests beside the scheduler goes: they have ended."""
        for key in keys:
            self._constraints.live.pop(key, None)
            self._deadlines.by_key.pop(key, None)
        for origin in self.prefix_origins:
            origin.discard(keys)

    def _with_ended(self, updates: StepUpdates, expired: list[int]) -> StepUpdates:
        """The updates, with the sequences whose deadline had passed before the step, and those that end unbegun."""
        if expired:
            updates = updates._replace(finished=updates.finished + [(key, "timeout") for key in expired])
        if self._below_threshold:
            ended = [(key, "cache_threshold") for key, _ in self._below_threshold]
            started = updates.started + self._below_threshold
            updates = updates._replace(started=started, finished=updates.finished + ended)
            self._below_threshold = []
        return updates
