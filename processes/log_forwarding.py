"""A process's log and messages: a child's go to its parent, stderr may be a pipe without a reader."""

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
    """Write text to stderr in a thread, after the end of `after`. A pipe without a reader may hold the thread forever,
    so it bypasses Python's buffer and its lock."""

    def write() -> None:
        if after is not None:
            after.join()
        os.write(_STDERR, text.encode(errors="backslashreplace"))

    writing = Thread(target=write, daemon=True)
    writing.start()
    return writing


class FileOutage:
    """Reports the outage of a file to which `things`, such as traces, are written: once at the beginning, and with the
    number lost at the end."""

    def __init__(self, things: str) -> None:
        self._things = things
        self.file = ""
        """The file that cannot be written, during an outage."""
        self._telling: Thread | None = None

    def report_failure(self, file: str, error: OSError | ValueError) -> None:
        """Report the first failure to write the file."""
        if not self.file:
            reason = getattr(error, "strerror", None) or error
            text = f"charonia: cannot write {self._things} to {file}: {reason}\n"
            self._telling = write_stderr(text, self._telling)
        self.file = file

    def report_recovery(self, lost: int, timeout: float = 0) -> None:
        """Report the end of an outage, if there was one. Waits at most `timeout` seconds until a pipe's reader has
        taken all reports."""
        if self.file:
            text = f"charonia: {lost} {self._things} are lost: {self.file} could not be written\n"
            self._telling = write_stderr(text, self._telling)
        self.file = ""
        if self._telling is not None:
            self._telling.join(timeout)


T = TypeVar("T")


class LogRecordMessage(msgspec.Struct, array_like=True, tag="log", frozen=True):
    logger: str
    level: int
    text: str

    def log_here(self, origin: str = "") -> None:
        """Log it in this process; `origin` names the child in the text."""
        text = f"{origin}: {self.text}" if origin else self.text
        logging.getLogger(self.logger).log(self.level, "%s", text)


class LogForwarder(logging.Handler):
    """Passes every record of this process to `send`, which must accept calls from any thread and may raise `closed`
    once the parent reads no more."""

    def __init__(self, send: Callable[[LogRecordMessage], None], closed: type[Exception] = OSError) -> None:
        super().__init__()
        self._send = send
        self._closed = closed

    def install(self, level: int) -> None:
        """Forward this process's log from `level` on, and Python's warnings."""
        logging.basicConfig(level=level, handlers=[self], format="%(message)s")
        logging.captureWarnings(True)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(LogRecordMessage(record.name, record.levelno, self.format(record)))
        except self._closed:
            return


class MessageWriter(Generic[T]):
    """Sends messages over a connection, by default as msgpack, from any thread."""

    def __init__(self, connection: Connection, encode: Callable[[T], bytes] = msgspec.msgpack.encode) -> None:
        self._connection = connection
        self._encode = encode
        self._lock = threading.RLock()  # garbage collected in the midst of it may have something to log

    def send(self, message: T) -> None:
        """Raises `OSError` when nothing reads the other end."""
        with self._lock:
            self._connection.send_bytes(self._encode(message))
