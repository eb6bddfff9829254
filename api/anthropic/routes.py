"""/v1/messages and /v1/messages/count_tokens of Anthropic's API.

Translates between the protocol and the gateway; decides nothing.
"""

from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ...core.gateway import ModelLookup
from ...core.request import TokenizeRequest
from ..http.connection import CancelOnDisconnect
from ..http.error_responses import json_response
from ..http.keep_alive import KeepAlive, KeepAliveStreamResponse
from ..http.request_context import context_of, request_id_of
from ..metadata import ServerInfo
from ..openai.json_body import model_field, read_members
from ..openai.translated_chat import answer_chat
from .message_writer import AnthropicMessageWriter
from .messages_request import MESSAGES_SHAPE, parse_messages_body

PING = KeepAlive(b'event: ping\ndata: {"type":"ping"}\n\n', 10.0)


class MessagesRoutes:
    """The endpoints and their handlers."""

    def __init__(self, lookup: ModelLookup, info: ServerInfo, ping: KeepAlive = PING) -> None:
        self._lookup = lookup
        self._max_input_size, self._max_response_size = info.max_input_size, info.max_response_size
        self._ping = ping

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def create(self, request: Request) -> ASGIApp:
        context = context_of(request.scope)
        self._lookup.check_room(context)
        body = await read_members(request, self._max_input_size, MESSAGES_SHAPE)
        asked = parse_messages_body(body, request_id_of(request.scope))
        with model_field():
            model = await self._lookup.acquire(context, asked.chat.response.model)
        stream = answer_chat(model, asked.chat, asked.names, context, self._max_response_size)
        writer = AnthropicMessageWriter(asked, model.name)
        for warning in asked.warnings:
            context.warn(warning)
        if asked.chat.stream:
            return KeepAliveStreamResponse(stream, writer, self._ping)
        async with CancelOnDisconnect(request.receive), aclosing(stream):
            chunks = [chunk async for chunk in stream]
        return json_response(writer.message(chunks))

    async def count_tokens(self, request: Request) -> Response:
        context = context_of(request.scope)
        body = await read_members(request, self._max_input_size, MESSAGES_SHAPE)
        asked = parse_messages_body(body, request_id_of(request.scope), counts=True)
        with model_field():
            model = await self._lookup.acquire(context, asked.chat.response.model)
        for warning in asked.warnings:
            context.warn(warning)
        async with CancelOnDisconnect(request.receive):
            tokens = await model.tokenize(TokenizeRequest(prompt=asked.chat.requests[0].prompt))
        return json_response({"input_tokens": len(tokens)})
