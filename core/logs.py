"""How log records are written: their form, and away from the event loop those that end requests."""

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, TextIO, TypeAlias

import msgspec

from .errors import InvalidArgument
from .log_settings import Form, Logs, LogSettings
from .records import Entry

_LEFT_OUT = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}
"""What every record has, or is written under another name; and uvicorn's message once more, in colours."""

_MOMENT = 0.2
"""Seconds that a record may wait for others to be written with: each time, the thread that writes stands in the way of
what makes them."""

_LINE = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
_TIMES = {"default": "%m%d %H:%M:%S", "ISO8601": "%Y-%m-%dT%H:%M:%S%z"}


@contextmanager
def logging_as(settings: LogSettings) -> Iterator[Logs]:
    """Set logging up for the block, to stderr or a file, and let it be changed there; records that end requests and
    still stand in line are written at its end.

    Raises:
        InvalidArgument: the file cannot be written.
    """
    with _opened(settings.log_file) as stream:
        logging.basicConfig(level=logging.WARNING, stream=stream)
        apply(settings)
        lines = Lines(logging.getLogger("charonia.requests"))
        try:
            yield Logs(settings, apply)
        finally:
            lines.stop()
            _turn_from(stream)


def _turn_from(stream: TextIO) -> None:
    """It is about to be closed, and there may still be something to say."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
            handler.setStream(sys.stderr)


def _opened(file: str) -> AbstractContextManager[TextIO]:
    if not file:
        return nullcontext(sys.stderr)
    try:
        return Path(file).open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise InvalidArgument(f"--log-file {file} cannot be written: {error.strerror}") from None


def apply(settings: LogSettings) -> None:
    """Make the handlers and loggers of this process do so."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter(settings.log_format))
        handler.filters = [_Wanted(settings)]
    verbose = settings.log_verbose_level > 0
    logging.getLogger("charonia").setLevel(logging.DEBUG if verbose else logging.INFO)
    # Nobody would see them: then they are not even made.
    logging.getLogger("charonia.requests").setLevel(logging.NOTSET if settings.log_info else logging.WARNING)
    # It tells of every connection and of its own start and stop, which are told elsewhere.
    logging.getLogger("uvicorn").setLevel(logging.INFO if verbose else logging.WARNING)


def formatter(form: Form) -> logging.Formatter:
    return JsonFormatter() if form == "json" else LineFormatter(_LINE, _TIMES[form])


class _Clock:
    """Times of records in the form of `time.strftime`, which change once a second."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._last = (-1, "")

    def __call__(self, record: logging.LogRecord) -> str:
        second, text = self._last
        if int(record.created) != second:
            second, text = int(record.created), time.strftime(self._form, time.localtime(record.created))
            self._last = (second, text)
        return text


class LineFormatter(logging.Formatter):
    """As logging's own, but quick with the records that end requests."""

    def __init__(self, line: str, times: str) -> None:
        super().__init__(line, times)
        self._clock = _Clock(times)

    def format(self, record: logging.LogRecord) -> str:
        if type(record) is Entry:
            return f"{self._clock(record)} I {record.name}: {record.words()}"
        return super().format(record)


class _Wanted(logging.Filter):
    """Lets pass the levels that the settings want to see."""

    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        levels = {
            logging.INFO: settings.log_info,
            logging.WARNING: settings.log_warning,
            logging.ERROR: settings.log_error,
            logging.CRITICAL: settings.log_error,
        }
        self._unwanted = frozenset(level for level, wanted in levels.items() if not wanted)

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno not in self._unwanted


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and every field that came as `extra`."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = _Clock("%Y-%m-%dT%H:%M:%S%z")

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"time": self._clock(record), "level": record.levelname, "logger": record.name}
        if type(record) is Entry:
            line |= {"message": record.words(), **record.fields()}
            return msgspec.json.encode(line).decode()
        line["message"] = record.getMessage()
        line |= {name: value for name, value in vars(record).items() if name not in _LEFT_OUT}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


_Line: TypeAlias = "tuple[logging.StreamHandler[Any], str]"


class Lines(logging.Handler):
    """Puts what `logger` records into words at once, as the root's handlers would, and leaves the writing to a thread,
    until `stop`: a pipe that nobody reads stops no request. Did the thread put them into words, it would stand in the
    way of what makes them."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger
        self._handlers = logging.getLogger().handlers
        self._lines: SimpleQueue[_Line | None] = SimpleQueue()
        self._stopping = Event()
        self._thread = Thread(target=self._live, name="request-log", daemon=True)
        self._thread.start()
        logger.addHandler(self)
        logger.propagate = False

    def handle(self, record: logging.LogRecord) -> bool:
        for handler in self._handlers:
            if type(handler) is not logging.StreamHandler:
                handler.handle(record)
            elif handler.filter(record):
                self._keep(handler, record)
        return True

    def _keep(self, handler: "logging.StreamHandler[Any]", record: logging.LogRecord) -> None:
        try:
            line = handler.format(record) + handler.terminator
        except Exception:
            handler.handleError(record)
        else:
            self._lines.put((handler, line))

    def _live(self) -> None:
        """Write what came in a moment all together."""
        while not self._stopping.is_set() and (first := self._lines.get()) is not None:
            self._stopping.wait(_MOMENT)
            self._write([first, *self._waiting()])

    def stop(self) -> None:
        """Return when everything is written; what comes later is written by who makes it."""
        self._logger.removeHandler(self)
        self._logger.propagate = True
        self._stopping.set()
        self._lines.put(None)
        self._thread.join()
        self._write([*self._waiting()])

    def _waiting(self) -> "Iterator[_Line]":
        with suppress(Empty):
            while (line := self._lines.get_nowait()) is not None:
                yield line

    def _write(self, lines: "list[_Line]") -> None:
        for handler in {handler for handler, _ in lines}:
            text = "".join([line for whose, line in lines if whose is handler])
            with handler.lock or nullcontext(), suppress(OSError):  # nobody reads it any more
                handler.stream.write(text)
                handler.stream.flush()
