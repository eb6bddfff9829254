"""The output and error files of a batch while it runs: a line for each request that has ended.

A line's id ends with its request's number in the input file, so the files say what is left. Half a line of a process
that died is cut off; its request runs again. Everything blocks: call it in a thread.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import orjson

from ...api.http.error_responses import printable
from .store import write_failed

_READ_BYTES = 1 << 20
_NUMBER_DIGITS = 8


_NULL = b"null"


class _JournalLine(msgspec.Struct, frozen=True):
    id: str
    response: msgspec.Raw


class LineOutcome(NamedTuple):
    """How one request ended: an answer, of whatever status, whose `body` is JSON; or, without a status, an error that
    kept it from being asked. `warning`: of the answer."""

    status: int = 0
    request_id: str = ""
    body: bytes = b""
    code: str = ""
    message: str = ""
    warning: str = ""

    @property
    def succeeded(self) -> bool:
        return 200 <= self.status < 300


def line_id(batch_id: str, index: int) -> str:
    """The id of a request in the output: unguessable as the batch's own is, and telling the request's number."""
    return f"batch_req_{batch_id.removeprefix('batch_')[:24]}{index:0{_NUMBER_DIGITS}x}"


def encode_outcome(batch_id: str, index: int, custom_id: str, outcome: LineOutcome) -> bytes:
    """The line of an output or error file; the answer's body goes in as it is, without its line breaks."""
    head = orjson.dumps({"id": line_id(batch_id, index), "custom_id": custom_id})[:-1]
    if not outcome.status:
        error = orjson.dumps({"code": outcome.code, "message": outcome.message})
        return head + b',"response":null,"error":' + error + b"}\n"
    body = (outcome.body or b"null").replace(b"\r", b" ").replace(b"\n", b" ")  # within strings JSON has them escaped
    warning = {"warning": printable(outcome.warning)} if outcome.warning else {}
    response = orjson.dumps({"status_code": outcome.status, "request_id": outcome.request_id, **warning})[:-1]
    return head + b',"response":' + response + b',"body":' + body + b'},"error":null}\n'


class Journal:
    """One file that lines are appended to. `size`: bytes of whole lines; `count`: those that have an answer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = self.count = 0

    def recover(self) -> Sequence[int]:
        """Read what is there, cut off what is no whole line, and return the numbers of the requests.

        Raises:
            StorageFull: the disk refuses it.
        """
        numbers: list[int] = []
        self.size = self.count = 0
        try:
            if not self.path.exists():
                return numbers
            with self.path.open("r+b", buffering=_READ_BYTES) as file:
                for text in file:
                    try:
                        line = msgspec.json.decode(text, type=_JournalLine)
                        number = int(line.id[-_NUMBER_DIGITS:], 16)
                    except (ValueError, RecursionError):
                        break
                    if not text.endswith(b"\n"):
                        break
                    numbers.append(number)
                    self.size += len(text)
                    self.count += bytes(line.response) != _NULL
                file.truncate(self.size)
        except OSError as error:
            raise write_failed(error) from None
        return numbers

    def append(self, lines: bytes, answers: int = 1) -> None:
        """Add whole lines, or nothing; so many of them are answers.

        Raises:
            StorageFull: the disk refuses it.
        """
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                rest = memoryview(lines)
                at = self.size
                while rest:
                    written = os.pwrite(descriptor, rest, at)
                    rest = rest[written:]
                    at += written
            except OSError:
                os.ftruncate(descriptor, self.size)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise write_failed(error) from None
        self.size += len(lines)
        self.count += answers

    def sync(self) -> bool:
        """Let all lines survive a loss of power; whether there are any.

        Raises:
            StorageFull: the disk refuses it.
        """
        if not self.size:
            self.path.unlink(missing_ok=True)
            return False
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise write_failed(error) from None
        return True
