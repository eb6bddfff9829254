"""/v1/messages and /v1/messages/count_tokens of Anthropic's API.

Translates between the protocol and the gateway; decides nothing.
"""

from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ...core.gateway import ModelLookup
from ..http.connection import CancelOnDisconnect, sse_event
from ..http.error_responses import json_response
from ..http.keep_alive import KeepAlive, KeepAliveStreamResponse
from ..http.request_context import context_of, request_id_of
from ..metadata import ServerInfo
from ..openai.json_body import read_members
from ..openai.translated_chat import acquire_for, answer_chat, count_prompt_tokens
from .message_writer import AnthropicMessageWriter
from .messages_request import MESSAGES_SHAPE, ParsedMessages, parse_messages_body

PING = KeepAlive(sse_event(b'{"type":"ping"}', "ping"), 10.0)


class MessagesRoutes:
    def __init__(self, lookup: ModelLookup, info: ServerInfo, ping: KeepAlive = PING) -> None:
        self._lookup = lookup
        self._max_input_size = info.max_input_size
        self._max_response_size = info.max_response_size
        self._ping = ping

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def create(self, request: Request) -> ASGIApp:
        self._lookup.check_room(context_of(request.scope))
        parsed = await self._parse(request)
        model = await acquire_for(parsed, self._lookup, request)
        stream = answer_chat(parsed, model, request, self._max_response_size)
        writer = AnthropicMessageWriter(parsed, model.name)
        if parsed.chat.stream:
            return KeepAliveStreamResponse(stream, writer, self._ping)
        async with CancelOnDisconnect(request.receive), aclosing(stream):
            chunks = [chunk async for chunk in stream]
        return json_response(writer.message(chunks))

    async def count_tokens(self, request: Request) -> Response:
        parsed = await self._parse(request, counts=True)
        model = await acquire_for(parsed, self._lookup, request)
        for warning in parsed.warnings:
            context_of(request.scope).warn(warning)
        return json_response({"input_tokens": await count_prompt_tokens(parsed, model, request)})

    async def _parse(self, request: Request, counts: bool = False) -> ParsedMessages:
        body = await read_members(request, self._max_input_size, MESSAGES_SHAPE)
        return parse_messages_body(body, request_id_of(request.scope), counts)
