"""The client's end of an HTTP request: reading the body, noticing a disconnect, streaming events."""

import asyncio
import logging
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar

from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from ...core.direct_stream import DirectStream
from ...core.errors import CharoniaError, InvalidArgument, shutdown_error
from ...core.gateway import ResponseStream
from ...processes import gc_tuning
from ..size_limits import BodyTooLarge, json_too_large
from .content_encoding import content_coding, decompress
from .error_responses import INTERNAL_SERVER_ERROR
from .request_context import answer_headers, record_error
from .request_cycle import Http11Cycle, chunk_writer, cycle_behind, take_complete_body
from .response_parts import TextEncoder, TextEvent

log = logging.getLogger(__name__)

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

P = ParamSpec("P")

CLIENT_LEFT = 499
"""The status that nginx logs for a client that disconnected; no client receives it."""

_UNWATCHED_SECONDS = 0.005

_OFFLOADED_BYTES = 1 << 16
"""A body of fewer bytes takes less time to compress than to hand to another thread."""

_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")


class ClientDisconnected(Exception):
    """The client closed the connection: no response can reach it."""


async def read_json_body(request: Request, limit: int) -> bytes | bytearray:
    """The whole body of a request in JSON, decompressed.

    Raises `InvalidArgument` for a body longer than `limit`, as soon as that is known, one that cannot be decompressed,
    or a form; `ClientDisconnected` if the client leaves.
    """
    headers = request.headers
    header = headers.get("content-encoding")
    encoding = content_coding(header) if header else ""
    announced = headers.get("content-length", "").encode()
    body = await receive_body(request, announced, limit, json_too_large)
    if encoding:
        body = await offload_if_large(len(body), decompress, body, encoding, limit)
    return json_text(headers.get("content-type", ""), body)


def json_text(media: str, body: bytes | bytearray) -> bytes | bytearray:
    """A body in JSON without the byte order mark of UTF-8, which programs on Windows write before texts.

    Raises `InvalidArgument` for one in UTF-16, and one whose media type is a form's, unless it is JSON or empty: curl
    calls everything that it posts a form.
    """
    if not body or body[:1] == b"{":
        return body
    if body.startswith(BOM_UTF8):
        body = body[len(BOM_UTF8) :]
    if body.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise InvalidArgument("the body is not valid JSON: its byte order mark is UTF-16's, and JSON is UTF-8")
    if media.startswith(_FORMS) and not body[:100].lstrip().startswith(b"{"):
        kind = media.partition(";")[0]
        raise InvalidArgument(f"the body is a form ({kind}), not JSON: send 'Content-Type: application/json' and JSON")
    return body


