"""Calls into native libraries. A panic in Rust raises a `BaseException` that is no `Exception`."""

import asyncio
from types import TracebackType

from .errors import Internal

CONTROL_FLOW = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Exceptions that end the code which they pass through. Any other is a fault."""

_LONGEST_REASON = 512


class NativeCall:
    """A block that calls a library. A panic, or a plain `Exception`, becomes an `Internal` that begins with `subject`,
    as in "the tokenizer failed"; other errors pass."""

    __slots__ = ("_subject",)

    def __init__(self, subject: str) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and (kind is Exception or not isinstance(error, (Exception, *CONTROL_FLOW))):
            raise Internal(f"{self._subject}: {describe_panic(error)}") from error


def describe_panic(error: BaseException) -> str:
    """The error's text, with its class unless that is `Exception`, shortened."""
    description = str(error) if type(error) is Exception else f"{type(error).__name__}: {error}"
    return description[:_LONGEST_REASON]
