"""How log records are written: their form, and away from the event loop those that end requests."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Literal, TypeAlias

_LEFT_OUT = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}
"""What every record has, or is written under another name; and uvicorn's message once more, in colours."""

Form: TypeAlias = Literal["default", "ISO8601", "json"]


@contextmanager
def logging_as(form: Form, verbose: bool) -> Iterator[None]:
    """Set logging up for the block, to stderr; records that end requests and still stand in line are written at its
    end."""
    line = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
    times = "%Y-%m-%dT%H:%M:%S%z" if form == "ISO8601" else "%m%d %H:%M:%S"
    logging.basicConfig(level=logging.WARNING, format=line, datefmt=times, stream=sys.stderr)
    if form == "json":
        logging.getLogger().handlers[0].setFormatter(JsonFormatter())
    logging.getLogger("charonia").setLevel(logging.DEBUG if verbose else logging.INFO)
    # It tells of every connection and of its own start and stop, which are told elsewhere.
    logging.getLogger("uvicorn").setLevel(logging.INFO if verbose else logging.WARNING)
    listener = write_in_thread(logging.getLogger("charonia.requests"))
    try:
        yield
    finally:
        listener.stop()


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


def write_in_thread(logger: logging.Logger) -> QueueListener:
    """Let the records of `logger` be written to the root's handlers by a thread, started here, until `stop()`."""
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    logger.addHandler(_Handover(records))
    logger.propagate = False
    listener = QueueListener(records, *logging.getLogger().handlers)
    listener.start()
    return listener
