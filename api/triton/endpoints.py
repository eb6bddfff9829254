"""The routes of the v2 protocol over HTTP: health, infer, generate.

Translates between the protocol and the gateway. KServe describes the protocol at
https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol, Triton its extension `generate` at
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md.
"""

from asyncio import to_thread
from collections.abc import Coroutine
from contextlib import aclosing
from functools import partial
from secrets import token_hex
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ...core.errors import CharoniaError, InvalidArgument, ServerExiting, Unsupported
from ...core.gateway import ModelHandle
from ...core.model import ModelConfig, ModelStats
from ...core.request import InferRequest, InferResponse
from ...core.tensor import Tensor
from ...telemetry.shared_state import ServerLookup
from ..header_rules import HeaderForwarding
from ..http.connection import CancelOnDisconnect, EventStreamResponse, read_json_body, sse_event
from ..http.error_responses import json_response, v2_error_body
from ..http.request_context import context_of, record_error
from ..http.response_parts import MOST_TEXT, TextEvent
from ..infer_call import is_empty_final, read_up_to_two, release_memory_after
from ..metadata import ServerInfo, server_metadata
from .generate import (
    SHORT_TEXT_BYTES,
    encode_generate_response,
    generate_body_to_infer_request,
    is_long,
    parse_long_generate_body,
    short_text,
)
from .infer import InferEndpoint

_NOT_ONE = (
    "generate expects model to produce exactly 1 response, "
    "use generate stream for model that generates various number of responses"
)

_PLACEHOLDER = token_hex(16)
"""Stands for a text that is not known yet; no client can know it and have it for its request's id."""


class V2Endpoints:
    def __init__(self, lookup: ServerLookup, info: ServerInfo, forwarding: HeaderForwarding) -> None:
        self._lookup = lookup
        self._info = info
        self._infer = InferEndpoint(lookup, info, forwarding)

    def routes(self) -> list[Route]:
        models = "/v2/models/{model}", "/v2/models/{model}/versions/{version:int}"
        routes: list[Route] = [
            Route("/v2", self.server, methods=["GET"]),
            Route("/v2/health/live", self.live, methods=["GET"]),
            Route("/v2/health/ready", self.ready, methods=["GET"]),
        ]
        for path in models:
            routes += [
                Route(f"{path}/infer", self._infer.answer, methods=["POST"]),
                Route(f"{path}/generate", self.generate, methods=["POST"]),
                Route(f"{path}/generate_stream", self.generate_stream, methods=["POST"]),
            ]
        return routes

    async def server(self, request: Request) -> Response:
        return json_response(server_metadata(self._info))

    async def live(self, request: Request) -> Response:
        return Response(status_code=200 if self._lookup.alive() else 400)

    async def ready(self, request: Request) -> Response:
        if self._lookup.exiting():
            raise ServerExiting
        return Response(status_code=200 if self._lookup.ready() else 400)

    async def generate(self, request: Request) -> Response:
        model, infer_request = await self._read(request, stream=False)
        request_id = infer_request.id
        async with CancelOnDisconnect(request.receive), aclosing(model.infer(infer_request)) as stream:
            responses = await read_up_to_two(stream, model.config.decoupled)
        if len(responses) != 1:
            record_error(request.scope, error := Unsupported(_NOT_ONE))
            return json_response(v2_error_body(error))  # with status 200, as Triton's first response has it
        release_memory_after(responses[0])
        limit = self._info.max_response_size
        encode = partial(encode_generate_response, model.config, request_id, responses[0], limit)
        body = await to_thread(encode) if is_long(responses[0]) else encode()
        return Response(body, headers=_load_header(request, model), media_type="application/json")

    async def generate_stream(self, request: Request) -> ASGIApp:
        model, infer_request = await self._read(request, stream=True)
        encoder = GenerateEventEncoder(model, infer_request.id, self._info.max_response_size)
        return EventStreamResponse(model.infer(infer_request), encoder, _load_header(request, model))

    async def _read(self, request: Request, stream: bool) -> tuple[ModelHandle, InferRequest]:
        model = await self._lookup.acquire(context_of(request.scope), *model_and_version(request))
        model.check_room()
        if request.headers.get("content-encoding", "identity") not in ("identity", ""):
            raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        body = await parse_long_generate_body(await read_json_body(request, self._info.max_input_size), model.config)
        return model, generate_body_to_infer_request(body, model.config, stream)


def load_header(form: str, stats: ModelStats) -> dict[str, str]:
    """The fill of the model's cache as a header, in a format of Open Request Cost Aggregation: text or json.

    No header for another format, and for a model without a cache.
    """
    used, capacity = stats.kv_tokens, stats.kv_token_capacity
    if not capacity or form not in ("text", "json"):
        return {}
    if form == "text":
        usage = f"named_metrics.kv_cache_utilization={used / capacity:f}, named_metrics.max_token_capacity={capacity}"
        return {"endpoint-load-metrics": f"TEXT {usage}"}
    named = {"kv_cache_utilization": used / capacity, "max_token_capacity": capacity}
    return {"endpoint-load-metrics": f"JSON {orjson.dumps({'named_metrics': named}).decode()}"}


def _load_header(request: Request, model: ModelHandle) -> dict[str, str]:
    form = request.headers.get("endpoint-load-metrics-format")
    return {} if form is None else load_header(form, model.stats())


def model_and_version(request: Request) -> tuple[str, str]:
    """The model and the version that the path names; empty for one that it does not."""
    return request.path_params.get("model", ""), str(request.path_params.get("version", ""))


class GenerateEventEncoder:
    """A model's responses as server-sent events. `limit`: see `ResponseSize`."""

    def __init__(self, model: ModelHandle, request_id: str, limit: int) -> None:
        self._model = model  # whose config is that of the arm of a route once it answers
        self._id, self._limit = request_id, limit
        self._texts: dict[str, tuple[ModelConfig, list[bytes]]] = {}
        """By an output's name, what stands around its text in an event of that alone, for that config."""

    def encode_item(self, response: InferResponse) -> bytes | Coroutine[Any, Any, bytes]:
        text = short_text(response)
        if text is not None and self._limit >= 8 * SHORT_TEXT_BYTES:
            return orjson.dumps(text).join(self._around_text(response.outputs[0].name))
        if is_long(response):
            release_memory_after(response)
            return to_thread(self._encode, response)
        ended = self._model.config.decoupled and is_empty_final(response)
        return b"" if ended else self._encode(response)

    @property
    def encode_text(self) -> TextEvent | None:
        if self._limit < 8 * MOST_TEXT:
            return None
        before, behind = self._around_text("text_output")
        return TextEvent(before, behind)

    def _around_text(self, name: str) -> list[bytes]:
        # Most events are of a text alone: the JSON around it is encoded once for all of them.
        config = self._model.config
        known, around = self._texts.get(name, (None, []))
        if known is not config:
            placeholder = Tensor.from_values(name, "BYTES", [_PLACEHOLDER.encode()])
            around = self._encode(InferResponse((placeholder,))).split(orjson.dumps(_PLACEHOLDER))
            self._texts[name] = config, around
        return around

    def _encode(self, response: InferResponse) -> bytes:
        return sse_event(encode_generate_response(self._model.config, self._id, response, self._limit))

    def encode_end(self) -> bytes:
        return b""

    def encode_error(self, error: CharoniaError) -> bytes:
        return sse_event(orjson.dumps(v2_error_body(error)))
