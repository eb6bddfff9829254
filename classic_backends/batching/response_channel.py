"""The responses of one request on their way to the task that reads them, and their order among other requests'.

Everything here belongs to the event loop's thread, but for the slots that a decoupled model's instance takes.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Self

from ...core.request import InferResponse

_MAX_UNREAD = 256


class ResponseChannel:
    """The responses of one request, which a task reads one by one. `decoupled`: the model may make any number."""

    def __init__(self, decoupled: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.unread_slots = threading.Semaphore(_MAX_UNREAD) if decoupled else None
        """A decoupled model takes one for each response, the reader gives it back; an instance that finds none
        waits."""
        self.ended = False
        """No more responses come, though the reader may not have read all."""
        self.held = False
        """Earlier requests of its `orderer`, if it has one, have not ended: nothing can be read yet."""
        self.orderer: ResponseOrderer | None = None
        self.on_drained: Callable[[], None] | None = None
        """Called once, when half of what may wait does."""
        self._responses: deque[InferResponse] = deque()
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        """Whether as many responses wait as may."""
        return len(self._responses) >= _MAX_UNREAD

    @property
    def drained(self) -> bool:
        """Whether no more than half of what may wait does."""
        return len(self._responses) <= _MAX_UNREAD // 2

    def put(self, response: InferResponse) -> None:
        self._responses.append(response)
        self.wake_reader()

    def end(self, error: Exception | None = None) -> None:
        self.ended = True
        self._error = error
        self.wake_reader()
        if self.orderer is not None:
            self.orderer.release()

    async def next_response(self) -> InferResponse | None:
        """The next response; None after the last. Raises the error that ended the stream."""
        while self.held or not self._responses:
            if self.ended and not self.held:
                if self._error is not None:
                    try:
                        raise self._error
                    finally:
                        self._error = None  # its traceback leads here: who reads would hold all of the request
                return None
            self._reader = self._loop.create_future()
            await self._reader
        if self.unread_slots is not None:
            self.unread_slots.release()
        if self.on_drained is not None and self.drained:
            self.on_drained()
            self.on_drained = None
        return self._responses.popleft()

    def wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class ResponseOrderer:
    """Keeps the responses of a model with `preserve_ordering` in the order of its requests, whichever instance was
    faster."""

    def __init__(self) -> None:
        self._channels: deque[ResponseChannel] = deque()

    def add(self, channel: ResponseChannel) -> None:
        """Hold a new request's responses until all earlier requests have ended."""
        channel.orderer = self
        channel.held = True
        self._channels.append(channel)
        self.release()

    def release(self) -> None:
        """Let the first request be read and, where it has ended, those behind it."""
        while self._channels:
            first = self._channels[0]
            first.held = False
            first.wake_reader()
            if not first.ended:
                return
            self._channels.popleft()


class SingleResponseStream:
    """The stream of one response, which `make` computes when it is asked for. An async generator would cost as much
    again as a small execution."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Coroutine[Any, Any, InferResponse]]) -> None:
        self._make: Callable[[], Coroutine[Any, Any, InferResponse]] | None = make

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, InferResponse]:
        make = self._make
        self._make = None
        return _stop_iteration() if make is None else make()

    async def aclose(self) -> None:
        self._make = None


async def _stop_iteration() -> InferResponse:
    raise StopAsyncIteration
