"""Errors that reach a client, and words for their messages.

Each has a protocol-neutral code, which endpoints map to HTTP and gRPC.
"""

import errno
import re
from collections.abc import Iterable
from difflib import get_close_matches
from enum import StrEnum
from typing import Literal, NamedTuple

import msgspec

_MIN_SIMILARITY = 0.8
"""The share of letters that a name has in common with a known one, in order; with less it is no misspelling."""

_MAX_NAME_LENGTH = 64
"""Letters of a name that is compared: comparing takes the product of both lengths."""

_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
}
_EXPECTED = re.compile(r"Expected `(?P<kinds>[^`]+)`(?P<limits>.*?)(, got `(?P<got>[^`]+)`)?", re.DOTALL)
_NAMED = re.compile(r"Object (?P<problem>missing required|contains unknown) field `(?P<name>[^`]*)`")


LONGEST_MESSAGE = 4096
"""Characters of a message for a client."""

LONGEST_REPORT = (1 << 16) + 1024
"""Characters of what the code of a model says of itself: 64 KiB, and how much was cut off."""

_LONGEST_FIELD = 256


def shorten(text: str, longest: int = _MAX_NAME_LENGTH) -> str:
    """A text as a message quotes it: of a long one the beginning, and how long it is."""
    return text if len(text) <= longest else f"{text[: longest - 32]}... ({len(text)} characters)"


class ErrorCode(StrEnum):
    """Triton's internal status codes, RESOURCE_EXHAUSTED for an LLM's full queue and a full disk, UNAUTHENTICATED for a
    missing key, ABORTED for a change of what somebody else has changed meanwhile."""

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
    ABORTED = "ABORTED"


class CharoniaError(Exception):
    """An error meant for the client: `message` is shown verbatim.

    `field` names the offending request field (OpenAI's `param`), if there is one. What is longer than `longest`
    characters is cut: messages quote what clients and checkpoints say. `retry_after`: seconds after which
    another try may succeed, here or at another server; 0: time changes nothing.
    """

    code: ErrorCode = ErrorCode.UNKNOWN
    retry_after: float = 0.0

    def __init__(self, message: str, *, field: str | None = None, longest: int = LONGEST_MESSAGE) -> None:
        message = shorten(message, longest)
        super().__init__(message)
        self.message = message
        self.field = None if field is None else shorten(field, _LONGEST_FIELD)


class InvalidArgument(CharoniaError):
    code = ErrorCode.INVALID_ARGUMENT


class ContextLengthExceeded(InvalidArgument):
    """The prompt and the tokens to generate do not fit into the model's length."""


class NotFound(CharoniaError):
    code = ErrorCode.NOT_FOUND


class AlreadyExists(CharoniaError):
    code = ErrorCode.ALREADY_EXISTS


class Conflict(CharoniaError):
    """What is to be changed is not what the client expected."""

    code = ErrorCode.ABORTED


class Unauthenticated(CharoniaError):
    """The request has no key, or a wrong one."""

    code = ErrorCode.UNAUTHENTICATED


class Unavailable(CharoniaError):
    code = ErrorCode.UNAVAILABLE


class ServerExiting(Unavailable):
    """The server exits. Tasks that still answer requests are cancelled with this as the message."""

    retry_after = 1.0

    def __init__(self, message: str = "Server exiting") -> None:
        super().__init__(message)


def shutdown_error(cancelled: BaseException | None) -> ServerExiting | None:
    """The error of a request that the exit of the server cancelled; None if the client did, by leaving."""
    return next((each for each in cancelled.args if isinstance(each, ServerExiting)), None) if cancelled else None


class NotReady(Unavailable):
    """The model cannot answer now and will again: its process has ended and is being restarted, say."""

    retry_after = 1.0


class Cancelled(CharoniaError):
    """The request was cancelled, and not by its client."""

    code = ErrorCode.CANCELLED


class Unsupported(CharoniaError):
    code = ErrorCode.UNSUPPORTED


class Internal(CharoniaError):
    code = ErrorCode.INTERNAL


class RequestTimeout(Unavailable):
    """The request's own timeout expired before anything was generated for it; Triton's message."""

    def __init__(self, message: str = "Request timeout expired") -> None:
        super().__init__(message)


class DiskFull(Internal):
    """What the request wants kept finds no room on a disk of the server, or in what a user may have of one."""

    code = ErrorCode.RESOURCE_EXHAUSTED


