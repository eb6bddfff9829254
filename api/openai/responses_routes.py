"""/v1/responses of OpenAI's API, without what it keeps of one request for the next.

Translates between the protocol and the gateway; decides nothing.
"""

from collections.abc import Iterable
from contextlib import aclosing

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ...core.errors import CharoniaError
from ...core.gateway import ModelLookup
from ...core.request import GenerateChunk, TokenizeRequest
from ..http.connection import CancelOnDisconnect, EventStreamResponse
from ..http.error_responses import ApiError, json_response
from ..http.request_context import context_of, request_id_of
from ..metadata import ServerInfo
from .json_body import model_field, read_members
from .responses_input import JsonObject
from .responses_output import ResponseOutput
from .responses_request import RESPONSES_SHAPE, parse_responses
from .translated_chat import answer_chat


class ResponsesRoutes:
    """The endpoints and their handlers."""

    def __init__(self, lookup: ModelLookup, info: ServerInfo) -> None:
        self._lookup = lookup
        self._max_input_size, self._max_response_size = info.max_input_size, info.max_response_size

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.count_tokens, methods=["POST"]),
            Route("/v1/responses/{response}", self.find, methods=["GET", "DELETE"]),
            Route("/v1/responses/{response}/input_items", self.find, methods=["GET"]),
            Route("/v1/responses/{response}/cancel", self.find, methods=["POST"]),
        ]

    async def create(self, request: Request) -> ASGIApp:
        context = context_of(request.scope)
        self._lookup.check_room(context)
        body = await read_members(request, self._max_input_size, RESPONSES_SHAPE)
        asked = parse_responses(body, request_id_of(request.scope))
        with model_field():
            model = await self._lookup.acquire(context, asked.chat.response.model)
        chunks = answer_chat(model, asked.chat, asked.names, context, self._max_response_size)
        echo = asked.echo | {"model": model.name}
        output = ResponseOutput(asked.chat.requests[0].id, echo, asked.logprobs, asked.calls)
        for warning in asked.warnings:
            context.warn(warning)
        if asked.chat.stream:
            return EventStreamResponse(chunks, ResponseEvents(output))
        async with CancelOnDisconnect(request.receive), aclosing(chunks):
            async for chunk in chunks:
                output.add(chunk)
        output.end()
        return json_response(output.response())

    async def count_tokens(self, request: Request) -> Response:
        body = await read_members(request, self._max_input_size, RESPONSES_SHAPE)
        asked = parse_responses(body, request_id_of(request.scope))
        with model_field():
            model = await self._lookup.acquire(context_of(request.scope), asked.chat.response.model)
        async with CancelOnDisconnect(request.receive):
            tokens = await model.tokenize(TokenizeRequest(prompt=asked.chat.requests[0].prompt))
        return json_response({"object": "response.input_tokens", "input_tokens": len(tokens)})

    async def find(self, request: Request) -> Response:
        found = request.path_params["response"]
        raise ApiError(f"there is no response '{found}': this server keeps no state", 404, field="response_id")


class ResponseEvents:
    """Encodes a stream of chunks as the events of its answer."""

    def __init__(self, output: ResponseOutput) -> None:
        self._output = output
        self._begun = False

    def encode_item(self, chunk: GenerateChunk) -> bytes:
        begin = [] if self._begun else self._output.begin()
        self._begun = True
        return _encode([*begin, *self._output.add(chunk)])

    def encode_end(self) -> bytes:
        return _encode(self._output.end())

    def encode_error(self, error: CharoniaError) -> bytes:
        return _encode(self._output.fail(error))


def _encode(events: Iterable[JsonObject]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)
