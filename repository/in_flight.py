"""Requests that are being answered: counted while they run, and their streams.

Knows nothing of models.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar, cast

from ..core.gateway import ResponseStream
from ..core.request import InferResponse
from ..core.request_context import current_request

T = TypeVar("T")


class InFlightCounter:
    """How many run, and when none does; all of them count in `whole` too."""

    __slots__ = ("_idle", "_parent", "count")

    def __init__(self, whole: "InFlightCounter | None" = None) -> None:
        self.count = 0
        self._parent = whole
        self._idle: asyncio.Event | None = None

    def increment(self) -> None:
        self.count += 1
        if self._parent is not None:
            self._parent.increment()

    def decrement(self) -> None:
        self.count -= 1
        if not self.count and self._idle is not None:
            self._idle.set()
        if self._parent is not None:
            self._parent.decrement()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """One runs during the block."""
        self.increment()
        try:
            yield
        finally:
            self.decrement()

    async def wait_drained(self) -> None:
        """Return when none runs."""
        while self.count:
            self._idle = asyncio.Event()
            await self._idle.wait()


class CountedStream(Generic[T]):
    """A model's stream, counted until it is closed or has ended. Of one that keeps no account of its own
    (`accounted`), the end is the request's."""

    __slots__ = ("_accounted", "_stream", "_tally")

    def __init__(self, stream: AsyncIterator[T], tally: InFlightCounter, accounted: bool = True) -> None:
        # Models promise an AsyncIterator and write generators; only those can be closed.
        self._stream = cast("ResponseStream[T]", stream)
        self._accounted = accounted
        self._tally: InFlightCounter | None = tally
        tally.increment()

    def __aiter__(self) -> "CountedStream[T]":
        return self

    def __anext__(self) -> Awaitable[T]:
        # A generator of ours would be resumed once more for each token of each stream.
        return self._stream.__anext__() if self._accounted else self._observed()

    async def _observed(self) -> T:
        try:
            item = await self._stream.__anext__()
        except StopAsyncIteration:
            self._leave()
            finish_current_request()
            raise
        if isinstance(item, InferResponse) and item.final:
            finish_current_request()
        return item

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._tally is not None:
            self._tally.decrement()
            self._tally = None


def finish_current_request() -> None:
    """The current request is answered; if a text was generated for it, that says how."""
    exchange = current_request()
    if exchange is not None:
        exchange.finish()