def is_disk_full(error: BaseException | None) -> bool:
    """Whether that is what an error of the system says, or the one that it was raised from."""
    while error is not None:
        if isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
            return True
        error = error.__cause__
    return False


class QueueFull(CharoniaError):
    """Refused before any work: too many `limit` wait. Another try may succeed after `retry_after` seconds."""

    code = ErrorCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after: float, limit: Literal["requests", "tokens"] = "requests") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.limit: Literal["requests", "tokens"] = limit


def request_id_prefix(request_id: str) -> str:
    """The prefix of Triton's messages about one v2 request."""
    return f"[request id: {request_id or '<id_unknown>'}] "


_BY_CODE: dict[ErrorCode, type[CharoniaError]] = {
    error.code: error
    for error in (
        AlreadyExists,
        Cancelled,
        CharoniaError,
        Internal,
        InvalidArgument,
        NotFound,
        Unavailable,
        Unsupported,
    )
}


def error_from_code(code: str, message: str) -> CharoniaError:
    """The error that a user's Python model reports, which knows codes and no classes; `Internal` for an unknown code.
    Errors of our own processes cross as `SentError`."""
    return _BY_CODE.get(ErrorCode(code), Internal)(message, longest=LONGEST_REPORT)


_BY_NAME: dict[str, type[CharoniaError]] = {
    error.__name__: error
    for error in (
        *_BY_CODE.values(),
        Conflict,
        ContextLengthExceeded,
        DiskFull,
        NotReady,
        QueueFull,
        RequestTimeout,
        ServerExiting,
        Unauthenticated,
    )
}


class SentError(msgspec.Struct, array_like=True, frozen=True):
    """An error for a client in a message between two processes of ours: the only form in which errors cross."""

    kind: str
    """The name of the error's class, or of the first of its bases that this module defines."""
    message: str
    field: str | None = None
    retry_after: float = 0.0
    limit: Literal["requests", "tokens"] = "requests"
    """Of a `QueueFull`."""

    @classmethod
    def of(cls, error: BaseException) -> "SentError":
        """The message about `error`. One that is no `CharoniaError` becomes an `Internal` that names its class."""
        if not isinstance(error, CharoniaError):
            error = Internal(f"{type(error).__name__}: {error}", longest=LONGEST_REPORT)
        message = error.message.encode(errors="backslashreplace").decode()  # it may quote lone surrogates
        kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in _BY_NAME)
        limit = error.limit if isinstance(error, QueueFull) else "requests"
        return cls(kind, message, error.field, error.retry_after, limit)

    def error(self) -> CharoniaError:
        """The error, to be raised where the message arrived."""
        kind = _BY_NAME[self.kind]
        error = kind.__new__(kind)  # some classes word their message themselves
        CharoniaError.__init__(error, self.message, field=self.field, longest=LONGEST_REPORT)
        error.retry_after = self.retry_after
        if isinstance(error, QueueFull):
            error.limit = self.limit
        return error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: "; did you mean 'x'?", or nothing where none is similar."""
    alike = get_close_matches(name.lower(), known, 1, _MIN_SIMILARITY) if len(name) <= _MAX_NAME_LENGTH else []
    return f"; did you mean '{alike[0]}'?" if alike else ""


class ValidationMismatch(NamedTuple):
    """One violation that msgspec found. `path`: where, as in `messages[0].content`, empty for the whole. `reason`: the
    requirement ("must be a number <= 1") or the problem. `got`: the value's kind ("a string"), if msgspec tells it."""

    path: str
    reason: str
    got: str = ""

    def __str__(self) -> str:
        return f"{self.reason}, got {self.got}" if self.got else self.reason


def describe_validation_error(error: msgspec.ValidationError) -> ValidationMismatch:
    """A validation error in words for the client."""
    text, _, where = str(error).partition(" - at ")
    path = where.rpartition("`$")[2].rstrip("`").lstrip(".")  # of a key: in which object
    if named := _NAMED.fullmatch(text):
        path = f"{path}.{named['name']}".lstrip(".")
        return ValidationMismatch(path, "is missing" if named["problem"].startswith("missing") else "is unknown")
    if expected := _EXPECTED.fullmatch(text):
        kinds = " or ".join(_KINDS.get(kind, kind) for kind in expected["kinds"].split(" | ") if kind != "null")
        got = expected["got"] or ""
        return ValidationMismatch(path, f"must be {kinds}{expected['limits']}", _KINDS.get(got, got))
    return ValidationMismatch(path, f"is wrong: {text}")
