"""`POST .../infer`: v2's inference over HTTP, with the parts of HTTP that belong to it: lengths, encodings, headers.

Translates between the protocol and the gateway. The hottest of all routes: every request pays for each line.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ...core.errors import Internal, InvalidArgument, Unsupported
from ...core.gateway import ModelHandle, ResponseStream
from ...core.request import InferResponse
from ...telemetry.shared_state import ServerGateway
from .. import size_limits
from ..chunked_json import PIECE_BYTES
from ..header_rules import HeaderForwarding
from ..http import content_encoding
from ..http.connection import CancelOnDisconnect, offload_if_large, receive_body, refuse_form
from ..http.eager import EagerAwaitable
from ..http.request_context import context_of
from ..http.request_cycle import send_complete_response
from ..infer_call import InferCall, read_up_to_two, supports_single_response, wants_stream
from ..metadata import ServerInfo
from .infer_request import InferRequestReader, parse_long_document
from .infer_response import encode_infer_response, is_long

_DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
_HEADER_LENGTH = "Inference-Header-Content-Length"
_INTEGER = re.compile(rb"[+-]?\d{1,18}")

HeaderMap: TypeAlias = Mapping[bytes, bytes]


class InferEndpoint:
    """The handler of the route. `forwarding`: headers that become parameters."""

    def __init__(self, gateway: ServerGateway, info: ServerInfo, forwarding: HeaderForwarding) -> None:
        self._gateway = gateway
        self._max_size, self._max_raw_size = info.max_input_size, info.max_raw_size
        self._forwarding = forwarding

    @cached_property
    def _reader(self) -> InferRequestReader:
        return InferRequestReader(self._gateway.shared_state.shared_memory, self._max_size, self._max_raw_size)

    async def answer(self, request: Request) -> ASGIApp:
        path = request.scope["path_params"]
        model = self._gateway.acquire(context_of(request.scope), path["model"], str(path.get("version", "")))
        config = model.config
        if not supports_single_response(config):
            raise Unsupported(_DECOUPLED)
        headers: HeaderMap = dict(request.scope["headers"])
        call = await self._read(model, headers, request)
        if config.decoupled and wants_stream(call.request):
            raise Unsupported(f"{_DECOUPLED}: set stream to false, or use generate_stream", field="stream")
        response = await _single_response(model.infer(call.request), request.receive)
        if is_long(call, response):
            encoded = await asyncio.to_thread(encode_infer_response, config, call, response)
        else:
            encoded = encode_infer_response(config, call, response)
        accepted = headers.get(b"accept-encoding", b"").decode("latin-1")
        encoding = content_encoding.negotiate_encoding(accepted) if accepted else ""
        if not encoding:
            return InferHttpResponse(encoded.parts, encoded.header_length)
        body = await offload_if_large(encoded.size, content_encoding.compress, encoded.parts, encoding)
        return InferHttpResponse((body,), encoded.header_length, encoding)

    async def _read(self, model: ModelHandle, headers: HeaderMap, request: Request) -> InferCall:
        given = headers.get(b"content-encoding")
        encoding = content_encoding.content_coding(given.decode("latin-1")) if given else ""
        length = _header_length(headers)
        limit = self._max_size if length is None else self._max_raw_size
        check = size_limits.check_json_size if length is None else size_limits.check_raw_size
        body = await receive_body(request, headers.get(b"content-length", b""), lambda size: check(size, limit))
        if encoding:
            body = await offload_if_large(len(body), content_encoding.decompress, body, encoding, limit)
        if length is not None and not 0 <= length <= len(body):
            raise InvalidArgument(f"inference header size should be in range (0, {len(body)}), got: {length}")
        if length is None and body[:1] != b"{":
            refuse_form(headers.get(b"content-type", b"").decode("latin-1"), body)
        document, json_size = None, len(body) if length is None else length
        if json_size > PIECE_BYTES:
            size_limits.check_json_size(json_size, self._max_size)
            document = await parse_long_document(memoryview(body)[:json_size])
        call = self._reader.read(model.config, body, length, document)
        if call.deferred:
            call = await call.decode_deferred(model)
        if forwarded := self._forwarding.parameters(headers):
            parameters = {**call.request.parameters, **forwarded}
            call = call._replace(request=msgspec.structs.replace(call.request, parameters=parameters))
        return call


async def _single_response(stream: ResponseStream[InferResponse], receive: Receive) -> InferResponse:
    try:
        answering = EagerAwaitable(read_up_to_two(stream))
        if not answering.done:
            async with CancelOnDisconnect(receive):
                await answering
        responses = await answering
    finally:
        await stream.aclose()
    if len(responses) != 1:
        raise Internal(f"expected a single response, got {len(responses)}")
    return responses[0]


def _header_length(headers: HeaderMap) -> int | None:
    given = headers.get(b"inference-header-content-length")
    if given is None:
        return None
    if given.isdigit() and len(given) < 19:
        return int(given)
    if not _INTEGER.fullmatch(given):
        raise InvalidArgument(f"Unable to parse {_HEADER_LENGTH}, got: {given.decode('latin-1')}")
    return int(given)


class InferHttpResponse:
    """A response of status 200 in parts. `header_length`: bytes of the JSON, None if there is nothing but JSON."""

    def __init__(self, parts: Sequence[bytes | memoryview], header_length: int | None, encoding: str = "") -> None:
        self._parts = parts
        kind = b"content-type: application/json\r\n"
        if header_length is not None:
            kind = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n" % header_length
        coded = b"content-encoding: %b\r\n" % encoding.encode() if encoding else b""
        self._head = b"%b%bcontent-length: %d\r\n" % (kind, coded, sum(map(len, parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if send_complete_response(scope, send, self._head, self._parts):
            return
        headers = [tuple(line.split(b": ", 1)) for line in self._head.split(b"\r\n")[:-1]]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        last = len(self._parts) - 1
        for number, part in enumerate(self._parts):
            await send({"type": "http.response.body", "body": part, "more_body": number < last})
