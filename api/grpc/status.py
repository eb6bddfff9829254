"""How an error looks over gRPC: its status code, its text, its trailing metadata."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import grpc

from ...core.errors import CharoniaError, ErrorCode
from ..http.error_responses import printable

RpcContext: TypeAlias = Any
"""A `grpc.aio.ServicerContext`; grpc ships no types."""

SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."
_LONGEST = 2000
"""Bytes of text that fit a client's default limit on metadata, even when each has to be percent-encoded."""

_STATUS = {
    ErrorCode.UNKNOWN: grpc.StatusCode.UNKNOWN,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
    ErrorCode.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
}


def call_metadata(context: RpcContext) -> Sequence[tuple[str, Any]]:
    """What the client sent along: text, or bytes where the name ends in -bin."""
    return context.invocation_metadata() or ()


def client_request_id(context: RpcContext) -> str:
    """What the client calls its call, if its metadata say so."""
    return str(dict(call_metadata(context)).get("x-request-id", ""))


def status_details(error: CharoniaError) -> str:
    """The message, cut where it quotes too much of what the client sent."""
    # A text that cannot be encoded would leave the client without any answer.
    text = printable(error.message)
    encoded = text.encode()
    return text if len(encoded) <= _LONGEST else encoded[:_LONGEST].decode(errors="ignore") + " ..."


async def abort_call(context: RpcContext, error: CharoniaError) -> None:
    """End the call with this error; raises what the server's runtime takes for an end."""
    wait = (("retry-after", str(math.ceil(error.retry_after))),) if error.retry_after else ()
    await context.abort(_STATUS[error.code], status_details(error), wait)
