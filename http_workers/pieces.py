"""Both ends of a call whose bodies may be too long to be held: they cross piece by piece, each when it is wanted."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.api_keys import Tenant
from ..api.http.connection import CancelOnDisconnect, ClientDisconnected
from ..api.http.error_responses import INTERNAL_SERVER_ERROR, error_response, unexpected_error
from ..api.http.internal_request import ControlRequest, stays_connected
from ..api.http.request_context import control_scope
from ..core.errors import SentError
from .hub_connection import HubConnection
from .hub_link import HubLink
from .messages import CallFailed, HttpAnswer, HttpCall, HttpPiece, PieceWanted

log = logging.getLogger(__name__)


class ForwardedInPieces:
    """An application that answers a request with what the hub answers; `call` makes the message with a key."""

    def __init__(self, hub: HubConnection, call: Callable[[int], HttpCall]) -> None:
        self._hub, self._call = hub, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hub, key = self._hub, self._hub.next_key()
        with suppress(ClientDisconnected), hub.arriving(self._call(key)) as arriving:
            while not isinstance(message := await arriving.get(), HttpAnswer):
                if isinstance(message, CallFailed):
                    raise message.error.error()
                part = await receive()
                if part["type"] == "http.disconnect":
                    raise ClientDisconnected
                hub.send(HttpPiece(key, part.get("body", b""), part.get("more_body", False)))
            async with CancelOnDisconnect(receive):
                await send({"type": "http.response.start", "status": message.status, "headers": message.headers})
                await send(_body(message.body, message.more))
                more = message.more
                while more:
                    hub.send(PieceWanted(key))
                    piece = await arriving.get()
                    if not isinstance(piece, HttpPiece):
                        raise RuntimeError("the hub broke an answer off")
                    more = piece.more
                    await send(_body(piece.data, more))


def _body(data: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


class AnsweredInPieces:
    """The same call in the hub: `receive` and `send` are those of the application that answers."""

    def __init__(self, key: int, link: HubLink) -> None:
        self._key = key
        self._link = link
        self._arrived: asyncio.Queue[HttpPiece] = asyncio.Queue()
        self._whole = False
        self._wanted = asyncio.Event()
        self._start: Message | None = None
        self._begun = False
        self.on_piece, self.on_wanted = self._arrived.put_nowait, self._wanted.set

    async def answer(self, app: ASGIApp, request: ControlRequest, tenant: Tenant) -> None:
        """Have `app` answer. Never raises but for the cancellation of this task: then the client has left."""
        scope = control_scope(request.method, request.path, request.query, request.headers, tenant)
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:
            log.exception("%s %s failed", request.method, request.path)
            if self._begun:
                self._link.send(CallFailed(self._key, SentError.of(INTERNAL_SERVER_ERROR)))
            else:
                await error_response(unexpected_error(error), request.path)(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if self._whole:
            return await stays_connected()
        self._link.send(PieceWanted(self._key))
        piece = await self._arrived.get()
        self._whole = not piece.more
        return {"type": "http.request", "body": piece.data, "more_body": piece.more}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        data = message.get("body", b"")
        more = message.get("more_body", False)
        start = self._start
        if start is not None and not self._begun:
            self._begun = True
            headers = [(bytes(name), bytes(value)) for name, value in start["headers"]]
            self._link.send(HttpAnswer(self._key, start["status"], headers, data, more))
            return
        await self._wanted.wait()
        self._wanted.clear()
        self._link.send(HttpPiece(self._key, data, more))
