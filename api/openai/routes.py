"""OpenAI's door: /v1/models, /v1/completions, /v1/chat/completions.

Translates between the protocol and the gateway; decides nothing.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ...core.errors import CharoniaError, NotFound
from ...core.gateway import Gateway
from ...core.model import ModelConfig
from ...core.request import GenerateChunk, joined
from ..http.auth import tenant_of
from ..http.connection import EventStream, WhileConnected, event, read_body
from ..http.error_responses import json_response, openai_body
from ..http.request_ids import request_id_of
from ..metadata import ServerInfo
from .json_body import Body, open_body
from .merged_streams import merged
from .request_parsing import Asked, parse_chat, parse_completion
from .response_writer import ChatShape, CompletionShape, Shape, Writer, fingerprint, model_object

_DONE = event(b"[DONE]")


class OpenAI:
    """The door's handlers."""

    def __init__(self, gateway: Gateway, info: ServerInfo) -> None:
        self._gateway = gateway
        self._info = info
        self._fingerprints: dict[str, tuple[ModelConfig, str]] = {}

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        data = [model_object(config) for config in self._gateway.models()]
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        return json_response(model_object(self._lookup(request.path_params["model"])))

    async def completions(self, request: Request) -> ASGIApp:
        return await self._answer(request, parse_completion, CompletionShape())

    async def chat(self, request: Request) -> ASGIApp:
        return await self._answer(request, parse_chat, ChatShape())

    async def _answer(self, request: Request, parse: Callable[[Body, str], Asked], shape: Shape) -> ASGIApp:
        asked = parse(
            await open_body(await read_body(request, self._info.max_input_size)), request_id_of(request.scope)
        )
        model = asked.reply.model
        writer = Writer(shape, asked.reply, self._fingerprint(self._lookup(model)))
        name, weight = tenant_of(request)
        requests = [msgspec.structs.replace(each, tenant=name, weight=weight) for each in asked.requests]
        streams = [self._gateway.generate(model, each) for each in requests]
        if not asked.stream:
            async with WhileConnected(request.receive), aclosing(merged(streams)) as chunks:
                return json_response(await _whole(writer, chunks, len(requests)))
        if len(streams) == 1:
            return EventStream(streams[0], OneAnswer(writer))
        return EventStream(merged(streams), SeveralAnswers(writer))

    def _fingerprint(self, config: ModelConfig) -> str:
        """Made once for each load of a model."""
        known = self._fingerprints.get(config.name)
        if known is None or known[0] is not config:
            known = self._fingerprints[config.name] = config, fingerprint(config, self._info.version)
        return known[1]

    def _lookup(self, name: str) -> ModelConfig:
        try:
            return self._gateway.model(name)
        except NotFound as error:
            raise NotFound(error.message, field="model") from None


async def _whole(writer: Writer, chunks: AsyncIterator[tuple[int, GenerateChunk]], count: int) -> dict[str, object]:
    said: list[list[GenerateChunk]] = [[] for _ in range(count)]
    async for index, chunk in chunks:
        said[index].append(chunk)
    return writer.whole([joined(each) for each in said])


class Answers:
    """How a stream of answers ends, well or not."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def end(self) -> bytes:
        return self._writer.closing() + _DONE

    def fault(self, error: CharoniaError) -> bytes:
        return event(orjson.dumps(openai_body(error))) + _DONE


class OneAnswer(Answers):
    def event(self, chunk: GenerateChunk) -> bytes:
        return self._writer.event(0, chunk)


class SeveralAnswers(Answers):
    def event(self, item: tuple[int, GenerateChunk]) -> bytes:
        return self._writer.event(*item)
