"""`POST .../infer`: v2's inference over HTTP, with the parts of HTTP that belong to it: lengths, encodings, headers.

Translates between the protocol and the gateway. The hottest of all routes: every request pays for each line.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ...api import json_tensors, raw_tensors
from ...core.errors import Internal, InvalidArgument, Unsupported
from ...core.gateway import ModelHandle, ResponseStream
from ...core.model import ModelConfig
from ...core.request import InferResponse
from ...core.tensor import Tensor
from ...telemetry.shared_state import ServerLookup
from .. import size_limits
from ..chunked_json import PIECE_BYTES
from ..header_rules import HeaderForwarding
from ..http import content_encoding
from ..http.connection import CancelOnDisconnect, offload_if_large, receive_body, refuse_form
from ..http.eager import EagerAwaitable
from ..http.request_context import context_of
from ..http.request_cycle import send_complete_response
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


class EncodedInferResponse(NamedTuple):
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
    outputs: list[_OutputJson] = []
    blobs: list[bytes | memoryview] = []
    strict, size = True, ResponseSize(limit)
    for output in response.outputs:
        wanted = call.outputs.get(output.name, call.default_output)
        tensor = wanted.apply(config, output)
        members: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        long = None
        if wanted.memory is None:
            size.add(tensor, as_json=not wanted.binary)
        if wanted.binary:
            blob = raw_tensors.encode(tensor) if tensor.data.nbytes < _COPIED else raw_tensors.encode_view(tensor)
            blobs.append(blob)
            members["parameters"] = {"binary_data_size": len(blob)}
        elif wanted.memory is None:
            strict = strict and json_tensors.is_strict_json(tensor)
            if raw_tensors.is_long(tensor):
                long = tensor
            else:
                members["data"] = json_tensors.to_list(tensor)
        outputs.append(_OutputJson(members, long))
    document: dict[str, Any] = {"id": call.request.id} if call.request.id else {}
    document["model_name"], document["model_version"] = config.name, config.version
    if response.parameters:
        document["parameters"] = response.parameters
    if any(described.long is not None for described in outputs):
        head = _long_json(document, outputs, strict)
    else:
        document["outputs"] = [described.members for described in outputs]
        head = [json_tensors.dump_json(document, strict)]
    return _assemble(head, blobs)


def _assemble(head: list[bytes], blobs: list[bytes | memoryview]) -> EncodedInferResponse:
    size = sum(map(len, blobs))
    if not size:
        return EncodedInferResponse(head, None)
    length = sum(map(len, head))
    parts = (b"".join((*head, *blobs)),) if size < _COPIED and len(head) == 1 else (*head, *blobs)
    return EncodedInferResponse(parts, length)


class _OutputJson(NamedTuple):
    """An output's JSON object, but for the data of a `long` one."""

    members: dict[str, Any]
    long: Tensor | None


def _long_json(document: dict[str, Any], outputs: Iterable[_OutputJson], strict: bool) -> list[bytes]:
    """The JSON of a response with these outputs, in pieces, of which none takes long to make."""
    parts, between = [json_tensors.dump_json(document, strict)[:-1], b',"outputs":['], b""
    for output in outputs:
        parts.append(between + json_tensors.dump_json(output.members, strict))
        if output.long is not None:
            parts[-1] = parts[-1][:-1] + b',"data":['
            parts += json_tensors.encode_in_pieces(output.long, strict)
            parts.append(b"]}")
        between = b","
    return [*parts, b"]}"]


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
        path = request.scope["path_params"]
        model = await self._lookup.acquire(context_of(request.scope), path["model"], str(path.get("version", "")))
        config = model.config
        if not supports_single_response(config):
            raise Unsupported(_DECOUPLED)
        model.check_room()
        headers: HeaderMap = dict(request.scope["headers"])
        call = await self._read(model, headers, request)
        if config.decoupled and wants_stream(call.request):
            raise Unsupported(f"{_DECOUPLED}: set stream to false, or use generate_stream", field="stream")
        response = await _single_response(model.infer(call.request), config.decoupled, request.receive)
        release_memory_after(response)
        encode = partial(encode_infer_response, model.config, call, response, self._max_response_size)
        encoded = await asyncio.to_thread(encode) if is_long(call, response) else encode()
        accepted = headers.get(b"accept-encoding", b"").decode("latin-1")
        encoding = content_encoding.negotiate_encoding(accepted) if accepted else ""
        if not encoding:
            return InferHttpResponse(encoded.parts, encoded.header_length)
        body = await offload_if_large(encoded.size, content_encoding.compress, encoded.parts, encoding)
        return InferHttpResponse((body,), encoded.header_length, encoding)

    async def _read(self, model: ModelHandle, headers: HeaderMap, request: Request) -> InferCall:
        coding = headers.get(b"content-encoding")
        encoding = content_encoding.content_coding(coding.decode("latin-1")) if coding else ""
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
        if self._forwarding is not None and (forwarded := self._forwarding.parameters(headers)):
            parameters = {**call.request.parameters, **forwarded}
            call = call._replace(request=msgspec.structs.replace(call.request, parameters=parameters))
        return call


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
