"""The frontend's side of an engine: carries requests to its core and tokens back to their readers.

Knows nothing of text: token ids in, token ids out. Lives in one event loop.
"""

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable

import msgspec

from ..core.errors import CharoniaError, InvalidArgument, QueueFull, Unavailable
from ..core.request import FinishReason
from .channel import Channel, Delta
from .config import EngineConfig
from .messages import Abort, Add, Load, Loading, Ready, Refused, Updates
from .supervisor import PATIENCE, CoreSupervisor, Patience

_CLIENT = 0
"""This client's number; the core has no other yet."""

_RETRY_SECONDS = (1.0, 60.0)
"""Shortest and longest wait advised to a request that found the queue full."""


class EngineClient:
    """Requests to one engine core, which is spawned by `start()`, restarted when it dies, and gone after `close()`."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[Loading], None] = lambda loading: None,
        patience: Patience = PATIENCE,
    ) -> None:
        self._core = CoreSupervisor(config, self, patience)
        self._max_queued = config.max_queued_requests
        self.on_progress = on_progress
        self._channels: dict[int, Channel] = {}
        self._last_key = 0
        self._starts: deque[float] = deque(maxlen=64)

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
        """Requests that the engine has not begun yet."""
        return sum(not channel.started for channel in self._channels.values())

    async def start(self) -> Ready:
        """Return when the engine serves.

        Raises:
            CharoniaError: it cannot; the message says why.
        """
        return await self._core.start()

    async def close(self) -> None:
        """Stop the core; streams still open end with `Unavailable`. May be called again."""
        await self._core.close()

    def admit(self) -> Ready:
        """What the engine is, if it takes another request now.

        Raises:
            Unavailable: no core serves.
            QueueFull: too many requests wait already.
        """
        if self._core.info is None:
            raise Unavailable("the engine is not ready")
        if self.queued >= self._max_queued:
            raise QueueFull(f"{self._max_queued} requests are waiting already", retry_after=self._retry_after())
        return self._core.info

    async def stream(self, add: Add) -> AsyncGenerator[Delta, None]:
        """Tokens as they come; the last item has a finish reason. `client` and `key` of `add` are filled in here.

        Raises:
            InvalidArgument: the engine can never satisfy this request; `field` names the culprit.
            QueueFull, Unavailable: see `admit`; Unavailable also when the core dies on the way.
        """
        self.admit()
        key, channel = self._open()
        try:
            self._core.send(msgspec.structs.replace(add, client=_CLIENT, key=key))
            finish = None
            while finish is None:
                delta = await channel.read()
                finish = delta.finish_reason
                yield delta
        finally:
            del self._channels[key]
            if not channel.ended:
                self._core.send(Abort(_CLIENT, [key]))

    def _open(self) -> tuple[int, Channel]:
        self._last_key += 1
        channel = self._channels[self._last_key] = Channel()
        return self._last_key, channel

    def _retry_after(self) -> float:
        """By then, at the recent pace, everything that waits now has started."""
        shortest, longest = _RETRY_SECONDS
        if len(self._starts) < 2:
            return shortest
        pace = (time.monotonic() - self._starts[0]) / len(self._starts)
        return min(longest, max(shortest, self.queued * pace))

    # What the core says

    def on_updates(self, updates: Updates) -> None:
        channels = self._channels
        for key, cached in updates.started:
            self._starts.append(time.monotonic())
            if key in channels:
                channels[key].start(cached)
        at = 0
        for key, count in zip(updates.keys, updates.counts, strict=True):
            if key in channels:
                channels[key].push(updates.tokens[at : at + count])
            at += count
        for key, reason in updates.finished:
            if key in channels:
                channels[key].finish(FinishReason(reason))

    def on_refused(self, refused: Refused) -> None:
        if refused.key in self._channels:
            self._channels[refused.key].fail(InvalidArgument(refused.message, field=refused.field or None))

    def on_loss(self, error: CharoniaError) -> None:
        for channel in self._channels.values():
            channel.fail(error)
