"""How log records are written: their form, and away from the event loop those that end requests."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from threading import Event
from typing import Any

from .log_settings import Form, Logs, LogSettings

_LEFT_OUT = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}
"""What every record has, or is written under another name; and uvicorn's message once more, in colours."""

_MOMENT = 0.05
"""Seconds that a record may wait for others to be written with."""

_LINE = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
_TIMES = {"default": "%m%d %H:%M:%S", "ISO8601": "%Y-%m-%dT%H:%M:%S%z"}


@contextmanager
def logging_as(settings: LogSettings) -> Iterator[Logs]:
    """Set logging up for the block, to stderr, and let it be changed there; records that end requests and still stand
    in line are written at its end."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    apply(settings)
    listener = write_in_thread(logging.getLogger("charonia.requests"))
    try:
        yield Logs(settings, apply)
    finally:
        listener.stop()


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
    return JsonFormatter() if form == "json" else logging.Formatter(_LINE, _TIMES[form])


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

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _LEFT_OUT}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Handover(QueueHandler):
    """Hands records over as they are: theirs hold nothing that changes."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record


class _Writer(QueueListener):
    """Writes what came in a moment all together: a thread that woke up for each record would stand in the way of what
    makes them."""

    def __init__(self, records: "SimpleQueue[logging.LogRecord]", *handlers: logging.Handler) -> None:
        super().__init__(records, *handlers)
        self._records = records
        self._stopping = Event()
        self._lines: dict[logging.StreamHandler[Any], list[str]] = {}

    def dequeue(self, block: bool) -> logging.LogRecord:
        if not self._records.empty():
            return self._records.get()
        self._write()
        record = self._records.get(block)
        self._stopping.wait(_MOMENT)
        return record

    def handle(self, record: logging.LogRecord) -> None:
        for handler in self.handlers:
            if type(handler) is not logging.StreamHandler:
                handler.handle(record)
            elif handler.filter(record):
                self._keep(handler, record)

    def _keep(self, handler: "logging.StreamHandler[Any]", record: logging.LogRecord) -> None:
        try:
            self._lines.setdefault(handler, []).append(handler.format(record) + handler.terminator)
        except Exception:
            handler.handleError(record)

    def stop(self) -> None:
        """Return when everything is written."""
        self._stopping.set()
        super().stop()
        self._write()

    def _write(self) -> None:
        for handler, lines in self._lines.items():
            with handler.lock or nullcontext(), suppress(OSError):  # nobody reads it any more
                handler.stream.write("".join(lines))
                handler.stream.flush()
        self._lines.clear()


def write_in_thread(logger: logging.Logger) -> QueueListener:
    """Let the records of `logger` be written to the root's handlers by a thread, started here, until `stop()`."""
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    logger.addHandler(_Handover(records))
    logger.propagate = False
    listener = _Writer(records, *logging.getLogger().handlers)
    listener.start()
    return listener
