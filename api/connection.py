"""The client's end of an HTTP exchange: reading his body, noticing that he left, streaming events to him.

Knows nothing of models and of what the bytes say.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Self

from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ..core.errors import CharoniaError, InvalidArgument
from .faults import UNEXPECTED

log = logging.getLogger(__name__)


class ClientLeft(Exception):
    """The client hung up: nobody is there to read an answer."""


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, refused as soon as it is known to be longer than `limit`.

    Raises:
        InvalidArgument: the body is too long.
        ClientLeft: the client hung up while sending it.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_long(int(announced), limit)
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_long(len(body), limit)
        if not message.get("more_body", False):
            return bytes(body)


def _too_long(size: int, limit: int) -> CharoniaError:
    return InvalidArgument(
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


class WhileConnected:
    """Cancels the task inside the `async with` block when the client leaves, and raises `ClientLeft` from it.

    Use it after the body was read: it takes over `receive`.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.create_task(self._cancel_on_disconnect())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # No await here: the cancellation must reach the block, or not happen at all.
        self._watch.cancel()
        if self._left and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientLeft from None

    async def _cancel_on_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._task.cancel()


class EventStream(EventSourceResponse):
    """A response of ready-made server-sent events: LF only, no pings.

    The headers are sse-starlette's, the sending is not: the library's doubles what a frame costs, ends streams when
    the server begins to drain, and sends the status before it is known whether there is a first event. Here an error
    before the first event is raised and becomes a plain answer, one after it the event that `fault` makes of it.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        fault: Callable[[CharoniaError], bytes],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(events, headers=headers)
        self._events = events
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientLeft):
            async with aclosing(self._events), WhileConnected(receive):
                first = await anext(self._events, b"")
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await _send_body(send, first)
                await self._send_rest(send)

    async def _send_rest(self, send: Send) -> None:
        try:
            async for event in self._events:
                await _send_body(send, event)
        except CharoniaError as error:
            await _send_body(send, self._fault(error))
        except Exception:
            log.exception("a stream broke off")
            await _send_body(send, self._fault(UNEXPECTED))
        await _send_body(send, b"", more=False)


async def _send_body(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"