async def offload_if_large(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work` on so many bytes, done in another thread where that is worth it."""
    if size <= _OFFLOADED_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


async def receive_body(
    request: Request, announced: bytes, limit: int, too_large: Callable[[int, int], BodyTooLarge]
) -> bytes | bytearray:
    """The whole body, of which a header may have `announced` the length; copied once if it came in parts. Raises
    `too_large` of its size for more than `limit` bytes, as soon as that is known, and `ClientDisconnected`."""
    complete = take_complete_body(request.scope, request.receive)
    if complete is not None:
        if len(complete) > limit:
            raise too_large(len(complete), limit)
        return complete
    if announced.isdigit() and int(announced) > limit:
        raise too_large(int(announced), limit)
    body, more = bytearray(), True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) + len(part) > limit:
            raise too_large(len(body) + len(part), limit)
        if not more and not body:
            return part
        body += part
    if len(body) > gc_tuning.LARGE_REQUEST_BYTES:
        gc_tuning.release_memory_soon()
    return body


class CancelOnDisconnect:
    """Cancels the task inside the `async with` block when the client leaves, and raises `ClientDisconnected` from it.

    It takes over `receive`, so the body must have been read. On a connection that is not ours, a task watches the
    client from 5 ms on: it costs more than most shorter requests do.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._cycle = cycle_behind(receive)
        self._left = False
        self._later: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        if self._cycle is None:
            self._later = asyncio.get_running_loop().call_later(_UNWATCHED_SECONDS, self._begin)
        elif self._cycle.disconnected:
            self._on_left()
        else:
            self._cycle.watch_client(self._on_left)
        return self

    def _begin(self) -> None:
        self._watch = asyncio.create_task(self._cancel_on_disconnect())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # No await here: the cancellation must reach the block, or not happen at all.
        if self._cycle is not None:
            self._cycle.watch_client(None)
            self._cycle = None
        if self._later is not None:
            self._later.cancel()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None  # what it ends with names what it began with
        if self._left and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientDisconnected from None

    async def _cancel_on_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._on_left()

    def _on_left(self) -> None:
        if not self._left:
            self._left = True
            self._task.cancel()


class EventEncoder(Protocol[T_contra]):
    """An encoder of the items of one stream into the events that the client gets."""

    def encode_item(self, item: T_contra) -> bytes | Coroutine[Any, Any, bytes]:
        """Server-sent events for one item, maybe none; awaited where encoding takes long."""

    @property
    def encode_text(self) -> TextEncoder | None:
        """Encodes an item, not the first, that is nothing but text; None if it has to see every item."""

    def encode_end(self) -> bytes:
        """The events after the last item."""

    def encode_error(self, error: CharoniaError) -> bytes:
        """The events in place of the rest, once the response has begun."""


class EventStreamResponse(EventSourceResponse, Generic[T]):
    """A response of server-sent events, one or more for each of `items`: LF only, no pings.

    The headers are sse-starlette's, the sending is not: that takes 25 microseconds a frame, and this 4. That one also
    ends streams when the server begins to drain, and sends the status first; here an error before the first item
    becomes a plain response.
    """

    def __init__(
        self, items: ResponseStream[T], encoder: EventEncoder[T], headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(items, headers=headers)
        del self.headers["connection"]  # is the connection's to say
        self._items = items
        self._encoder = encoder
        self._encoding: Coroutine[Any, Any, bytes] | None = None
        """Encodes the item that could not be written at once, and comes by iteration."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnected):
            async with aclosing(self._items), CancelOnDisconnect(receive):
                first = await anext(self._items, None)
                begin = b"" if first is None else await self._encode(first)
                await send(self._start(scope))
                if begin:
                    await send(_part(begin))
                await send(_part(await self._send_rest(scope, send), more=False))

    def _start(self, scope: Scope) -> Message:
        headers = [*self.raw_headers, *answer_headers(scope)]
        return {"type": "http.response.start", "status": 200, "headers": headers}

    def _chunk_writer(self, scope: Scope, send: Send) -> Http11Cycle | None:
        return chunk_writer(scope, send)

    def _encode_now(self, item: T) -> bytes | None:
        """The events of an item; None if encoding takes long."""
        body = self._encoder.encode_item(item)
        if isinstance(body, bytes):
            return body
        self._encoding = body
        return None

    async def _encode(self, item: T) -> bytes:
        begun, self._encoding = self._encoding, None
        body = begun or self._encoder.encode_item(item)
        return body if isinstance(body, bytes) else await body

    async def _send_rest(self, scope: Scope, send: Send) -> bytes:
        """Send the other items; the events after them, which are not sent yet."""
        direct = self._items if isinstance(self._items, DirectStream) else None
        try:
            cycle = None if direct is None else self._chunk_writer(scope, send)
            if direct is not None and cycle is not None:
                direct.sink = cycle.sink(self._encode_now)
                encode_text = self._encoder.encode_text
                if isinstance(encode_text, TextEvent) and cycle.chunked_encoding:
                    direct.text_sink = cycle.text_sink(encode_text)
                elif encode_text is not None:
                    direct.text_sink = cycle.sink(encode_text)
            async for item in self._items:
                body = await self._encode(item)
                if body:
                    await send(_part(body))
            return self._encoder.encode_end()
        except (Exception, asyncio.CancelledError) as error:
            events = self._error_events(scope, error)
            if events is None:
                raise
            return events
        finally:
            if direct is not None:
                direct.sink = direct.text_sink = None  # which name this response, as that does the stream
            if self._encoding is not None:  # the client left before the item came
                self._encoding.close()

    def _error_events(self, scope: Scope, error: BaseException) -> bytes | None:
        """The events of the error that ended the stream; None if the client left, and it is to be raised again.

        The caller raises it: a traceback from here would hold this call, and the call the traceback. That cycle would
        keep the last item, and the memory of its tensors, until a garbage collection.
        """
        if isinstance(error, CharoniaError):
            return self._encoder.encode_error(error)
        if isinstance(error, asyncio.CancelledError):
            if (exiting := shutdown_error(error)) is None:
                return None
            record_error(scope, exiting)
            return self._encoder.encode_error(exiting)
        log.exception("a stream broke off", exc_info=error)
        return self._encoder.encode_error(INTERNAL_SERVER_ERROR)


def _part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def sse_event(data: bytes, kind: str = "") -> bytes:
    """One server-sent event; `kind`: its type, where the protocol gives it one."""
    head = b"event: %b\n" % kind.encode() if kind else b""
    return head + b"data: " + data + b"\n\n"
