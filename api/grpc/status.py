"""How an error looks over gRPC: its status code, its text, its trailing metadata."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import grpc

from ...core.errors import CharoniaError, Code
from ..http.error_responses import printable

Context: TypeAlias = Any
"""A `grpc.aio.ServicerContext`; grpc ships no types."""

STOPPING = "GRPC server is shutting down and has stopped accepting new requests."
_LONGEST = 2000
"""Bytes of text that fit a client's default limit on metadata, even when each has to be percent-encoded."""

_STATUS = {
    Code.UNKNOWN: grpc.StatusCode.UNKNOWN,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Code.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Code.CANCELLED: grpc.StatusCode.CANCELLED,
    Code.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
}


def metadata_of(context: Context) -> Sequence[tuple[str, Any]]:
    """What the client sent along: text, or bytes where the name ends in -bin."""
    return context.invocation_metadata() or ()


def client_id_of(context: Context) -> str:
    """What the client calls its call, if its metadata say so."""
    return str(dict(metadata_of(context)).get("x-request-id", ""))


def text_of(error: CharoniaError) -> str:
    """The message, cut where it quotes too much of what the client sent."""
    # A text that cannot be encoded would leave the client without any answer.
    text = printable(error.message)
    encoded = text.encode()
    return text if len(encoded) <= _LONGEST else encoded[:_LONGEST].decode(errors="ignore") + " ..."


async def refuse(context: Context, error: CharoniaError) -> None:
    """End the call with this error; raises what the server's runtime takes for an end."""
    wait = (("retry-after", str(math.ceil(error.retry_after))),) if error.retry_after else ()
    await context.abort(_STATUS[error.code], text_of(error), wait)
