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
from ...core.logprobs import TokenLogprob
from ...core.request import GenerateChunk
from ..http.connection import CancelOnDisconnect, EventStreamResponse, sse_event
from ..http.error_responses import ApiError, json_response
from ..http.request_context import context_of, request_id_of
from ..http.response_parts import TextEncoder
from ..metadata import ServerInfo
from .json_body import read_members
from .responses_input import JsonObject
from .responses_output import ResponseOutput, TextItem
from .responses_request import RESPONSES_SHAPE, ParsedResponses, parse_responses
from .translated_chat import acquire_for, answer_chat, count_prompt_tokens

_TEXT, _LOGPROBS = "\0text\0", "\0logprobs\0"
"""Stand for what is not known yet."""


class ResponsesRoutes:
    def __init__(self, lookup: ModelLookup, info: ServerInfo) -> None:
        self._lookup = lookup
        self._max_input_size = info.max_input_size
        self._max_response_size = info.max_response_size

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.count_tokens, methods=["POST"]),
            Route("/v1/responses/{response}", self.find, methods=["GET", "DELETE"]),
            Route("/v1/responses/{response}/input_items", self.find, methods=["GET"]),
            Route("/v1/responses/{response}/cancel", self.find, methods=["POST"]),
        ]

    async def create(self, request: Request) -> ASGIApp:
        self._lookup.check_room(context_of(request.scope))
        parsed = await self._parse(request)
        model = await acquire_for(parsed, self._lookup, request)
        chunks = answer_chat(parsed, model, request, self._max_response_size)
        echo = parsed.echo | {"model": model.name}
        output = ResponseOutput(parsed.chat.requests[0].id, echo, parsed.logprobs, parsed.called)
        if parsed.chat.stream:
            return EventStreamResponse(chunks, ResponseEvents(output))
        async with CancelOnDisconnect(request.receive), aclosing(chunks):
            async for chunk in chunks:
                output.add(chunk)
        output.end()
        return json_response(output.response())

    async def count_tokens(self, request: Request) -> Response:
        parsed = await self._parse(request)
        model = await acquire_for(parsed, self._lookup, request)
        count = await count_prompt_tokens(parsed, model, request)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def _parse(self, request: Request) -> ParsedResponses:
        body = await read_members(request, self._max_input_size, RESPONSES_SHAPE)
        return parse_responses(body, request_id_of(request.scope))

    async def find(self, request: Request) -> Response:
        name = request.path_params["response"]
        raise ApiError(f"there is no response '{name}': this server keeps no state", 404, field="response_id")


class ResponseEvents:
    """Encodes a stream of chunks as the events of its answer."""

    def __init__(self, output: ResponseOutput) -> None:
        self._output = output
        self._begun = False
        self._message: TextItem | None = None
        self._before = self._between = self._after = b""
        """The JSON of the message's deltas: what stands before the text, behind it up to the logprobs, and behind those
        up to the event's number."""

    def encode_item(self, chunk: GenerateChunk) -> bytes:
        begin = [] if self._begun else self._output.begin()
        self._begun = True
        return _encode([*begin, *self._output.add(chunk)])

    @property
    def encode_text(self) -> TextEncoder:
        return self._encode_text

    def _encode_text(self, text: str, tokens: int, logprob: TokenLogprob | None) -> bytes | None:
        if not text:
            return b"" if logprob is None else None
        message = self._output.growing_message
        if message is None:
            return _encode(self._output.add_text(text, logprob))
        if message is not self._message:
            # Most events are of text alone: the JSON around it is encoded once for all of a message.
            event = message.delta_event(_TEXT, [_LOGPROBS]) | {"sequence_number": 0}
            around = sse_event(orjson.dumps(event), event["type"]).removesuffix(b"0}\n\n")
            self._message = message
            self._before, rest = around.split(orjson.dumps(_TEXT))
            self._between, self._after = rest.split(orjson.dumps([_LOGPROBS]))
        logprobs, number = self._output.grow_message(message, text, logprob)
        scored = orjson.dumps(logprobs)
        return b"%b%b%b%b%b%d}\n\n" % (self._before, orjson.dumps(text), self._between, scored, self._after, number)

    def encode_end(self) -> bytes:
        return _encode(self._output.end())

    def encode_error(self, error: CharoniaError) -> bytes:
        return _encode(self._output.fail(error))


def _encode(events: Iterable[JsonObject]) -> bytes:
    return b"".join(sse_event(orjson.dumps(event), event["type"]) for event in events)
