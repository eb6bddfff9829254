"""Errors that reach a client. Each has a protocol-neutral code, which endpoints map to HTTP and gRPC."""

from enum import StrEnum
from typing import Literal


class ErrorCode(StrEnum):
    """Triton's internal status codes, RESOURCE_EXHAUSTED for an LLM's full queue, UNAUTHENTICATED for a missing key."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAUTHENTICATED = "UNAUTHENTICATED"


class CharoniaError(Exception):
    """An error meant for the client: `message` is shown verbatim.

    `field` names the offending request field (OpenAI's `param`), if there is one. `retry_after`: seconds after which
    another try may succeed, here or at another server; 0: time changes nothing.
    """

    code: ErrorCode = ErrorCode.UNKNOWN
    retry_after: float = 0.0

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidArgument(CharoniaError):
    code = ErrorCode.INVALID_ARGUMENT


class ContextLengthExceeded(InvalidArgument):
    """A prompt, or what is to come after it, for which the model's length has no room."""


class NotFound(CharoniaError):
    code = ErrorCode.NOT_FOUND


class AlreadyExists(CharoniaError):
    code = ErrorCode.ALREADY_EXISTS


class Unauthenticated(CharoniaError):
    """No key was shown, or a wrong one."""

    code = ErrorCode.UNAUTHENTICATED


class Unavailable(CharoniaError):
    code = ErrorCode.UNAVAILABLE


class ServerExiting(Unavailable):
    """The server ends. A task that still answers a request then is cancelled with this as the message."""

    retry_after = 1.0

    def __init__(self, message: str = "Server exiting") -> None:
        super().__init__(message)


def shutdown_error(cancelled: BaseException | None) -> ServerExiting | None:
    """The error of a request that the exit of the server cancelled; None if the client did, by leaving."""
    return next((each for each in cancelled.args if isinstance(each, ServerExiting)), None) if cancelled else None


class NotReady(Unavailable):
    """What computes is not there now, and will be again: it has ended unexpectedly, say, and is being restarted."""

    retry_after = 1.0


class Cancelled(CharoniaError):
    """Cancelled by somebody else than the client."""

    code = ErrorCode.CANCELLED


class Unsupported(CharoniaError):
    code = ErrorCode.UNSUPPORTED


class Internal(CharoniaError):
    code = ErrorCode.INTERNAL


class RequestTimeout(Unavailable):
    """The request's own time ran out before anything was generated for it; Triton's words."""

    def __init__(self, message: str = "Request timeout expired") -> None:
        super().__init__(message)


class QueueFull(CharoniaError):
    """Refused before any work; worth another try after `retry_after` seconds. `limit`: what too much of waits."""

    code = ErrorCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after: float, limit: Literal["requests", "tokens"] = "requests") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.limit = limit


def request_id_prefix(request_id: str) -> str:
    """The beginning of Triton's messages about one v2 request."""
    return f"[request id: {request_id or '<id_unknown>'}] "


_BY_CODE: dict[ErrorCode, type[CharoniaError]] = {
    error.code: error for error in (Internal, InvalidArgument, NotFound, Unavailable, Unsupported)
}


def error_from_code(code: str, message: str, field: str | None = None) -> CharoniaError:
    """The error that another process raised, from its code; `Internal` for an unknown code."""
    return _BY_CODE.get(ErrorCode(code), Internal)(message, field=field)
