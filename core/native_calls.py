"""Calls into native libraries: a panic of one written in Rust is no `Exception`, and ends what does not expect it."""

import asyncio
from types import TracebackType

from .errors import Internal

CONTROL_FLOW = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""What is no `Exception` and means that the code which it passes through is to end. Anything else is a fault."""

_LONGEST_REASON = 512


class NativeCall:
    """A block in which a library is called. `subject` begins the message of the `Internal` that a panic becomes, as in
    "the tokenizer failed", and an error of no class of its own; errors of other kinds pass."""

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
    """What an error says, and its kind where that tells something, cut to a length that a message may have."""
    told = str(error) if type(error) is Exception else f"{type(error).__name__}: {error}"
    return told[:_LONGEST_REASON]
