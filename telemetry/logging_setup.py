"""The logging of this process: settings, handlers, levels and formats.

Another thread writes the lines, so that a pipe without a reader blocks nothing: lines without room are counted and
reported later. A file that cannot be written is reported on stderr.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, RLock, Thread
from typing import Literal, TextIO, TypeAlias

import msgspec

from ..core.errors import InvalidArgument, Unsupported
from ..processes.log_forwarding import FileOutage
from .request_log import LoggedRequests, RequestLogRecord, request_filter, request_log_fields, request_log_line
from .request_log import log as request_log

_BATCHING_SECONDS = 0.2
"""Seconds that a request's record may wait for others, since each write delays the event loop."""

_MAX_WAITING_CHARACTERS = 1 << 22
"""The most characters that wait: half a minute of busy traffic."""

_CLOSE_SECONDS = 1.0
"""The most seconds that writing may take at the end."""

_LOST_LINES_MESSAGE = "%d lines of the log are lost: they could not be written, or not quickly enough"


class LogWriter(logging.Handler):
    """A handler that never waits for its stream; at most `most` characters wait, newer lines are lost. A `file` that is
    no longer at its path, as after logrotate, is opened anew; it is closed at the end."""

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
        """An event asks for an immediate write, and is set afterwards; None may wait a moment."""
        self._stopping = False
        self._stopped = Event()
        Thread(target=self._run, name="log", daemon=True).start()

    def handle(self, record: logging.LogRecord) -> bool:
        if not self.filter(record):
            return False
        try:
            line = self.format(record) + "\n"
        except Exception:
            self.handleError(record)
            return True
        if type(record) is not RequestLogRecord:
            self.write_lines(line)
            return True
        self._keep(line)
        if not self._waking:
            self._waking = True
            self._wakes.put(None)
        return True

    def write_lines(self, text: str) -> None:
        """Write lines as they are, without waiting for others."""
        self._keep(text)
        if not self._hurrying:
            self._waking = self._hurrying = True
            self._wakes.put(Event())

    def _keep(self, text: str) -> None:
        with self._guard:
            # Where one was lost the next ones are, too, until there is much room: the gap is reported once.
            if self._lost or self._size + len(text) > self._most:
                self._lost += 1
            else:
                self._lines.append(text)
                self._size += len(text)

    def flush(self) -> None:
        """Return when everything is written, or writing stands still."""
        if not self._stopping:  # later there is nothing to wait for, and logging asks at the interpreter's end
            self._wake_and_wait(Event())

    def stop(self) -> bool:
        """Write the waiting lines and stop. False if writing to the pipe would wait."""
        self._stopping = True
        return self._wake_and_wait(self._stopped)

    def _wake_and_wait(self, done: Event) -> bool:
        self._wakes.put(done)
        return done.wait(_CLOSE_SECONDS)

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
        succeeded = self._write(notice)
        if succeeded and self._outage.file:
            self._outage.report_recovery(lost)
        with self._guard:
            self._size -= len(text)
            if not succeeded:
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
    """Write past the stream's buffer if it has a file: Python aborts at exit if a thread waits in the buffer."""
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


