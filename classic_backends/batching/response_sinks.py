"""The receivers of one request's responses: a channel to its reader, and one that keeps the requests' order.

They belong to the event loop's thread.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, Self

from ...core.request import InferResponse

_MAX_UNREAD = 256


class ResponseSink(Protocol):
    """Takes the responses of one request, up to `end`. `ended` is set by it, though the reader may not have read all
    of them yet."""

    @property
    def ended(self) -> bool: ...

    def put(self, response: InferResponse) -> None: ...

    def end(self, error: Exception | None = None) -> None: ...


class ResponseChannel:
    """The sink whose responses a task reads one by one. `unread_slots`: of a decoupled model, for responses that wait
    for their reader; an instance that finds none waits."""

    def __init__(self, decoupled: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.unread_slots = threading.Semaphore(_MAX_UNREAD) if decoupled else None
        self._responses: deque[InferResponse] = deque()
        self.ended = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, response: InferResponse) -> None:
        self._responses.append(response)
        self._wake_reader()

    def end(self, error: Exception | None = None) -> None:
        self.ended, self._error = True, error
        self._wake_reader()

    async def next_response(self) -> InferResponse | None:
        """The next response; None after the last. Raises the error that ended the stream."""
        while not self._responses:
            if self.ended:
                if self._error is not None:
                    raise self._error
                return None
            self._reader = self._loop.create_future()
            await self._reader
        if self.unread_slots is not None:
            self.unread_slots.release()
        return self._responses.popleft()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class SingleResponseStream:
    """The stream of one response, which `make` computes when it is asked for. An async generator would cost as much
    again as a small execution."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Coroutine[Any, Any, InferResponse]]) -> None:
        self._make: Callable[[], Coroutine[Any, Any, InferResponse]] | None = make

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, InferResponse]:
        make, self._make = self._make, None
        return _stop_iteration() if make is None else make()

    async def aclose(self) -> None:
        self._make = None


async def _stop_iteration() -> InferResponse:
    raise StopAsyncIteration


class ResponseOrderer:
    """Keeps the responses of a model with `preserve_ordering` in the order of its requests, whichever instance was
    faster."""

    def __init__(self) -> None:
        self._sinks: deque[OrderedSink] = deque()

    def add_request(self, sink: ResponseSink) -> "OrderedSink":
        """Wrap `sink`: it gets its responses when all earlier requests have ended."""
        ordered = OrderedSink(self, sink)
        self._sinks.append(ordered)
        self.release_finished()
        return ordered

    def release_finished(self) -> None:
        while self._sinks and self._sinks[0].release_held():
            self._sinks.popleft()


class OrderedSink:
    """One request's sink in a `ResponseOrderer`: holds responses back until it is the first."""

    def __init__(self, orderer: ResponseOrderer, sink: ResponseSink) -> None:
        self._orderer = orderer
        self._sink = sink
        self._held: list[InferResponse] = []
        self._first = self.ended = False
        self._error: Exception | None = None

    def put(self, response: InferResponse) -> None:
        if self._first:
            self._sink.put(response)
        else:
            self._held.append(response)

    def end(self, error: Exception | None = None) -> None:
        if not self.ended:
            self.ended, self._error = True, error
            self._orderer.release_finished()

    def release_held(self) -> bool:
        """Called once all earlier requests have ended. Whether this one has ended too."""
        self._first = True
        while self._held:
            self._sink.put(self._held.pop(0))
        if self.ended:
            self._sink.end(self._error)
        return self.ended
