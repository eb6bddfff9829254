"""Errors as HTTP responses: status, JSON in the form of the endpoint's protocol, headers."""

import math
from typing import Any

import orjson
from starlette.responses import Response

from ...core.errors import (
    CharoniaError,
    ContextLengthExceeded,
    DiskFull,
    ErrorCode,
    Internal,
    InvalidArgument,
    Unauthenticated,
    is_disk_full,
)
from ..size_limits import BodyTooLarge
from .content_encoding import ACCEPTED_ENCODINGS, UnsupportedEncoding
from .request_head import is_anthropic_path, is_openai_path

_STATUS = {
    ErrorCode.UNKNOWN: 400,
    ErrorCode.INTERNAL: 500,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.UNSUPPORTED: 501,
    ErrorCode.ALREADY_EXISTS: 400,
    ErrorCode.CANCELLED: 400,
    ErrorCode.RESOURCE_EXHAUSTED: 429,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.ABORTED: 409,
}
_OPENAI_TYPE = {404: "not_found_error", 429: "rate_limit_error"}
_OPENAI_CODE = {
    401: "invalid_api_key",
    404: "model_not_found",
    429: "rate_limit_exceeded",
    507: "storage_full",
}

_ANTHROPIC_TYPE = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}

INTERNAL_SERVER_ERROR = Internal("Internal Server Error")


def unexpected_error(error: BaseException) -> CharoniaError:
    """The error that a client gets for one that nobody expected, whose traceback is in the log."""
    return DiskFull("the server's disk is full") if is_disk_full(error) else INTERNAL_SERVER_ERROR


class BodyTimeout(InvalidArgument):
    """A request's body came to a halt before its end; the response is the connection's last."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the request body is incomplete: nothing more of it came for {seconds:g} s")


class BodyTooSlow(BodyTimeout):
    """A request's body comes, and so slowly that it only holds a connection."""

    def __init__(self, size: int, seconds: float) -> None:
        message = f"the request body comes too slowly: {size} bytes in {seconds:.0f} s"
        InvalidArgument.__init__(self, message)


class ApiError(CharoniaError):
    """An error whose status, and OpenAI's code for it, no other kind of error has."""

    def __init__(self, message: str, status: int, openai_code: str | None = None, *, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.status, self.openai_code = status, openai_code


def status_of(error: CharoniaError) -> int:
    """The HTTP status of an error as OpenAI's clients and Anthropic's know it."""
    if isinstance(error, BodyTimeout):
        return 408
    if isinstance(error, ApiError):
        return error.status
    if isinstance(error, DiskFull):
        return 507
    return 413 if isinstance(error, BodyTooLarge) else _STATUS[error.code]


def v2_status_of(error: CharoniaError) -> int:
    """The HTTP status of an error in v2: Triton knows no 413."""
    return _STATUS[error.code] if isinstance(error, BodyTooLarge) else status_of(error)


def v2_error_body(error: CharoniaError) -> dict[str, Any]:
    return {"error": printable(error.message)}


def openai_error_body(error: CharoniaError) -> dict[str, Any]:
    status = status_of(error)
    kind = _OPENAI_TYPE.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = "context_length_exceeded" if isinstance(error, ContextLengthExceeded) else _OPENAI_CODE.get(status)
    if isinstance(error, ApiError):
        code = error.openai_code
    return {"error": {"message": printable(error.message), "type": kind, "param": error.field, "code": code}}


def anthropic_error_body(error: CharoniaError, status: int | None = None) -> dict[str, Any]:
    """The body of an error on Anthropic's paths; `status`: where it is not the error's own."""
    # Clients that shorten conversations by themselves know these words.
    message = f"prompt is too long: {error.message}" if isinstance(error, ContextLengthExceeded) else error.message
    status = status or status_of(error)
    kind = _ANTHROPIC_TYPE.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": printable(message)}}


def error_body(error: CharoniaError, path: str) -> dict[str, Any]:
    """The body of the response to a request to `path` that ended with `error`, in the form of its protocol."""
    if is_anthropic_path(path):
        return anthropic_error_body(error)
    return openai_error_body(error) if is_openai_path(path) else v2_error_body(error)


def printable(message: str) -> str:
    """The message as UTF-8 can have it: it may quote lone surrogates of the request."""
    return message.encode(errors="backslashreplace").decode()


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


def error_response(error: CharoniaError, path: str) -> Response:
    """The response to a request to `path` that ended with `error`."""
    headers = None
    if error.retry_after:
        headers = {"retry-after": str(math.ceil(error.retry_after))}
    elif isinstance(error, Unauthenticated):
        headers = {"www-authenticate": "Bearer"}
    elif isinstance(error, UnsupportedEncoding):
        headers = {"accept-encoding": ACCEPTED_ENCODINGS}
    elif isinstance(error, BodyTimeout):
        headers = {"connection": "close"}
    elif isinstance(error, ApiError):
        headers = {"x-should-retry": "false"}  # OpenAI's package would ask again after 409 and 5xx, to no avail
    status = status_of(error) if is_openai_path(path) else v2_status_of(error)
    return json_response(error_body(error, path), status, headers)
