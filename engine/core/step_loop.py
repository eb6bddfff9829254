"""The step loop: receive, schedule, execute, apply, send.

Knows nothing of text, of tensors, or of how messages travel.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np

from ...core.errors import InvalidArgument
from ...core.logprobs import Logprobs
from ...kvcache.manager import KVCacheManager
from ...scheduler.plan import SamplerParams, StepUpdates
from ...scheduler.scheduler import Scheduler
from ...scheduler.sequence import GREEDY, SequenceRequest
from ..worker.executor import Executor, StepFuture
from .deadlines import Deadlines
from .inbox import ClientRejection, Inbox, NewRequest
from .messages import NO_STEP, AbortRequests, CoreTotals, EngineLoad, FromCore, Shutdown, StepStats, ToCore
from .request_keys import client_key, scheduler_key, split_updates

_LAST_STEP_WEIGHT = 0.1
"""Weight of the last step in the moving average of step times."""

TRIAL_PROMPT, TRIAL_TOKENS = 32, 3
"""What a warm-up computes to learn what steps cost."""


class MessageSink(Protocol):
    """Where messages leave; clients are numbered from 0. Never waits for a reader."""

    @property
    def clients(self) -> int: ...

    def send(self, client: int, message: FromCore) -> None: ...


class LaunchedStep(NamedTuple):
    """A step on its way, how much it computes, and when it was launched."""

    future: StepFuture
    tokens: int
    sequences: int
    launched_at: float


class EngineCore:
    """One scheduler and one executor, turned for all clients by one thread; `accept` and `fail` are for any thread.

    `clock`: what timeouts are measured by, in seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: KVCacheManager,
        executor: Executor,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._executor = executor
        self._clock = clock
        self._deadlines = Deadlines()
        self._arrivals = Inbox(vocab_size, cache, clock)
        self._in_flight: deque[LaunchedStep] = deque()
        self._step = -1
        self._step_seconds = 0.0
        self._landed = 0.0
        self._checked = True
        self._running = True

    def accept(self, message: ToCore) -> None:
        """Take a message; what costs time happens here, in the caller's thread, and not in the step."""
        self._arrivals.accept(message)

    def fail(self, error: BaseException) -> None:
        """Let the loop end with this error."""
        self._arrivals.fail(error)

    def warm_up(self) -> None:
        """Generate one token the way every request does; then some more, to learn what prompts and decoding cost.

        Raises:
            InvalidArgument: what the model computes are no numbers.
        """
        _check_finite(self._run_alone(prompt=1, new=1, sampling=SamplerParams(logprobs=0)))
        self._scheduler.reset_step_times()
        if self._scheduler.config.max_model_len >= TRIAL_PROMPT + TRIAL_TOKENS:
            self._run_alone(TRIAL_PROMPT, TRIAL_TOKENS)
        self._scheduler.reset_totals()

    def _run_alone(self, prompt: int, new: int, sampling: SamplerParams = GREEDY) -> list[Logprobs]:
        """The logprobs of the new tokens, if `sampling` wants any."""
        request = SequenceRequest(
            key=scheduler_key(0, -1), prompt=np.zeros(prompt, np.int32), max_tokens=new, sampling=sampling
        )
        with suppress(InvalidArgument):  # a cache so small needs no trial
            self._scheduler.add(request)
        found: list[Logprobs] = []
        while self._scheduler.has_work:
            self._launch()
            found += (each for each in self._land().logprobs if each is not None)
        return found

    def run(self, outbox: MessageSink) -> None:
        """Turn until a Shutdown comes. What the executor raises ends the loop too."""
        while self._running:
            self._receive(outbox)
            late = self._expire()
            began = time.perf_counter()
            self._launch()
            if self._in_flight:
                landing = self._in_flight[0]
                updates = self._land()
                turn = StepStats(time.perf_counter() - began, landing.tokens, landing.sequences)
                self._time_step(turn.seconds)
            else:
                updates, turn = _NO_UPDATES, NO_STEP
            self._send(_with_timeouts(updates, late), turn, outbox)

    # Receive

    def _receive(self, outbox: MessageSink) -> None:
        for arrival in self._arrivals.take_all(self._scheduler.has_work, self._check_once):
            match arrival:
                case NewRequest(request, deadline):
                    self._add(request, deadline, outbox)
                case AbortRequests(client, keys):
                    self._abort([scheduler_key(client, key) for key in keys])
                case ClientRejection(client, message):
                    outbox.send(client, message)
                case Shutdown():
                    self._running = False
                case BaseException():
                    raise arrival

    def _check_once(self) -> None:
        """Having been busy, and now idle for long enough to afford it: look for leaks."""
        if not self._checked:
            self._scheduler.check_integrity()
            self._checked = True

    def _abort(self, keys: list[int]) -> None:
        self._scheduler.abort(keys)
        for key in keys:
            self._deadlines.discard(key)

    def _expire(self) -> list[int]:
        """End every sequence whose time is over; their keys."""
        late = self._deadlines.pop_expired(self._clock()) if self._deadlines else []
        self._scheduler.abort(late)
        return late

    def _add(self, request: SequenceRequest, deadline: float | None, outbox: MessageSink) -> None:
        try:
            self._scheduler.add(request)
            if deadline is not None:
                self._deadlines.set(request.key, deadline)
        except InvalidArgument as error:
            client, key = client_key(request.key)
            outbox.send(client, ClientRejection.of(client, key, error).message)

    # Schedule and execute, apply

    def _launch(self) -> None:
        """Have everything computed that may be scheduled before the next result is known."""
        while (plan := self._scheduler.schedule()) is not None:
            at = time.perf_counter()
            self._in_flight.append(LaunchedStep(self._executor.execute(plan), plan.tokens, len(plan.rows), at))
            self._checked = False

    def _land(self) -> StepUpdates:
        """Wait for the oldest step and apply it."""
        launched = self._in_flight.popleft()
        result = launched.future.result()
        began, self._landed = max(launched.launched_at, self._landed), time.perf_counter()
        self._step = result.step
        updates = self._scheduler.apply(result, self._landed - began)
        for key, _ in updates.finished:
            self._deadlines.discard(key)
        return updates

    # Send

    def _send(self, updates: StepUpdates, turn: StepStats, outbox: MessageSink) -> None:
        messages = split_updates(updates, self._step, self._load(), outbox.clients, turn, self._totals())
        for client, message in enumerate(messages):
            outbox.send(client, message)

    def _load(self) -> EngineLoad:
        scheduler = self._scheduler
        return EngineLoad(scheduler.running, scheduler.waiting, self._cache.free_blocks, self._step_seconds)

    def _totals(self) -> CoreTotals:
        return CoreTotals(*self._scheduler.totals)

    def _time_step(self, seconds: float) -> None:
        last = self._step_seconds or seconds
        self._step_seconds = last + _LAST_STEP_WEIGHT * (seconds - last)


_NO_UPDATES = StepUpdates([], [], [], [], [])


def _check_finite(logprobs: Sequence[Logprobs]) -> None:
    if not all(math.isfinite(each.chosen) for each in logprobs):
        raise InvalidArgument("the model computes no numbers: its weights are damaged, or overflow in this dtype")


def _with_timeouts(updates: StepUpdates, late: list[int]) -> StepUpdates:
    """The updates, and the end of those whose time was over before the step."""
    return updates._replace(finished=updates.finished + [(key, "timeout") for key in late]) if late else updates
