"""Errors that reach a client. Each carries a protocol-neutral code; the doors map it to HTTP and gRPC."""

from enum import StrEnum
from typing import Literal


class Code(StrEnum):
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

    code: Code = Code.UNKNOWN
    retry_after: float = 0.0

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidArgument(CharoniaError):
    code = Code.INVALID_ARGUMENT


class TooLong(InvalidArgument):
    """A prompt, or what is to come after it, for which the model's length has no room."""


class NotFound(CharoniaError):
    code = Code.NOT_FOUND


class AlreadyExists(CharoniaError):
    code = Code.ALREADY_EXISTS


class Unauthenticated(CharoniaError):
    """No key was shown, or a wrong one."""

    code = Code.UNAUTHENTICATED


class Unavailable(CharoniaError):
    code = Code.UNAVAILABLE


class Exiting(Unavailable):
    """The server ends. A task that still answers a request then is cancelled with this as the message."""

    retry_after = 1.0

    def __init__(self, message: str = "Server exiting") -> None:
        super().__init__(message)


def cut_off(cancelled: BaseException | None) -> Exiting | None:
    """What a client is told if the end of the server cancelled its request; None if the client did, by leaving."""
    return next((each for each in cancelled.args if isinstance(each, Exiting)), None) if cancelled else None


class NotReady(Unavailable):
    """What computes is not there now, and will be again: it has ended unexpectedly, say, and is being restarted."""

    retry_after = 1.0


class Cancelled(CharoniaError):
    """Not by whoever asked: by someone else whom it belongs to."""

    code = Code.CANCELLED


class Unsupported(CharoniaError):
    code = Code.UNSUPPORTED


class Internal(CharoniaError):
    code = Code.INTERNAL


class RequestTimeout(Unavailable):
    """The request's own time ran out before anything was generated for it; Triton's words."""

    def __init__(self, message: str = "Request timeout expired") -> None:
        super().__init__(message)


class QueueFull(CharoniaError):
    """Refused before any work; worth another try after `retry_after` seconds. `limit`: what too much of waits."""

    code = Code.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after: float, limit: Literal["requests", "tokens"] = "requests") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.limit = limit


_BY_CODE: dict[Code, type[CharoniaError]] = {
    error.code: error for error in (Internal, InvalidArgument, NotFound, Unavailable, Unsupported)
}


def error_of(code: str, message: str, field: str | None = None) -> CharoniaError:
    """What another process raised, once more: `Internal` where its kind is not known."""
    return _BY_CODE.get(Code(code), Internal)(message, field=field)
