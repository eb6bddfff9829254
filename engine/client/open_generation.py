"""A generation from its request to its last token, which may be cancelled from elsewhere all the while."""

import asyncio
from collections.abc import Awaitable
from typing import Self, TypeVar

from ...core.errors import CharoniaError, RequestTimeout
from ...core.request_context import RequestContext
from .token_stream import TokenStream

T = TypeVar("T")


class OpenGeneration:
    """The generation of one sequence, which is in the set `among` for its block. `request_id`: the id that a client
    gave it; `timeout`: seconds since its request arrived, 0 is any time."""

    def __init__(self, request_id: str, context: RequestContext, timeout: float, among: "set[OpenGeneration]") -> None:
        self.request_id = request_id
        self.timeout = timeout
        self._context = context
        self._among = among
        self._waits: asyncio.Timeout | None = None
        self._stream: TokenStream | None = None
        self._error: CharoniaError | None = None

    def __enter__(self) -> Self:
        self._among.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._among.discard(self)

    async def wait_for(self, work: Awaitable[T]) -> T:
        """What `work` gives. Raises `RequestTimeout` when the time is up before, and what it was interrupted with."""
        left = self._context.seconds_left(self.timeout) if self.timeout else None
        waits = self._waits = asyncio.timeout(left)  # without a time it sets no timer
        try:
            async with waits:
                return await work
        except TimeoutError:
            if not waits.expired():
                raise
            raise self._error or RequestTimeout() from None
        finally:
            self._waits = None

    def read_from(self, stream: TokenStream) -> None:
        """The engine computes it from now on."""
        self._stream = stream
        if self._error is not None:
            stream.interrupt(self._error)

    def interrupt(self, error: CharoniaError) -> None:
        """Have its reader leave with `error`."""
        self._error = error
        if self._stream is not None:
            if not self._stream.ended:
                self._stream.interrupt(error)
        elif self._waits is not None and not self._waits.expired():
            self._waits.reschedule(0.0)
