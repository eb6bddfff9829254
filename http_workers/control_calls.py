"""The calls of one worker that are no inference: requests of HTTP, and control RPCs. The endpoints that a server
without workers has answer them."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

from starlette.types import ASGIApp

from ..api.api_keys import Tenant
from ..api.http.internal_request import ControlRequest, ask_app
from .hub_link import AnsweredCall, HubLink
from .messages import GrpcAnswer, GrpcCall, HttpAnswer, HttpCall, HttpPiece, PieceWanted
from .pieces import AnsweredInPieces

RpcAnswerer: TypeAlias = Callable[[str, bytes], Awaitable[dict[str, Any]]]
"""Answers a control RPC, by its name and its encoded message, with the fields of the response."""


class ControlCalls:
    """The calls of one worker that are being answered, by `app` and `control_rpc`: when they have changed what workers
    know, after all know it."""

    def __init__(self, link: HubLink, app: ASGIApp, control_rpc: RpcAnswerer) -> None:
        self._link = link
        self._app = app
        self._control_rpc = control_rpc
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._in_pieces: dict[int, AnsweredInPieces] = {}

    def on_http(self, call: HttpCall) -> None:
        self._start(call.key, self._answer_in_pieces(call) if call.in_pieces else self._answer_http(call))

    def on_grpc(self, call: GrpcCall) -> None:
        self._start(call.key, self._answer_rpc(call))

    def on_piece(self, message: HttpPiece) -> None:
        if message.key in self._in_pieces:
            self._in_pieces[message.key].on_piece(message)

    def on_piece_wanted(self, message: PieceWanted) -> None:
        if message.key in self._in_pieces:
            self._in_pieces[message.key].on_wanted()

    def cancel(self, key: int) -> None:
        """Stop answering this call, if it is one of these: nobody waits for it."""
        if key in self._tasks:
            self._tasks[key].cancel()

    def close(self) -> None:
        """Stop answering: the worker is gone."""
        for task in self._tasks.values():
            task.cancel()

    def _start(self, key: int, answer: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[key] = asyncio.create_task(answer)
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _answer_http(self, call: HttpCall) -> None:
        answer = await ask_app(self._app, _request(call), Tenant(call.tenant, call.tenant_weight))
        self._link.send(HttpAnswer(call.key, answer.status, answer.headers, answer.body))

    async def _answer_in_pieces(self, call: HttpCall) -> None:
        answered = self._in_pieces[call.key] = AnsweredInPieces(call.key, self._link)
        try:
            await answered.answer(self._app, _request(call), Tenant(call.tenant, call.tenant_weight))
        finally:
            del self._in_pieces[call.key]

    async def _answer_rpc(self, call: GrpcCall) -> None:
        with AnsweredCall(self._link, call.key, f"{call.rpc} failed"):
            fields = await self._control_rpc(call.rpc, call.message)
            self._link.send(GrpcAnswer(call.key, fields))


def _request(call: HttpCall) -> ControlRequest:
    return ControlRequest(call.method, call.path, call.query, call.headers, call.body)
