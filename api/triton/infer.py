"""`POST .../infer`: v2's inference over HTTP, and what of HTTP belongs to it: lengths, encodings, forwarded headers.

Translates between the protocol and the gateway; decides nothing. The hottest of all routes: what it does not need it
does not ask.
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
from ...core.gateway import Gateway, ModelHandle
from ...core.model import ModelConfig
from ...core.request import InferRequest, InferResponse
from .. import size_limits
from ..chunked_json import PIECE_BYTES
from ..deferred_tensors import decode_deferred
from ..header_forwarding import HeaderForwarding
from ..http import content_encoding
from ..http.connection import CancelOnDisconnect, SizeCheck, offload_if_large, receive_body, refuse_form
from ..http.direct import send_complete_response, take_complete_body
from ..http.eager import EagerAwaitable
from ..http.request_context import context_of
from ..metadata import ServerInfo
from ..requested_outputs import HttpInferRequest
from ..single_response import read_up_to_two, supports_single_response, wants_stream
from .infer_request import InferRequestReader, parse_long_document
from .infer_response import EncodedInferResponse, encode_infer_response, is_long

_DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
_HEADER_LENGTH = "Inference-Header-Content-Length"
_INTEGER = re.compile(rb"[+-]?\d{1,18}")

HeaderMap: TypeAlias = Mapping[bytes, bytes]


class InferEndpoint:
    """The route's handler. `forwarding`: which headers are parameters too."""

    def __init__(self, gateway: Gateway, info: ServerInfo, forwarding: HeaderForwarding) -> None:
        self._gateway = gateway
        self._max_size, self._max_raw_size = info.max_input_size, info.max_raw_size
        self._forwarding = forwarding

    @cached_property
    def _reader(self) -> InferRequestReader:
        return InferRequestReader(self._gateway.shared_state.shared_memory, self._max_size, self._max_raw_size)

    async def answer(self, request: Request) -> ASGIApp:
        scope = request.scope
        asked_for = scope["path_params"]
        model = self._gateway.acquire(context_of(scope), asked_for["model"], str(asked_for.get("version", "")))
        config = model.config
        if not supports_single_response(config):
            raise Unsupported(_DECOUPLED)
        headers: HeaderMap = dict(scope["headers"])
        call = await self._read(config, headers, request)
        if config.decoupled and wants_stream(call.request):
            raise Unsupported(f"{_DECOUPLED}: set stream to false, or use generate_stream", field="stream")
        response = await self._infer(model, call.request, request.receive)
        if is_long(call, response):
            answer = await asyncio.to_thread(encode_infer_response, config, call, response)
        else:
            answer = encode_infer_response(config, call, response)
        return await _reply(answer, headers)

    async def _read(self, config: ModelConfig, headers: HeaderMap, request: Request) -> HttpInferRequest:
        given = headers.get(b"content-encoding")
        encoding = content_encoding.content_coding(given.decode("latin-1")) if given else ""
        length = _header_length(headers)
        body = await self._body(request, headers, length)
        if encoding:
            limit = self._max_size if length is None else self._max_raw_size
            body = await offload_if_large(len(body), content_encoding.decompress, body, encoding, limit)
        if length is not None and not 0 <= length <= len(body):
            raise InvalidArgument(f"inference header size should be in range (0, {len(body)}), got: {length}")
        if length is None and body[:1] != b"{":
            refuse_form(headers.get(b"content-type", b"").decode("latin-1"), body)
        document = None
        if (len(body) if length is None else length) > PIECE_BYTES:
            size_limits.check_json_size(len(body) if length is None else length, self._max_size)
            document = await parse_long_document(body if length is None else memoryview(body)[:length])
        call = self._reader.read(config, body, length, document)
        if call.deferred:
            call = call._replace(request=await decode_deferred(config, call.request, call.deferred))
        forwarded = self._forwarding.parameters(headers)
        if not forwarded:
            return call
        parameters = {**call.request.parameters, **forwarded}
        return call._replace(request=msgspec.structs.replace(call.request, parameters=parameters))

    async def _body(self, request: Request, headers: HeaderMap, header_length: int | None) -> bytes | bytearray:
        check, whole = self._check_of(header_length), take_complete_body(request.scope, request.receive)
        if whole is None:
            return await receive_body(request.receive, headers.get(b"content-length", b""), check)
        check(len(whole))
        return whole

    def _check_of(self, header_length: int | None) -> SizeCheck:
        if header_length is None:
            return lambda size: size_limits.check_json_size(size, self._max_size)
        return lambda size: size_limits.check_raw_size(size, self._max_raw_size)

    async def _infer(self, model: ModelHandle, request: InferRequest, receive: Receive) -> InferResponse:
        stream = model.infer(request)
        try:
            answering = EagerAwaitable(read_up_to_two(stream))
            if not answering.done:
                async with CancelOnDisconnect(receive):
                    await answering
            answers = await answering
        finally:
            await stream.aclose()
        if len(answers) != 1:
            raise Internal(f"expected a single response, got {len(answers)}")
        return answers[0]


def _header_length(headers: HeaderMap) -> int | None:
    given = headers.get(b"inference-header-content-length")
    if given is None:
        return None
    if given.isdigit() and len(given) < 19:
        return int(given)
    if not _INTEGER.fullmatch(given):
        raise InvalidArgument(f"Unable to parse {_HEADER_LENGTH}, got: {given.decode('latin-1')}")
    return int(given)


async def _reply(answer: EncodedInferResponse, headers: HeaderMap) -> ASGIApp:
    accepted = headers.get(b"accept-encoding")
    encoding = content_encoding.negotiate_encoding(accepted.decode("latin-1")) if accepted else ""
    if not encoding:
        return InferHttpResponse(answer.parts, answer.header_length)
    body = await offload_if_large(answer.size, content_encoding.compress, answer.parts, encoding)
    return InferHttpResponse((body,), answer.header_length, encoding)


class InferHttpResponse:
    """A body in parts, whose JSON is as long as `header_length` says, if there is more than JSON."""

    def __init__(self, parts: Sequence[bytes | memoryview], header_length: int | None, encoding: str = "") -> None:
        self._parts = parts
        self._head = _head(sum(map(len, parts)), header_length, encoding)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if send_complete_response(scope, send, self._head, self._parts):
            return
        headers = [tuple(line.split(b": ", 1)) for line in self._head.split(b"\r\n")[:-1]]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        last = len(self._parts) - 1
        for number, part in enumerate(self._parts):
            await send({"type": "http.response.body", "body": part, "more_body": number < last})


def _head(size: int, header_length: int | None, encoding: str) -> bytes:
    """The headers, as they go over the wire."""
    coded = b"content-encoding: %b\r\n" % encoding.encode() if encoding else b""
    if header_length is None:
        return b"content-type: application/json\r\n%bcontent-length: %d\r\n" % (coded, size)
    kind = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n" % header_length
    return b"%b%bcontent-length: %d\r\n" % (kind, coded, size)