LogFormat: TypeAlias = Literal["default", "ISO8601", "json"]


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The settings of Triton's logging extension, in its order. Clients may change all but `log_file`, which is empty
    for stderr.

    Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_logging.md
    """

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: LogFormat = "default"


def parse_log_format(name: str, setting: str = "log_format") -> LogFormat:
    """The format of that name; `setting` names it in the error.

    Raises:
        InvalidArgument: there is no such format.
    """
    formats: dict[str, LogFormat] = {"default": "default", "ISO8601": "ISO8601", "json": "json"}
    if name not in formats:
        raise InvalidArgument(f"invalid argument for {setting}, got: {name}", field="log_format")
    return formats[name]


class LogControl:
    """The log settings of the server, and the function that applies them."""

    def __init__(
        self, settings: LogSettings = LogSettings(), apply: Callable[[LogSettings], None] = lambda settings: None
    ) -> None:
        self.settings = settings
        self._apply = apply

    def update(self, settings: LogSettings) -> LogSettings:
        """Apply new settings.

        Raises:
            Unsupported: they name another file.
        """
        if settings.log_file != self.settings.log_file:
            raise Unsupported("log file location can not be updated through network protocol", field="log_file")
        self._apply(settings)
        self.settings = settings
        return settings


_STANDARD_ATTRIBUTES = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}
"""Attributes of every log record, or that a line has under another name; uvicorn repeats its message in colours."""

_LINE = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
_TIMES = {"default": "%m%d %H:%M:%S", "ISO8601": "%Y-%m-%dT%H:%M:%S%z"}


@contextmanager
def configured_logging(settings: LogSettings, requests: LoggedRequests = "all") -> Iterator[LogControl]:
    """Log to stderr or a file within the block, and write waiting lines at its end. A program's own logging handlers
    stay. Ended `requests` are logged.

    Raises:
        InvalidArgument: the file cannot be written.
    """
    file = settings.log_file
    with _open_log(file) as stream, logging_to(stream, settings, file, requests) as control:
        yield control


@contextmanager
def logging_to(
    stream: TextIO, settings: LogSettings, file: str = "", requests: LoggedRequests = "all"
) -> Iterator[LogControl]:
    """As `configured_logging`, to a stream, which may be that of `file`."""
    writer = LogWriter(stream, file=file)
    logging.basicConfig(level=logging.WARNING, handlers=[writer])
    apply_log_settings(settings)
    before, request_filter.requests = request_filter.requests, requests
    try:
        yield LogControl(settings, apply_log_settings)
    finally:
        request_filter.requests = before
        # Records that come later go to stderr, unless writing there would wait for ever.
        after: logging.Handler = logging.StreamHandler(sys.stderr) if writer.stop() else logging.NullHandler()
        after.setFormatter(writer.formatter)
        after.filters = writer.filters
        root = logging.getLogger()
        root.handlers = [after if handler is writer else handler for handler in root.handlers]


def _open_log(file: str) -> AbstractContextManager[TextIO]:
    if not file:
        return nullcontext(sys.stderr)
    try:
        return Path(file).open("a", encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"--log-file {file} cannot be written: {error.strerror}") from None


def apply_log_settings(settings: LogSettings) -> None:
    """Apply `settings` to the handlers and loggers of this process."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(log_formatter(settings.log_format))
        handler.filters = [_level_filter(settings)]
    verbose = settings.log_verbose_level > 0
    logging.getLogger("charonia").setLevel(logging.DEBUG if verbose else logging.INFO)
    # Records of requests that no handler lets pass are not even made.
    request_log.setLevel(logging.NOTSET if settings.log_info else logging.WARNING)
    # It logs every connection, and its own start and stop, which are logged elsewhere.
    logging.getLogger("uvicorn").setLevel(logging.INFO if verbose else logging.WARNING)


def write_lines(text: str) -> None:
    """Write lines that another process has formatted to this process's log."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogWriter):
            handler.write_lines(text)


def log_formatter(name: LogFormat) -> logging.Formatter:
    return JsonFormatter() if name == "json" else LineFormatter(_LINE, _TIMES[name])


class _CachedTime:
    """The time of a record in a format of `time.strftime`, computed once a second."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._last = (-1, "")

    def __call__(self, record: logging.LogRecord) -> str:
        second, text = self._last
        if int(record.created) != second:
            second = int(record.created)
            text = time.strftime(self._pattern, time.localtime(record.created))
            self._last = (second, text)
        return text


class LineFormatter(logging.Formatter):
    """The standard formatter, but fast for records of requests."""

    def __init__(self, line: str, times: str) -> None:
        super().__init__(line, times)
        self._clock = _CachedTime(times)

    def format(self, record: logging.LogRecord) -> str:
        if type(record) is RequestLogRecord:
            return f"{self._clock(record)} I {record.name}: {request_log_line(record.context)}"
        return super().format(record)


def _level_filter(settings: LogSettings) -> Callable[[logging.LogRecord], bool]:
    """Passes the records whose levels are on."""
    levels = {
        logging.INFO: settings.log_info,
        logging.WARNING: settings.log_warning,
        logging.ERROR: settings.log_error,
        logging.CRITICAL: settings.log_error,
    }
    return lambda record: levels.get(record.levelno, True)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the fields of `extra`."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = _CachedTime("%Y-%m-%dT%H:%M:%S%z")

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"time": self._clock(record), "level": record.levelname, "logger": record.name}
        if type(record) is RequestLogRecord:
            line |= {"message": request_log_line(record.context), **request_log_fields(record.context).known()}
            return msgspec.json.encode(line).decode()
        line["message"] = record.getMessage()
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
