"""The step loop: receive, schedule, execute, apply, send.

Knows nothing of text, of tensors, or of how messages travel.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import numpy as np

from ...core.errors import InvalidArgument, SentError
from ...core.logprobs import Logprobs
from ...core.metrics import EngineTotals
from ...kvcache.manager import KVCacheManager
from ...scheduler.plan import ForcedTokens, MaskSource, ResolvedSampling, StepPlan, StepUpdates
from ...scheduler.scheduler import Scheduler
from ...scheduler.sequence import GREEDY, SequenceSpec
from ..checkpoint.encoder_shape import EncoderShape
from ..worker.executor import Executor, StepFuture
from .adapters import CoreAdapters
from .cache_events import CacheEventRecorder
from .constraints import ConstrainedSequences
from .deadlines import Deadlines
from .grammar_pool import NO_GRAMMARS, GrammarPool
from .inbox import IDLE_SECONDS, Inbox, LoopCall, NewRequest
from .messages import (
    NO_STEP,
    AbortRequests,
    AdapterLoaded,
    AdapterRefused,
    EngineLoad,
    FromCore,
    LoadAdapter,
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

WARM_UP_PROMPT_TOKENS, WARM_UP_NEW_TOKENS = 32, 3
"""The sequence that the warm-up computes to learn what steps cost."""

_WARM_UP_KEY = -1
_NO_UPDATES = StepUpdates([], [], [], [], [])


class LaunchedStep(NamedTuple):
    """A step without a result yet."""

    plan: StepPlan
    future: StepFuture
    launched_at: float
    """By `time.perf_counter`."""


class EngineCore:
    """One scheduler and one executor, driven by one thread.

    `inbox` takes messages of the server's process, and errors that end the loop, from any thread. `clock`: seconds, for
    timeouts. Without `grammars` there are no constraints. `events`: who is told what the cache holds.
    `encoder`: what all sequences attend to beside their tokens, if the model has one.
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
    ) -> None:
        self.prefix_origins: list[PrefixOrigin] = []
        """What a new request may wait for, one after the other; filled before the loop runs."""
        self.inbox = Inbox(cache, clock, grammars)
        self._adapters = CoreAdapters(executor, self.inbox.reply, scheduler.uses_adapter)
        self._grammars = grammars
        self._events = events
        self._encoder = encoder
        self._constraints = ConstrainedSequences(vocab_size)
        if scheduler.speculation is not None:
            scheduler.speculation.possible_drafts = self._constraints.possible_drafts
        self._failed: list[RequestRejected] = []
        self._scheduler = scheduler
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

    def warm_up(self) -> None:
        """Generate a token as every request does, and then some more to learn what prompts and decoding cost.

        Raises:
            InvalidArgument: the model's log-probabilities are not finite.
        """
        if not all(math.isfinite(scores.chosen) for scores in self._run_alone(1, 1, ResolvedSampling(logprobs=0))):
            raise InvalidArgument("the model computes no numbers: its weights are damaged, or overflow in this dtype")
        self._scheduler.reset_step_times()
        if self._scheduler.config.max_model_len >= WARM_UP_PROMPT_TOKENS + WARM_UP_NEW_TOKENS:
            self._run_alone(WARM_UP_PROMPT_TOKENS, WARM_UP_NEW_TOKENS)
        self._scheduler.reset_totals()

    def learn_step_times(self) -> None:
        """Learn what steps cost from prompts of three sizes, as large as steps may be, computed twice: a GPU's kernels
        are compiled at first."""
        config = self._scheduler.config
        longest = min(config.max_num_batched_tokens, config.max_model_len - WARM_UP_NEW_TOKENS)
        if longest < WARM_UP_PROMPT_TOKENS:
            return
        for _ in range(2):
            self._scheduler.reset_step_times()
            for prompt in (longest // 16, longest // 4, longest):
                self._run_alone(max(prompt, 1), WARM_UP_NEW_TOKENS)
        self._scheduler.repeat_step_times()
        self._scheduler.reset_totals()

    def _run_alone(self, prompt: int, new: int, sampling: ResolvedSampling = GREEDY) -> list[Logprobs]:
        """The logprobs of the new tokens, if `sampling` wants any."""
        tokens = np.zeros(prompt, np.int32)
        encoded = None if self._encoder is None else self._encoder.blank()
        spec = SequenceSpec(key=_WARM_UP_KEY, prompt=tokens, max_tokens=new, sampling=sampling, encoded=encoded)
        with suppress(InvalidArgument):  # a cache too small for the trial needs none
            self._scheduler.add(spec)
        logprobs: list[Logprobs] = []
        while self._scheduler.has_work:
            self._launch()
            logprobs += (scores for scores in self._land().logprobs if scores is not None)
        return logprobs

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
            send(self._message(updates, expired, stats))
            if self._events is not None:
                self._events.flush()

    def _receive(self, send: Callable[[FromCore], None]) -> None:
        """Take the inbox's messages. An idle loop also prepares later steps, and checks its integrity once after each
        busy time."""
        busy = self._scheduler.has_work and not self._stuck
        patience = min((origin.patience() for origin in self.prefix_origins), default=IDLE_SECONDS)
        items = self.inbox.take_all(busy, patience)
        if not (busy or items):
            self._executor.use_idle_time()
            if self._grammars is not None:
                self._grammars.prepare()  # in a thread, which would compete with the first answers
            if not self._integrity_checked:
                self._scheduler.check_integrity()
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
                    self._scheduler.release_scope(tenant, scope)
                case LoadAdapter():
                    self._adapters.load(item)
                case UnloadAdapter(digest):
                    self._adapters.unload(digest)
                case AdapterLoaded() | AdapterRefused():
                    self._adapters.finish_load(item)
                    send(item)
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
        if self._encoder is not None:
            self._encoder.check(spec.encoded)
        elif spec.encoded is not None:
            raise InvalidArgument("the model has no encoder, and the sequence attends to the output of one")
        threshold = spec.cache_hit_threshold
        if threshold is None:  # a decoder of what was encoded begins with a few tokens, which no cache has
            threshold = 0.0 if spec.encoded is not None else self._scheduler.config.cache_hit_threshold
        if threshold:
            cached = self._cache.found_tokens(spec.hashes, len(spec.prompt))
            if cached < threshold * len(spec.prompt):
                self._below_threshold.append((spec.key, cached))
                self._forget([spec.key])
                return
        self._scheduler.add(spec, self._clock() - request.arrived)
        if request.constraint is not None:
            self._constraints.live[spec.key] = request.constraint

    def _launch(self) -> None:
        """Execute all plans that may be scheduled before the next result is known."""
        while (plan := self._scheduler.schedule()) is not None:
            launched_at = time.perf_counter()
            masks: MaskSource | None = None
            if self._constraints.live:
                plan, masks = self._constraints.mask_plan(plan, self._scheduler.constrained_rows)
            self._launched.append(LaunchedStep(plan, self._executor.execute(plan, masks), launched_at))
            self._integrity_checked = False
        holding = [origin for origin in self.prefix_origins if origin.holds_blocks]
        self._stuck = bool(holding) and not self._launched and self._scheduler.waiting > 0
        if self._stuck and any(origin.make_room() for origin in holding):
            self._stuck = False

    def _land(self) -> StepUpdates:
        """Wait for the oldest step and apply its result."""
        launched = self._launched.popleft()
        result = launched.future.result()
        ended_before, self._landed_at = self._landed_at, time.perf_counter()
        began = max(launched.launched_at, ended_before)
        self._step = result.step
        forced: dict[int, ForcedTokens] = {}
        if self._constraints.live:
            forced, failed = self._constraints.follow(result, self._scheduler.constrained_rows)
            if failed:
                self._failed += failed
                self._abort([rejected.key for rejected in failed])
        updates = self._scheduler.apply(result, self._landed_at - began, forced, began - ended_before)
        for origin in self.prefix_origins:
            origin.on_updates(updates)
        if updates.finished:
            self._forget([key for key, _ in updates.finished])
        return updates

    def _abort(self, keys: Sequence[int]) -> None:
        self._scheduler.abort(keys)
        self._forget(keys)

    def _forget(self, keys: Sequence[int]) -> None:
        """What is kept of requests beside the scheduler goes: they have ended."""
        for key in keys:
            self._constraints.live.pop(key, None)
            self._deadlines.by_key.pop(key, None)
        for origin in self.prefix_origins:
            origin.discard(keys)

    def _message(self, updates: StepUpdates, expired: list[int], stats: StepStats) -> RequestUpdates:
        """The updates, with the end of sequences whose deadline had passed before the step."""
        if expired:
            updates = updates._replace(finished=updates.finished + [(key, "timeout") for key in expired])
        if self._below_threshold:
            ended = [(key, "cache_threshold") for key, _ in self._below_threshold]
            started = updates.started + self._below_threshold
            updates = updates._replace(started=started, finished=updates.finished + ended)
            self._below_threshold = []
        scheduler = self._scheduler
        cache = self._cache
        kept = (0, 0) if cache.states is None else (len(cache.states), len(cache.states.host))
        retained = (0, 0) if cache.retention is None else (len(cache.retention), cache.retention.blocks)
        awaiting_prefix = {origin.name: origin.waiting for origin in self.prefix_origins}
        waiting = scheduler.waiting + sum(awaiting_prefix.values())
        held_blocks = sum(origin.held_blocks for origin in self.prefix_origins)
        state = scheduler.running, waiting, cache.free_blocks, self._step_seconds
        load = EngineLoad(*state, *kept, *retained, held_blocks, awaiting_prefix)
        return RequestUpdates(self._step, updates, load, stats, self._totals())

    def _totals(self) -> EngineTotals:
        """What the scheduler has counted, with the counts of the core's other parts."""
        scheduled = self._scheduler.totals
        constrained = self._constraints.totals
        executor = self._executor
        grammars = NO_GRAMMARS if self._grammars is None else self._grammars.totals
        speculation, states = self._scheduler.speculation, self._cache.states
        events = None if self._events is None else self._events.publisher
        retention = self._cache.retention
        return msgspec.structs.replace(
            scheduled,
            sequence_seconds=scheduled.sequence_seconds.copy(),
            state_evictions=0 if states is None else states.evicted,
            state_hits=0 if states is None else states.restored,
            states_brought_back=0 if states is None else states.brought_back,
            grammars_compiled=grammars.compiled,
            grammar_seconds=grammars.seconds,
            grammar_hits=grammars.hits,
            masks=constrained.masks,
            mask_seconds=constrained.seconds,
            forced_tokens=constrained.forced,
            drafters_off=0 if speculation is None else speculation.drafters_off,
            drafters={} if speculation is None else speculation.copied_totals(),
            eager_steps={reason.value: count for reason, count in executor.eager_steps.items()},
            failed_captures=executor.failed_captures,
            retention_refused=0 if retention is None else retention.refused_blocks,
            retention_displaced=0 if retention is None else retention.displaced,
            event_batches=0 if events is None else events.published,
            event_batches_dropped=0 if events is None else events.dropped,
            **{origin.name: origin.totals() for origin in self.prefix_origins},
        )
