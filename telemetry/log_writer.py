"""The log's lines on their way to a stream: formatted by the thread that logs, written by a thread of their own.

A pipe that is not read stops no thread and costs a bounded amount of memory: lines that find no room are counted, and
the count is logged once the pipe moves again. A file that cannot be written is reported on stderr.
"""

import logging
import os
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, RLock, Thread
from typing import TextIO

from ..processes.stderr import FileOutage
from .request_log import RequestLogRecord

_BATCHING_SECONDS = 0.2
"""Seconds that a request's record may wait to be written with others: writing delays the event loop each time."""

_MAX_WAITING_CHARACTERS = 1 << 22
"""Characters that may stand in line: half a minute of busy traffic."""

_CLOSE_SECONDS = 1.0
"""Seconds that writing may take at the end."""

_LOST_LINES_MESSAGE = "%d lines of the log are lost: they could not be written, or not quickly enough"


class LogWriter(logging.Handler):
    """Never waits for the stream. `most`: characters that may wait to be written; beyond them the newest go. `file`:
    where the stream was opened to append, if it was; it is opened anew if another file, or none, is there by now, as
    logrotate and `rm` leave it, and closed at the end."""

    def __init__(self, stream: TextIO, most: int = _MAX_WAITING_CHARACTERS, file: str = "") -> None:
        super().__init__()
        self._stream = stream
        self._file = file
        self._outage = FileOutage("lines of the log")
        self._most = most
        self._guard = RLock()  # garbage that is collected while it is held may log, too
        self._lines: list[str] = []
        self._size = 0
        self._lost = 0
        self._waking = self._hurrying = False
        self._wakes: SimpleQueue[Event | None] = SimpleQueue()
        """An event asks to write at once and is set afterwards; None may wait a moment."""
        self._stopping, self._stopped = False, Event()
        Thread(target=self._run, name="log", daemon=True).start()

    def handle(self, record: logging.LogRecord) -> bool:
        if not self.filter(record):
            return False
        try:
            line = self.format(record) + "\n"
        except Exception:
            self.handleError(record)
            return True
        with self._guard:
            # Where one was lost the next ones are, too, until there is much room: the gap is reported once.
            if self._lost or self._size + len(line) > self._most:
                self._lost += 1
            else:
                self._lines.append(line)
                self._size += len(line)
        if type(record) is not RequestLogRecord and not self._hurrying:
            self._waking = self._hurrying = True
            self._wakes.put(Event())
        elif not self._waking:
            self._waking = True
            self._wakes.put(None)
        return True

    def flush(self) -> None:
        """Return when everything is written, or writing stands still."""
        if not self._stopping:  # later there is nothing to wait for, and logging asks at the interpreter's end
            self._wake_and_wait(Event())

    def stop(self) -> bool:
        """Write the lines that wait, and stop. False: the pipe is not read, and writing to it would wait."""
        self._stopping = True
        return self._wake_and_wait(self._stopped)

    def _wake_and_wait(self, written: Event) -> bool:
        self._wakes.put(written)
        return written.wait(_CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._stopped.is_set():
            wakes = [self._wakes.get()]
            if wakes == [None]:
                with suppress(Empty):
                    wakes.append(self._wakes.get(timeout=_BATCHING_SECONDS))
            self._write_all()
            if self._stopping and self._stopped in wakes:
                self._outage.report_recovery(self._lost, _CLOSE_SECONDS)
                if self._file:
                    self._stream.close()
            for wake in wakes:
                if wake is not None:
                    wake.set()

    def _write_all(self) -> None:
        self._waking = self._hurrying = False  # a record that comes from here on wakes the thread again
        with self._guard:
            lines, self._lines = self._lines, []
            lost, self._lost = self._lost, 0
        text = notice = "".join(lines)
        if lost:
            record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, _LOST_LINES_MESSAGE, (lost,), None)
            notice += self.format(record) + "\n"
        written = self._write(notice)
        if written:
            self._outage.report_recovery(lost)
        with self._guard:
            self._size -= len(text)
            if not written:
                self._lost += lost + len(lines)

    def _write(self, text: str) -> bool:
        """Whether the text was written."""
        try:
            if self._file:
                self._stream = _reopened_if_moved(self._stream, self._file)
            _write_unbuffered(self._stream, text)
        except (OSError, ValueError) as error:  # no room on the disk; or the pipe's other end, or the stream, is closed
            if self._file:
                self._outage.report_failure(self._file, error)
            return False
        return True


def _reopened_if_moved(stream: TextIO, file: str) -> TextIO:
    """The stream, or one of the file that is at its path now."""
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(stream.fileno()), os.stat(file)):
            return stream
    opened = open(file, "a", encoding="utf-8")  # noqa: SIM115
    stream.close()
    return opened


def _write_unbuffered(stream: TextIO, text: str) -> None:
    """Write past the stream's buffer where it has a file below: Python aborts at exit if a thread still waits in it."""
    number = None
    with suppress(OSError):  # what only looks like a file says so
        number = stream.fileno()
    if number is None:
        stream.write(text)
        stream.flush()
        return
    data = memoryview(text.encode(stream.encoding, "backslashreplace"))
    while data:
        data = data[os.write(number, data) :]
