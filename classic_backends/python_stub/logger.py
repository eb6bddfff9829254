"""The API's logger."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from .connection import server
from .messages import LogMessage
from .triton_error import TritonModelException


class Logger:
    """Writes to the server's log."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3

    @staticmethod
    def log(message: str, level: int = INFO) -> None:
        if level not in _LOG_LEVELS:
            raise TritonModelException(f"{level} is no level of the logger")
        _log(_LOG_LEVELS[level], message)

    @staticmethod
    def log_info(message: str) -> None:
        _log(logging.INFO, message)

    @staticmethod
    def log_warn(message: str) -> None:
        _log(logging.WARNING, message)

    @staticmethod
    def log_error(message: str) -> None:
        _log(logging.ERROR, message)

    @staticmethod
    def log_verbose(message: str) -> None:
        _log(logging.DEBUG, message)


_LOG_LEVELS = {
    Logger.INFO: logging.INFO,
    Logger.WARNING: logging.WARNING,
    Logger.ERROR: logging.ERROR,
    Logger.VERBOSE: logging.DEBUG,
}


def _log(level: int, message: str) -> None:
    caller = sys._getframe(2)
    source = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    server().send(LogMessage(level, str(message), source))
