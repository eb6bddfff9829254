"""Lines of the log on their way to a stream: put into words by whoever logs, written by a thread of their own.

A pipe that nobody reads stops nobody and costs a bounded amount of memory: what finds no room is counted, and told in a
line once the pipe moves again. A file that cannot be written is told of on stderr. Knows nothing of settings and forms.
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
"""Seconds that a record of a request may wait for others to be written with: each time, the thread that writes stands
in the way of what makes them."""

_MAX_WAITING_CHARACTERS = 1 << 22
"""Characters that may stand in line: half a minute of busy traffic."""

_CLOSE_SECONDS = 1.0
"""Seconds that writing may take at the end."""

_LOST_LINES_MESSAGE = "%d lines of the log are lost: they could not be written, or not quickly enough"


class LogWriter(logging.Handler):
    """Never waits for the stream. `most`: characters that may wait to be written; beyond them the newest go. `file`:
    where the stream was opened to append, if it was; it is opened anew if another file, or none, is there by now, as
    logrotate and `rm` leave it, and closed at the end.

    Did the thread put records into words, it would stand in the way of what makes them. All that is locked may be
    locked once more: garbage that is collected in the midst of it may have something to say, too.
    """

    def __init__(self, stream: TextIO, most: int = _MAX_WAITING_CHARACTERS, file: str = "") -> None:
        super().__init__()
        self._stream = stream
        self._file = file
        self._outage = FileOutage("lines of the log")
        self._most = most
        self._guard = RLock()
        self._lines: list[str] = []
        self._size = 0
        self._lost = 0
        self._waking = self._hurrying = False
        self._wakes: SimpleQueue[Event | None] = SimpleQueue()
        """An event asks to write at once and is set afterwards; None may wait a moment."""
        self._stopping, self._stopped = False, Event()
        Thread(target=self._live, name="log", daemon=True).start()

    def handle(self, record: logging.LogRecord) -> bool:
        if not self.filter(record):
            return False
        try:
            line = self.format(record) + "\n"
        except Exception:
            self.handleError(record)
        else:
            self._put(line)
            self._wake(at_once=type(record) is not RequestLogRecord)
        return True

    def _put(self, line: str) -> None:
        with self._guard:
            # Where one was lost the next ones are, too, until there is much room: the gap is told of once.
            if self._lost or self._size + len(line) > self._most:
                self._lost += 1
            else:
                self._lines.append(line)
                self._size += len(line)

    def _wake(self, at_once: bool) -> None:
        """Once is enough."""
        if at_once and not self._hurrying:
            self._waking = self._hurrying = True
            self._wakes.put(Event())
        elif not self._waking:
            self._waking = True
            self._wakes.put(None)

    def flush(self) -> None:
        """Return when everything is written, or does not get on."""
        if not self._stopping:  # later there is nothing to wait for, and logging asks at the interpreter's end
            self._reach(Event())

    def stop(self) -> bool:
        """Write the lines that wait, and stop. False: the pipe is not read, and writing to it would wait."""
        self._stopping = True
        return self._reach(self._stopped)

    def _reach(self, written: Event) -> bool:
        self._wakes.put(written)
        return written.wait(_CLOSE_SECONDS)

    def _live(self) -> None:
        while not self._stopped.is_set():
            wakes = [self._wakes.get()]
            if wakes == [None]:
                with suppress(Empty):
                    wakes.append(self._wakes.get(timeout=_BATCHING_SECONDS))
            self._write_all()
            if self._stopping and self._stopped in wakes:
                self._close()
            for wake in wakes:
                if wake is not None:
                    wake.set()

    def _write_all(self) -> None:
        """Everything that came in a moment, together."""
        self._waking = self._hurrying = False  # whoever comes from here on wakes again
        with self._guard:
            lines, self._lines = self._lines, []
            lost, self._lost = self._lost, 0
        text = "".join(lines)
        written = self._write(text + self._told(lost))
        if written:
            self._outage.report_recovery(lost)
        with self._guard:
            self._size -= len(text)
            if not written:
                self._lost += lost + len(lines)

    def _close(self) -> None:
        self._outage.report_recovery(self._lost, _CLOSE_SECONDS)
        if self._file:
            self._stream.close()

    def _told(self, lost: int) -> str:
        if not lost:
            return ""
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, _LOST_LINES_MESSAGE, (lost,), None)
        return self.format(record) + "\n"

    def _write(self, text: str) -> bool:
        """Whether the text was written."""
        try:
            if self._file:
                self._stream = _reopened_if_moved(self._stream, self._file)
            _write(self._stream, text)
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


def _write(stream: TextIO, text: str) -> None:
    """Past the stream's buffer where it has a file below: Python dies at its end if a thread still waits in there."""
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
