"""What a process says beside its answers: a child's messages and its log, which the parent keeps, and stderr, which
may be a pipe that nothing reads.
"""

import logging
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Thread
from typing import Generic, TypeVar

import msgspec

_STDERR = 2


def write_stderr(text: str, after: Thread | None = None) -> Thread:
    """Write text to stderr in a thread, which a pipe without a reader may hold for ever, and past Python's own buffer,
    whose lock that thread would take along. It waits for the end of `after`."""

    def write() -> None:
        if after is not None:
            after.join()
        os.write(_STDERR, text.encode(errors="backslashreplace"))

    writing = Thread(target=write, daemon=True)
    writing.start()
    return writing


class FileOutage:
    """The outage of a file to which `things` are written, such as traces: told once, with the number lost at its
    end."""

    def __init__(self, things: str) -> None:
        self._things = things
        self._file = ""
        self._telling: Thread | None = None

    def report_failure(self, file: str, error: OSError | ValueError) -> None:
        """The file cannot be written; said the first time."""
        if not self._file:
            reason = getattr(error, "strerror", None) or error
            text = f"charonia: cannot write {self._things} to {file}: {reason}\n"
            self._telling = write_stderr(text, self._telling)
        self._file = file

    def report_recovery(self, lost: int, timeout: float = 0) -> None:
        """The file can be written again, or nothing more is to come; silent where there was no outage.
        `timeout`: seconds to wait until all that was said is read from a pipe."""
        if self._file:
            text = f"charonia: {lost} {self._things} are lost: {self._file} could not be written\n"
            self._telling = write_stderr(text, self._telling)
        self._file = ""
        if self._telling is not None:
            self._telling.join(timeout)


T = TypeVar("T")


class LogRecordMessage(msgspec.Struct, array_like=True, tag="log", frozen=True):
    """One record of a child's log: the name of its logger, its level, its text."""

    logger: str
    level: int
    text: str

    def log_here(self, origin: str = "") -> None:
        """Log it in this process; `origin` names the child in the text."""
        text = f"{origin}: {self.text}" if origin else self.text
        logging.getLogger(self.logger).log(self.level, "%s", text)


class LogForwarder(logging.Handler):
    """Hands every record of this process to `send`, which may be called from any thread and may raise `closed` when the
    parent does not read any more."""

    def __init__(self, send: Callable[[LogRecordMessage], None], closed: type[Exception] = OSError) -> None:
        super().__init__()
        self._send = send
        self._closed = closed

    def install(self, level: int) -> None:
        """Forward this process's log from `level` on, and the warnings of Python."""
        logging.basicConfig(level=level, handlers=[self], format="%(message)s")
        logging.captureWarnings(True)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(LogRecordMessage(record.name, record.levelno, self.format(record)))
        except self._closed:
            return


class MessageWriter(Generic[T]):
    """Sends messages over a connection, by default as msgpack; for any thread."""

    def __init__(self, connection: Connection, encode: Callable[[T], bytes] = msgspec.msgpack.encode) -> None:
        self._connection = connection
        self._encode = encode
        self._lock = threading.RLock()  # garbage collected in the midst of it may have something to log

    def send(self, message: T) -> None:
        """Raises `OSError` when nothing reads the other end."""
        with self._lock:
            self._connection.send_bytes(self._encode(message))
