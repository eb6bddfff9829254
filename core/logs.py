"""How log records are written: as JSON lines, and away from the event loop."""

import json
import logging
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and every field that came as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
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
