"""`POST .../infer`: v2's inference over HTTP, with the parts of HTTP that belong to it: lengths, encodings, headers.

Translates between the protocol and the gateway. The hottest of all routes: every request pays for each line.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from secrets import token_hex
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ...api import json_tensors, raw_tensors
from ...core.direct_stream import ReadyResponse
from ...core.errors import Internal, InvalidArgument, Unsupported
from ...core.gateway import InlineHandle, ModelHandle, ResponseStream
from ...core.model import ModelConfig
from ...core.request import InferResponse, ParameterValue
from ...core.request_context import RequestContext
from ...core.tensor import Tensor
from ...telemetry.shared_state import ServerLookup
from .. import size_limits
from ..chunked_json import PIECE_BYTES
from ..header_rules import HeaderForwarding
from ..http import content_encoding
from ..http.connection import CancelOnDisconnect, json_text, offload_if_large, receive_body
from ..http.eager import EagerAwaitable
from ..http.request_context import context_of, late_context
from ..http.request_cycle import send_complete_response
from ..http.request_head import header_map
from ..infer_call import (
    InferCall,
    ResponseSize,
    read_up_to_two,
    release_memory_after,
    supports_single_response,
    wants_stream,
)
from ..metadata import ServerInfo
from .infer_request import InferRequestReader, parse_long_document

_COPIED = 1 << 16
"""Bytes of tensors up to which it is cheaper to join them than to send them apart."""


class EncodedInferResponse(msgspec.Struct, frozen=True):
    """A body in parts. `header_length`: bytes of the JSON in front, None if there is nothing but JSON."""

    parts: Sequence[bytes | memoryview]
    header_length: int | None

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))


def is_long(call: InferCall, response: InferResponse) -> bool:
    """Whether encoding the response takes longer than the event loop should be held."""
    if call.outputs and call.writes_to_gpu:
        return True
    for tensor in response.outputs:
        if raw_tensors.is_long(tensor):
            output = call.outputs.get(tensor.name, call.default_output)
            if tensor.datatype == "BYTES" or not (output.binary or output.memory is not None):
                return True
    return False


def encode_infer_response(
    config: ModelConfig, call: InferCall, response: InferResponse, limit: int = size_limits.MAX_RESPONSE_BYTES
) -> EncodedInferResponse:
    """The body of the response, each output as `call` asks for it. `limit`: see `ResponseSize`.

    Raises `CharoniaError` if an output cannot be returned like that.
    """
    outline: list[_OutputOutline] = []
    values: list[list[Any] | Tensor] = []
    blobs: list[bytes | memoryview] = []
    strict, size = True, ResponseSize(limit)
    for output in response.outputs:
        wanted = call.outputs.get(output.name, call.default_output)
        tensor = wanted.apply(config, output)
        place: int | None = None
        if wanted.memory is None:
            size.add(tensor, as_json=not wanted.binary)
        if wanted.binary:
            blob = raw_tensors.encode_cheaply(tensor)
            blobs.append(blob)
            place = len(blob)
        elif wanted.memory is None:
            place = _IN_JSON
            part = None if raw_tensors.is_long(tensor) else json_tensors.to_list(tensor)
            strict = strict and json_tensors.is_strict_json(tensor, part)
            values.append(tensor if part is None else part)
        outline.append((tensor.name, tensor.datatype, tensor.shape, place))
    request_id = call.request.id
    describe = _around_values if not response.parameters else partial(_describe_response, response.parameters)
    around = describe(config.name, config.version, bool(request_id), strict, *outline)
    parts, document = [around[0]], iter(around[1:])
    if request_id:
        parts += json_tensors.dump_json(request_id, strict), next(document)
    for value in values:
        if isinstance(value, Tensor):
            parts += b"[", *json_tensors.encode_in_pieces(value, strict), b"]", next(document)
        else:
            parts += json_tensors.dump_json(value, strict), next(document)
    return _assemble(parts, blobs)


_OutputOutline: TypeAlias = tuple[str, str, tuple[int, ...], int | None]
"""An output's name, datatype and shape, and its place: so many bytes behind the JSON, `_IN_JSON`, or nowhere."""

_IN_JSON = -1
_HOLE = token_hex(16)
"""Stands for values that are not known yet; no client can know it and have it for a name."""


def _describe_response(
    parameters: Mapping[str, ParameterValue],
    name: str,
    version: str,
    has_id: bool,
    strict: bool,
    *outputs: _OutputOutline,
) -> list[bytes]:
    """The JSON of a response in pieces, between which there are the request's id, if it has one, and the data of each
    output that is in the JSON."""
    document: dict[str, Any] = {"id": _HOLE} if has_id else {}
    document |= {"model_name": name, "model_version": version}
    if parameters:
        document["parameters"] = parameters
    document["outputs"] = [
        {"name": output, "datatype": datatype, "shape": shape}
        | ({} if place is None else {"data": _HOLE} if place < 0 else {"parameters": {"binary_data_size": place}})
        for output, datatype, shape, place in outputs
    ]
    return json_tensors.dump_json(document, strict).split(b'"%b"' % _HOLE.encode())


_around_values = lru_cache(256)(partial(_describe_response, {}))
"""The pieces of a response without parameters: most responses of a model are alike but for their values."""


def _assemble(head: list[bytes], blobs: list[bytes | memoryview]) -> EncodedInferResponse:
    size = sum(map(len, blobs))
    if not size:
        return EncodedInferResponse(head if sum(map(len, head)) > _COPIED else [b"".join(head)], None)
    length = sum(map(len, head))
    parts = (b"".join((*head, *blobs)),) if size + length < _COPIED else (*head, *blobs)
    return EncodedInferResponse(parts, length)


_DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
_HEADER_LENGTH = "Inference-Header-Content-Length"
_INTEGER = re.compile(rb"[+-]?\d{1,18}")

HeaderMap: TypeAlias = Mapping[bytes, bytes]


class InferEndpoint:
    """The handler of the route. `forwarding`: headers that become parameters."""

    def __init__(self, lookup: ServerLookup, info: ServerInfo, forwarding: HeaderForwarding) -> None:
        self._lookup = lookup
        self._max_size, self._max_raw_size = info.max_input_size, info.max_raw_size
        self._max_response_size = info.max_response_size
        self._forwarding = forwarding or None

    @cached_property
    def _reader(self) -> InferRequestReader:
        return InferRequestReader(self._lookup.shared_state.shared_memory, self._max_size, self._max_raw_size)

    async def answer(self, request: Request) -> ASGIApp:
        scope = request.scope
        path, headers = scope["path_params"], header_map(scope)
        name, version = path["model"], str(path.get("version", ""))
        late = late_context(scope)
        inline = None if late is None else self._lookup.find_inline(name, version)
        if late is None or inline is None or inline.config.decoupled:
            model = await self._lookup.acquire(context_of(scope), name, version)
            if not supports_single_response(model.config):
                raise Unsupported(_DECOUPLED)
            model.check_room()
            call = await self._read(model.config, headers, request)
            config, response = await _answer(model, call, request.receive)
        else:
            config = inline.config
            try:
                call = await self._read(config, headers, request)
            except BaseException:
                _name_model(context_of(scope), config)
                raise
            answer = _answer_now(inline, call, scope)
            if answer is not None:
                late.answered, response = True, answer
            else:
                model = await self._lookup.acquire(context_of(scope), name, version)
                config, response = await _answer(model, call, request.receive)
        release_memory_after(response)
        encode = partial(encode_infer_response, config, call, response, self._max_response_size)
        encoded = await asyncio.to_thread(encode) if is_long(call, response) else encode()
        accepted = headers.get(b"accept-encoding", b"").decode("latin-1")
        encoding = "" if accepted in ("", "identity") else content_encoding.negotiate_encoding(accepted)
        if not encoding:
            return InferHttpResponse(encoded.parts, encoded.header_length)
        body = await offload_if_large(encoded.size, content_encoding.compress, encoded.parts, encoding)
        return InferHttpResponse((body,), encoded.header_length, encoding)

    async def _read(self, config: ModelConfig, headers: HeaderMap, request: Request) -> InferCall:
        coding = headers.get(b"content-encoding")
        encoding = content_encoding.content_coding(coding.decode("latin-1")) if coding else ""
        length = _header_length(headers)
        limit = self._max_size if length is None else self._max_raw_size
        too_large = size_limits.json_too_large if length is None else size_limits.raw_too_large
        body = await receive_body(request, headers.get(b"content-length", b""), limit, too_large)
        if encoding:
            body = await offload_if_large(len(body), content_encoding.decompress, body, encoding, limit)
        if length is not None and not 0 <= length <= len(body):
            raise InvalidArgument(f"inference header size should be in range (0, {len(body)}), got: {length}")
        if length is None and body[:1] != b"{":
            body = json_text(headers.get(b"content-type", b"").decode("latin-1"), body)
        document, json_size = None, len(body) if length is None else length
        if json_size > PIECE_BYTES:
            if json_size > self._max_size:
                raise size_limits.json_too_large(json_size, self._max_size)
            document = await parse_long_document(memoryview(body)[:json_size])
        call = self._reader.read(config, body, length, document)
        if self._forwarding is not None and (forwarded := self._forwarding.parameters(headers)):
            parameters = {**call.request.parameters, **forwarded}
            with_headers = msgspec.structs.replace(call.request, parameters=parameters)
            call = msgspec.structs.replace(call, request=with_headers)
        return call


def _answer_now(model: InlineHandle, call: InferCall, scope: Scope) -> InferResponse | None:
    """The response of a model that computes in the event loop, to a request that has no context yet, and needs none
    unless the model fails. None if the request takes more, or is to be refused."""
    if call.deferred or not call.returns_plainly:
        return None
    try:
        answer = model.answer_now(call.request)
    except Exception:
        context = context_of(scope)  # for the log
        _name_model(context, model.config)
        context.id, context.counted = call.request.id, True
        raise
    return None if answer is None else answer[0]


def _name_model(context: RequestContext, config: ModelConfig) -> None:
    """Say for whom a request was that is refused, or failed, before it had its model."""
    context.model, context.version, context.model_found = config.name, config.version, True


async def _answer(model: ModelHandle, call: InferCall, receive: Receive) -> tuple[ModelConfig, InferResponse]:
    """The one response of a model, and the config of the arm that made it."""
    if call.deferred:
        call = await call.decode_deferred(model)
    decoupled = model.config.decoupled
    if decoupled and wants_stream(call.request):
        raise Unsupported(f"{_DECOUPLED}: set stream to false, or use generate_stream", field="stream")
    stream = model.infer(call.request)
    if type(stream) is ReadyResponse:
        response = stream.response
    else:
        response = await _single_response(stream, decoupled, receive)
    return model.config, response


async def _single_response(stream: ResponseStream[InferResponse], decoupled: bool, receive: Receive) -> InferResponse:
    try:
        answering = EagerAwaitable(read_up_to_two(stream, decoupled))
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
    length = headers.get(b"inference-header-content-length")
    if length is None:
        return None
    if length.isdigit() and len(length) < 19:
        return int(length)
    if not _INTEGER.fullmatch(length):
        raise InvalidArgument(f"Unable to parse {_HEADER_LENGTH}, got: {length.decode('latin-1')}")
    return int(length)


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
