"""Messages of a child to its parent: an encoder over a connection, and the child's log, which the parent keeps.

A child's own stderr may be a pipe that nothing reads.
"""

import logging
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import msgspec

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
