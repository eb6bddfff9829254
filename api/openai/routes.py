"""/v1/completions and /v1/chat/completions of OpenAI's API, /tokenize and /detokenize of vLLM's.

Translates between the protocol and the gateway; decides nothing.
"""

from collections.abc import Callable
from contextlib import aclosing
from hashlib import sha256

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ...core.errors import CharoniaError
from ...core.gateway import ModelHandle, ModelLookup, ResponseStream
from ...core.model import ModelConfig
from ...core.request import GenerateChunk, join_chunks, prompt_media
from ...core.tasks import merge_streams
from ..http.connection import CancelOnDisconnect, EventStreamResponse, sse_event
from ..http.error_responses import json_response, openai_error_body
from ..http.request_context import context_of, request_id_of
from ..http.response_parts import TextEvent
from ..metadata import ServerInfo
from .json_body import BodyFormat, JsonBody, model_field, read_members
from .known_fields import Shape
from .media_parts import refuse_unseen, unused_options
from .model_list import max_model_len, only_model
from .request_parsing import (
    CHAT_SHAPE,
    COMPLETION_SHAPE,
    TOKENIZE_FORMAT,
    ParsedCompletion,
    parse_chat,
    parse_completion,
    tokenize_request,
)
from .response_writer import (
    ApiFormat,
    ChatFormat,
    CompletionFormat,
    OpenAIResponseWriter,
)
from .schemas import DetokenizeBody
from .tensor_models import generate_from_tensors, read_tensor_request

_DONE = sse_event(b"[DONE]")
_DETOKENIZE_FORMAT = BodyFormat(DetokenizeBody)


class OpenAIRoutes:
    def __init__(self, lookup: ModelLookup, info: ServerInfo) -> None:
        self._lookup = lookup
        self._info = info
        self._fingerprints: dict[tuple[str, str, str], tuple[ModelConfig, str]] = {}

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def completions(self, request: Request) -> ASGIApp:
        return await self._respond(request, COMPLETION_SHAPE, parse_completion, CompletionFormat())

    async def chat(self, request: Request) -> ASGIApp:
        return await self._respond(request, CHAT_SHAPE, parse_chat, ChatFormat())

    async def _respond(
        self, request: Request, shape: Shape, parse: Callable[[JsonBody, str], ParsedCompletion], api_format: ApiFormat
    ) -> ASGIApp:
        context = context_of(request.scope)
        self._lookup.check_room(context)
        parsed = parse(await read_members(request, self._info.max_input_size, shape), request_id_of(request.scope))
        first = parsed.requests[0]
        context.prompt_count, context.choice_count = first.prompt_count, first.choice_count
        for warning in parsed.warnings:
            context.warn(warning)
        with model_field():
            model = await self._acquire(request, parsed.response.model)
        if media := prompt_media(first.prompt):
            refuse_unseen(media, model.config)
        # Whatever name it was asked by, an answer has the model's own, or its adapter's.
        response = msgspec.structs.replace(parsed.response, model=model.name)
        writer = OpenAIResponseWriter(api_format, response, self._fingerprint(model.config))
        streams: list[ResponseStream[GenerateChunk]]
        if model.config.openai_api:
            tensors = read_tensor_request(model.config, api_format.endpoint, parsed)
            streams = [generate_from_tensors(model, tensors, context, self._info.max_response_size)]
        else:
            streams = [model.generate(generation) for generation in parsed.requests]
        if parsed.stream and len(streams) == 1:
            return EventStreamResponse(streams[0], CompletionEvents(writer))
        if parsed.stream:
            return EventStreamResponse(merge_streams(streams), CompletionEvents(writer))
        chunks: list[list[GenerateChunk]] = [[] for _ in streams]
        async with CancelOnDisconnect(request.receive), aclosing(merge_streams(streams)) as merged:
            async for index, chunk in merged:
                chunks[index].append(chunk)
        return json_response(writer.full_response([join_chunks(answer) for answer in chunks]))

    async def tokenize(self, request: Request) -> Response:
        body = await TOKENIZE_FORMAT.read(request, self._info.max_input_size)
        model = await self._acquire(request, body.model)
        tokenized = tokenize_request(body)
        refuse_unseen(prompt_media(tokenized.prompt), model.config)
        for warning in unused_options(body.mm_processor_kwargs, tokenized.prompt):
            context_of(request.scope).warn(warning)
        async with CancelOnDisconnect(request.receive):
            ids, strings = await model.tokenize(tokenized)
        length = max_model_len(model.config)
        return json_response({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        body = await _DETOKENIZE_FORMAT.read(request, self._info.max_input_size)
        model = await self._acquire(request, body.model)
        async with CancelOnDisconnect(request.receive):
            prompt = await model.detokenize(body.tokens)
        return json_response({"prompt": prompt})

    async def _acquire(self, request: Request, name: str | None) -> ModelHandle:
        """The model of a request, which need not name the only one that there is."""
        return await self._lookup.acquire(context_of(request.scope), name or only_model(self._lookup))

    def _fingerprint(self, config: ModelConfig) -> str:
        # Hashing is done once for each load of a model.
        key = config.name, config.version, config.fingerprint
        known = self._fingerprints.get(key)
        if known is None or known[0] is not config:
            known = self._fingerprints[key] = config, system_fingerprint(config, self._info.version)
        return known[1]


class CompletionEvents:
    """Encodes a stream of one choice's chunks, or one of several choices as `merge_streams` makes it."""

    def __init__(self, writer: OpenAIResponseWriter) -> None:
        self._writer = writer

    def encode_item(self, item: GenerateChunk | tuple[int, GenerateChunk]) -> bytes:
        index, chunk = item if isinstance(item, tuple) else (0, item)
        return self._writer.chunk_event(index, chunk)

    @property
    def encode_text(self) -> TextEvent | None:
        return self._writer.text_event

    def encode_end(self) -> bytes:
        return self._writer.usage_event() + _DONE

    def encode_error(self, error: CharoniaError) -> bytes:
        return sse_event(orjson.dumps(openai_error_body(error))) + _DONE


def system_fingerprint(config: ModelConfig, software: str) -> str:
    """The `system_fingerprint` of a model: it changes with the model's files, settings and the `software` version."""
    settings = config.raw.get("parameters"), config.parameters
    known = orjson.dumps((software, config.backend, config.fingerprint, settings), option=orjson.OPT_SORT_KEYS)
    return f"fp_{sha256(known).hexdigest()[:10]}"
