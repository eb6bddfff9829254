"""One request on its way through a classic model, and where its responses go."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from numpy.typing import NDArray

from ...core.errors import Internal
from ...core.request import InferResponse
from ...core.request_context import RequestContext
from ..sequences.sequence_context import SequenceContext, SequenceFlags

_UNREAD = 256
"""Responses of one request that may wait for their reader before the instance that makes them does."""


class ResponseSink(Protocol):
    """Takes what a request gets, in the event loop's thread. After `end` nothing comes. `ended`: it was called, though
    the reader may not have heard of it yet."""

    @property
    def ended(self) -> bool: ...

    def put(self, response: InferResponse) -> None: ...

    def end(self, error: Exception | None = None) -> None: ...


@dataclass(slots=True, eq=False)
class InferenceJob:
    """`inputs`: in the model's shapes; `wanted`: the outputs asked for, None for all. `room`: for responses that nobody
    has read yet; one who makes several takes a place for each. `given_up`: nobody reads what comes; set by the event
    loop, read by the thread that computes. `context`: of the request that it answers; None in a warm-up. Of a stateful
    model's, `sequence_flags`: what it says of its sequence, and `sequence`: which that is, once it is known."""

    inputs: Mapping[str, NDArray[Any]]
    requested_outputs: Sequence[str] | None
    sink: ResponseSink
    request_id: str = ""
    unread_slots: threading.Semaphore | None = None
    given_up: bool = False
    context: RequestContext | None = None
    sequence_flags: SequenceFlags | None = None
    sequence: SequenceContext | None = None

    @property
    def batch_size(self) -> int:
        """How many items of a batch it has."""
        return len(next(iter(self.inputs.values()))) if self.inputs else 1

    def give_up(self) -> None:
        self.given_up = True
        if self.unread_slots is not None:
            self.unread_slots.release()


class NullSink:
    """The sink of a request whose responses are taken elsewhere."""

    ended = False

    def put(self, response: InferResponse) -> None:
        pass

    def end(self, error: Exception | None = None) -> None:
        pass


class SingleResponse:
    """The sink of a request that gets exactly one response."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[InferResponse] = loop.create_future()
        self._responses: list[InferResponse] = []

    @property
    def ended(self) -> bool:
        return self.future.done()

    def put(self, response: InferResponse) -> None:
        self._responses.append(response)

    def end(self, error: Exception | None = None) -> None:
        if self.future.done():
            return
        if error is None and len(self._responses) == 1:
            self.future.set_result(self._responses[0])
            return
        self.future.set_exception(error or Internal(f"expected a single response, got {len(self._responses)}"))
        self.future.exception()  # counts as read: a request that was refused, or whose reader left, reads it no more


class ResponseChannel:
    """The sink of a request that gets any number of responses, read one by one; `room` for those that are unread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.unread_slots = threading.Semaphore(_UNREAD)
        self._responses: deque[InferResponse] = deque()
        self.ended = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, response: InferResponse) -> None:
        self._responses.append(response)
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        self.ended, self._error = True, error
        self._wake()

    async def next_response(self) -> InferResponse | None:
        """The next response; None after the last. Raises what the stream ended with."""
        while not self._responses:
            if self.ended:
                if self._error is not None:
                    raise self._error
                return None
            self._reader = self._loop.create_future()
            await self._reader
        self.unread_slots.release()
        return self._responses.popleft()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class SingleResponseStream:
    """A stream of the one response that `make` makes when it is asked for. A generator would cost as much again as a
    small execution."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Coroutine[Any, Any, InferResponse]]) -> None:
        self._make: Callable[[], Coroutine[Any, Any, InferResponse]] | None = make

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, InferResponse]:
        make, self._make = self._make, None
        return _nothing() if make is None else make()

    async def aclose(self) -> None:
        self._make = None


async def _nothing() -> InferResponse:
    raise StopAsyncIteration
