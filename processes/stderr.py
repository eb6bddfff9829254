"""Writes to stderr without waiting for it, and the outages of files, told there once."""

import os
from threading import Thread

_STDERR = 2


def write_stderr(text: str) -> Thread:
    """Write text to stderr in a thread, which a pipe without a reader may hold for ever, and past Python's own buffer,
    whose lock that thread would take along."""
    writing = Thread(target=os.write, args=(_STDERR, text.encode(errors="backslashreplace")), daemon=True)
    writing.start()
    return writing


class FileOutage:
    """The outage of a file to which `things` are written, such as traces: told once, with the number lost at its
    end."""

    def __init__(self, things: str) -> None:
        self._things = things
        self._file = ""

    def report_failure(self, file: str, error: OSError | ValueError) -> None:
        """The file cannot be written; said the first time."""
        if not self._file:
            reason = getattr(error, "strerror", None) or error
            write_stderr(f"charonia: cannot write {self._things} to {file}: {reason}\n")
        self._file = file

    def report_recovery(self, lost: int, timeout: float = 0) -> None:
        """The file can be written again, or nothing more is to come; silent where there was no outage.
        `timeout`: seconds to wait for a pipe to be read."""
        if self._file:
            text = f"charonia: {lost} {self._things} are lost: {self._file} could not be written\n"
            write_stderr(text).join(timeout)
        self._file = ""
