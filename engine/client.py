"""The frontend's side of an engine: carries requests to its core and tokens back to their readers.

Knows nothing of text: token ids in, token ids out. Lives in one event loop.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from ..core.errors import CharoniaError, InvalidArgument, RequestTimeout, Unavailable
from ..core.metrics import EngineState, LlmMetrics
from ..core.request import FinishReason, GenerateRequest
from .account import Account
from .admission import Admission, QueueLimits
from .channel import Channel
from .config import EngineConfig
from .messages import NO_TOTALS, Abort, Add, Load, Loading, Ready, Refused, Totals, Turn, Updates
from .supervisor import PATIENCE, CoreSupervisor, Patience

_CLIENT = 0
"""This client's number; the core has no other yet."""

_LOWEST_CLASS = 9
"""Classes below are shown as this one: requests name their class, and every name would be a series forever."""


class EngineClient:
    """Requests to one engine core, which is spawned by `start()`, restarted when it dies, and gone after `close()`."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[Loading], None] = lambda loading: None,
        patience: Patience = PATIENCE,
        metrics: LlmMetrics | None = None,
    ) -> None:
        self._metrics = metrics or LlmMetrics()
        self._totals = Lifelong()
        self._losses = 0
        self._closing = False
        self._core = CoreSupervisor(config, self, patience)
        self._admission = Admission(QueueLimits(config.max_queued_requests, config.max_queued_tokens))
        self._default_timeout = config.default_request_timeout
        self.on_progress = on_progress
        self._channels: dict[int, Channel] = {}
        self._last_key = 0

    @property
    def info(self) -> Ready | None:
        """What the engine is; None while no core serves."""
        return self._core.info

    @property
    def load(self) -> Load:
        """The engine's state after its last turn."""
        return self._core.load

    @property
    def ready(self) -> bool:
        """Warm-up generated a token, and the step loop turned not long ago."""
        return self._core.ready

    @property
    def pid(self) -> int | None:
        """The core process, while there is one."""
        return self._core.pid

    @property
    def queued(self) -> int:
        """Requests that the engine has not begun yet, those being prepared for it included."""
        return self._admission.requests

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """Tokens that the cache blocks in use hold, and that all of them would."""
        info = self._core.info
        if info is None:
            return 0, 0
        return (info.blocks - self.load.free_blocks) * info.block_size, info.blocks * info.block_size

    def state(self) -> EngineState:
        """The engine at this moment, as a scrape sees it."""
        totals = self._totals.sums
        used, capacity = self.kv_tokens
        waiting = [channel for channel in self._channels.values() if not channel.started]
        return EngineState(
            running=self.load.running,
            waiting=Counter(str(min(channel.priority, _LOWEST_CLASS)) for channel in waiting),
            queue_age=max((channel.account.waited for channel in waiting), default=0.0),
            kv_usage=used / capacity if capacity else 0.0,
            prefix_queries=totals.prefix_queries,
            prefix_hits=totals.prefix_hits,
            preemptions=totals.preemptions,
            core_restarts=self._losses,
        )

    async def start(self) -> Ready:
        """Return when the engine serves.

        Raises:
            CharoniaError: it cannot; the message says why.
        """
        return await self._core.start()

    async def close(self) -> None:
        """Stop the core; streams still open end with `Unavailable`. May be called again."""
        self._closing = True
        await self._core.close()

    def admit(self, tenant: str = "", prompt: int = 0) -> Ready:
        """What the engine is, if it takes another request of this tenant now, with so many prompt tokens.

        Raises:
            Unavailable: no core serves.
            QueueFull: too many requests, or prompt tokens, wait already.
        """
        if self._core.info is None:
            raise Unavailable("the engine is not ready")
        self._admission.check(tenant, prompt)
        return self._core.info

    def check_size(self, request: GenerateRequest, tokens: int = 0) -> None:
        """Refuse what no queue is long enough for; `tokens`: of its prompt, once they are counted.

        Raises:
            InvalidArgument: see `Admission.check_size`.
        """
        self._admission.check_size(request.prompts, request.choices, tokens)

    @contextmanager
    def place(self, tenant: str = "") -> Iterator[Ready]:
        """A place in line while a request is prepared: what is refused has cost nothing, however long that takes.

        Raises:
            QueueFull, Unavailable: see `admit`.
        """
        engine = self.admit(tenant)
        place = self._admission.enter(tenant)
        try:
            yield engine
        finally:
            self._admission.leave(place)

    @contextmanager
    def open(self, add: Add, account: Account | None = None) -> Iterator[Channel]:
        """Where the tokens of one request come out, until the block is left. `client` and `key` of `add` are filled in
        here, what happens is written into `account`.

        Raises:
            QueueFull, Unavailable: see `admit`.
            RequestTimeout: its time is over already.

        `Channel.read` raises InvalidArgument if the engine can never satisfy this request (`field` names the culprit),
        Unavailable if the core dies on the way, and RequestTimeout if its time was over before the first token.
        """
        self.admit(add.tenant, len(add.prompt))
        account = account or Account(self._metrics)
        timeout = self._time_left(add, account)
        key, channel = self._enter(add, account)
        try:
            self._core.send(msgspec.structs.replace(add, client=_CLIENT, key=key, timeout=timeout))
            yield channel
        finally:
            del self._channels[key]
            if not channel.started:
                self._admission.leave(channel.place)
            if not channel.ended:
                self._core.send(Abort(_CLIENT, [key]))

    def _enter(self, add: Add, account: Account) -> tuple[int, Channel]:
        account.submit(len(add.prompt))
        place = self._admission.enter(add.tenant, len(add.prompt))
        self._last_key += 1
        channel = self._channels[self._last_key] = Channel(account, place, add.priority)
        return self._last_key, channel

    def _time_left(self, add: Add, account: Account) -> float:
        """Seconds until the request's time is over; 0 is no limit."""
        limit = add.timeout or self._default_timeout
        left = limit - (time.monotonic() - account.arrived)
        if limit and left <= 0:
            raise RequestTimeout
        return left if limit else 0.0

    # What the core says

    def on_updates(self, updates: Updates) -> None:
        channels, now = self._channels, time.monotonic()
        self._measure(updates.turn)
        self._totals.see(updates.totals)
        for key, cached in updates.started:
            self._admission.note_start()
            if key in channels:
                self._admission.leave(channels[key].place)
                channels[key].start(cached, now - updates.turn.seconds)
        tokens, logprobs, at = updates.tokens, updates.logprobs, 0
        for key, count in zip(updates.keys, updates.counts, strict=True):
            channel, end = channels.get(key), at + count
            if channel is not None:
                channel.push(tokens[at:end], now, logprobs[at:end])
            at = end
        for key, reason in updates.finished:
            if key in channels:
                channels[key].finish(FinishReason(reason))

    def on_refused(self, refused: Refused) -> None:
        if refused.key in self._channels:
            self._channels[refused.key].fail(InvalidArgument(refused.message, field=refused.field or None))

    def on_loss(self, error: CharoniaError) -> None:
        self._losses += not self._closing
        self._totals.start_over()
        for channel in self._channels.values():
            channel.fail(error)

    def _measure(self, turn: Turn) -> None:
        if turn.tokens:
            self._metrics.step.observe(turn.seconds)
            self._metrics.step_tokens.observe(turn.tokens)
            self._metrics.step_sequences.observe(turn.sequences)


class Lifelong:
    """Totals of a core and all cores before it."""

    def __init__(self) -> None:
        self._before = self._seen = NO_TOTALS

    def see(self, totals: Totals) -> None:
        """What the core of now has counted so far."""
        self._seen = totals

    def start_over(self) -> None:
        """The core is gone; the next one counts from zero."""
        self._before, self._seen = self.sums, NO_TOTALS

    @property
    def sums(self) -> Totals:
        before, seen = self._before, self._seen
        return Totals(
            before.preemptions + seen.preemptions,
            before.prefix_queries + seen.prefix_queries,
            before.prefix_hits + seen.prefix_hits,
        )
