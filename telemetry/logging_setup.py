"""The logging of this process: handlers and levels for given settings, and the formats of a line."""

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

import msgspec

from ..core.errors import InvalidArgument
from .log_settings import LogControl, LogFormat, LogSettings
from .log_writer import LogWriter
from .request_log import RequestLogRecord

_STANDARD_ATTRIBUTES = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}
"""Attributes that every log record has, or that a line has under another name; uvicorn repeats its message in
colours."""

_LINE = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
_TIMES = {"default": "%m%d %H:%M:%S", "ISO8601": "%Y-%m-%dT%H:%M:%S%z"}


@contextmanager
def configured_logging(settings: LogSettings) -> Iterator[LogControl]:
    """Set logging up for the block, to stderr or a file, and let it be changed there; what still stands in line is
    written at its end, if somebody reads it. A program that has set logging up itself keeps its handlers.

    Raises:
        InvalidArgument: the file cannot be written.
    """
    with _open_log(settings.log_file) as stream:
        lines = LogWriter(stream, file=settings.log_file)
        logging.basicConfig(level=logging.WARNING, handlers=[lines])
        apply_log_settings(settings)
        try:
            yield LogControl(settings, apply_log_settings)
        finally:
            _replace_by_stderr(lines)


def _replace_by_stderr(lines: LogWriter) -> None:
    """Let stderr have the records that come after the writer's end, unless writing there would wait for ever."""
    after: logging.Handler = logging.StreamHandler(sys.stderr) if lines.stop() else logging.NullHandler()
    after.setFormatter(lines.formatter)
    after.filters = lines.filters
    root = logging.getLogger()
    root.handlers = [after if handler is lines else handler for handler in root.handlers]


def _open_log(file: str) -> AbstractContextManager[TextIO]:
    if not file:
        return nullcontext(sys.stderr)
    try:
        return Path(file).open("a", encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"--log-file {file} cannot be written: {error.strerror}") from None


def apply_log_settings(settings: LogSettings) -> None:
    """Make the handlers and loggers of this process do so."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(log_formatter(settings.log_format))
        handler.filters = [_LevelFilter(settings)]
    verbose = settings.log_verbose_level > 0
    logging.getLogger("charonia").setLevel(logging.DEBUG if verbose else logging.INFO)
    # Nobody would see them: then they are not even made.
    logging.getLogger("charonia.requests").setLevel(logging.NOTSET if settings.log_info else logging.WARNING)
    # It tells of every connection and of its own start and stop, which are told elsewhere.
    logging.getLogger("uvicorn").setLevel(logging.INFO if verbose else logging.WARNING)


def log_formatter(form: LogFormat) -> logging.Formatter:
    return JsonFormatter() if form == "json" else LineFormatter(_LINE, _TIMES[form])


class _CachedTime:
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
    """The standard formatter, but quick with the records that end requests."""

    def __init__(self, line: str, times: str) -> None:
        super().__init__(line, times)
        self._clock = _CachedTime(times)

    def format(self, record: logging.LogRecord) -> str:
        if type(record) is RequestLogRecord:
            return f"{self._clock(record)} I {record.name}: {record.line()}"
        return super().format(record)


class _LevelFilter(logging.Filter):
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
        self._clock = _CachedTime("%Y-%m-%dT%H:%M:%S%z")

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"time": self._clock(record), "level": record.levelname, "logger": record.name}
        if type(record) is RequestLogRecord:
            line |= {"message": record.line(), **record.fields()}
            return msgspec.json.encode(line).decode()
        line["message"] = record.getMessage()
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
