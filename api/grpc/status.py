"""Errors as gRPC statuses: code, details and trailing metadata; and the metadata that a call came with."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import grpc

from ...core.errors import CharoniaError, ErrorCode
from ..http.error_responses import printable

RpcContext: TypeAlias = Any
"""A `grpc.aio.ServicerContext`: grpc ships no types."""

SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."
_MAX_DETAILS_BYTES = 2000
"""As much text as fits a client's default limit on metadata, even when each byte has to be percent-encoded."""

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
    """The metadata that the client sent: values are text, or bytes where the name ends in -bin."""
    return context.invocation_metadata() or ()


def client_request_id(context: RpcContext) -> str:
    """The `x-request-id` of the client's metadata, or ''."""
    return str(dict(call_metadata(context)).get("x-request-id", ""))


def status_details(error: CharoniaError) -> str:
    """The message of an error, shortened where it quotes too much of a request."""
    # Details that cannot be encoded would leave the client without any answer.
    text = printable(error.message)
    encoded = text.encode()
    return text if len(encoded) <= _MAX_DETAILS_BYTES else encoded[:_MAX_DETAILS_BYTES].decode(errors="ignore") + " ..."


async def abort_call(context: RpcContext, error: CharoniaError) -> None:
    """End the call with the status of `error`; raises grpc's `AbortError`."""
    wait = (("retry-after", str(math.ceil(error.retry_after))),) if error.retry_after else ()
    await context.abort(_STATUS[error.code], status_details(error), wait)
