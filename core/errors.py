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
"""The share of letters that a misspelled name has in common with the right one, in order."""

_MAX_NAME_LENGTH = 64
"""The longest name that is compared, since comparing takes the product of both lengths."""

_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
}
_BOUNDED_INTEGER = "an integer of at most 64 bits"
"""Said where a number came in place of one, for JSON's longer integers are read as numbers."""
_EXPECTED = re.compile(r"Expected `(?P<kinds>[^`]+)`(?P<limits>.*?)(, got `(?P<got>[^`]+)`)?", re.DOTALL)
_NAMED = re.compile(r"Object (?P<problem>missing required|contains unknown) field `(?P<name>[^`]*)`")


LONGEST_MESSAGE = 4096
"""Characters of a message for a client."""

LONGEST_REPORT = (1 << 16) + 1024
"""Characters of a report that a model's own code makes: 64 KiB, and a note of what was cut off."""

_LONGEST_FIELD = 256


def shorten(text: str, longest: int = _MAX_NAME_LENGTH) -> str:
    """Shorten a text to be quoted in a message: the beginning, and the length."""
    return text if len(text) <= longest else f"{text[: longest - 32]}... ({len(text)} characters)"


class ErrorCode(StrEnum):
    """Triton's status codes, and three of ours: RESOURCE_EXHAUSTED for a full queue or disk, UNAUTHENTICATED for a
    missing key, ABORTED for a change that conflicts with another."""

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
    """An error whose message is shown to the client, cut to `longest` characters. `field` names the offending request
    field (OpenAI's `param`)."""

    code: ErrorCode = ErrorCode.UNKNOWN
    retry_after: float = 0.0
    """Seconds until another try may succeed; 0 if time changes nothing."""

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
    """The client expected another state of what it changes."""

    code = ErrorCode.ABORTED


class Unauthenticated(CharoniaError):
    """The request has no key, or a wrong one."""

    code = ErrorCode.UNAUTHENTICATED


class Unavailable(CharoniaError):
    code = ErrorCode.UNAVAILABLE


class ServerExiting(Unavailable):
    """The server exits. It cancels the tasks that still answer requests, with this error as the message."""

    retry_after = 1.0

    def __init__(self, message: str = "Server exiting") -> None:
        super().__init__(message)


def shutdown_error(cancelled: BaseException) -> ServerExiting | None:
    """The error of a request that the server's exit cancelled; None if the client left."""
    return next((argument for argument in cancelled.args if isinstance(argument, ServerExiting)), None)


class NotReady(Unavailable):
    """The model cannot answer now and will again, for instance while its process restarts."""

    retry_after = 1.0


class Cancelled(CharoniaError):
    """The request was cancelled by somebody other than its client."""

    code = ErrorCode.CANCELLED


class Unsupported(CharoniaError):
    code = ErrorCode.UNSUPPORTED


class Internal(CharoniaError):
    code = ErrorCode.INTERNAL


class RequestTimeout(Unavailable):
    """The request's own timeout expired before it got a token; the message is Triton's."""

    def __init__(self, message: str = "Request timeout expired") -> None:
        super().__init__(message)


class DiskFull(Internal):
    """A disk of the server, or a user's share of it, has no room for what the request stores."""

    code = ErrorCode.RESOURCE_EXHAUSTED


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that a disk is full."""
    while error is not None:
        if isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
            return True
        error = error.__cause__
    return False


class QueueFull(CharoniaError):
    """The request was refused before any work, since too many requests or tokens wait. Another try may succeed after
    `retry_after` seconds."""

    code = ErrorCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after: float, limit: Literal["requests", "tokens"] = "requests") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.limit: Literal["requests", "tokens"] = limit


def request_id_prefix(request_id: str) -> str:
    """The prefix of Triton's messages about one v2 request."""
    return f"[request id: {request_id or '<id_unknown>'}] "


_GENERAL = (AlreadyExists, Cancelled, CharoniaError, Internal, InvalidArgument, NotFound, Unavailable, Unsupported)
"""The general class of each code that a model's code may report."""
_SPECIAL = (
    Conflict,
    ContextLengthExceeded,
    DiskFull,
    NotReady,
    QueueFull,
    RequestTimeout,
    ServerExiting,
    Unauthenticated,
)

_BY_CODE: dict[ErrorCode, type[CharoniaError]] = {error.code: error for error in _GENERAL}
_BY_NAME: dict[str, type[CharoniaError]] = {error.__name__: error for error in (*_GENERAL, *_SPECIAL)}


def error_from_code(code: str, message: str) -> CharoniaError:
    """The error that a user's Python model reports by its code; an unknown code is `Internal`. Errors of our own
    processes cross as `SentError`."""
    return _BY_CODE.get(ErrorCode(code), Internal)(message, longest=LONGEST_REPORT)


class SentError(msgspec.Struct, array_like=True, frozen=True):
    """An error for a client in a message between our processes: the only form in which errors cross."""

    kind: str
    """The name of the error's class, or of its nearest base in this module."""
    message: str
    field: str | None = None
    retry_after: float = 0.0
    limit: Literal["requests", "tokens"] = "requests"
    """The limit that a `QueueFull` ran into."""

    @classmethod
    def of(cls, error: BaseException) -> "SentError":
        """The message about `error`. Anything but a `CharoniaError` becomes an `Internal` that names its class."""
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
    """The end of a message about an unknown name: "; did you mean 'x'?", or nothing if no name is similar."""
    alike = get_close_matches(name.lower(), known, 1, _MIN_SIMILARITY) if len(name) <= _MAX_NAME_LENGTH else []
    return f"; did you mean '{alike[0]}'?" if alike else ""


class ValidationMismatch(NamedTuple):
    """One violation that msgspec found."""

    path: str
    """Where it is, as in `messages[0].content`; empty for the whole."""
    reason: str
    """The requirement ("must be a number <= 1") or the problem."""
    got: str = ""
    """The kind of the value ("a string"), if msgspec names it."""

    def __str__(self) -> str:
        return f"{self.reason}, got {self.got}" if self.got else self.reason


def describe_validation_error(error: msgspec.ValidationError) -> ValidationMismatch:
    """A validation error in words for the client."""
    text, _, where = str(error).partition(" - at ")
    path = where.rpartition("`$")[2].rstrip("`").lstrip(".")  # of a key: in which object
    if field := _NAMED.fullmatch(text):
        path = f"{path}.{field['name']}".lstrip(".")
        return ValidationMismatch(path, "is missing" if field["problem"].startswith("missing") else "is unknown")
    if expected := _EXPECTED.fullmatch(text):
        kinds = " or ".join(_KINDS.get(kind, kind) for kind in expected["kinds"].split(" | ") if kind != "null")
        got = expected["got"] or ""
        if got == "float":
            kinds = kinds.replace(_KINDS["int"], _BOUNDED_INTEGER)
        return ValidationMismatch(path, f"must be {kinds or 'null'}{expected['limits']}", _KINDS.get(got, got))
    return ValidationMismatch(path, f"is wrong: {text}")
