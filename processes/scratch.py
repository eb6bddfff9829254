"""Directories of passing use in TMPDIR: sockets of an engine core, the files that came with a load request.

Each is locked by the process that made it for as long as that lives, so the next server finds those that a killed one
left behind, and they alone: a process number would be another process by then, or be counted in another container.
"""

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "charonia-scratch-"
_SCRATCH_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")


class ScratchDirectory:
    """A new directory at `path`, for this user alone; `close`, or the end of the block, removes it and all in it."""

    def __init__(self) -> None:
        # Until it is locked it has a name that is not swept up.
        made = tempfile.mkdtemp(prefix=f".{_PREFIX}")
        self._lock = _lock_directory(made)
        self.path = Path(made).with_name(os.path.basename(made).removeprefix("."))
        os.rename(made, self.path)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_abandoned_scratch() -> int:
    """Remove the scratch directories of this user whose processes are gone; returns their number."""
    swept = 0
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            with suppress(OSError):  # it may be gone by now
                if not _SCRATCH_NAME.fullmatch(entry.name) or entry.stat(follow_symlinks=False).st_uid != os.getuid():
                    continue
                lock = _lock_directory(entry.path)
                if lock is not None:
                    os.close(lock)
                    shutil.rmtree(entry.path, ignore_errors=True)
                    swept += 1
    return swept


def _lock_directory(directory: str) -> int | None:
    """A descriptor that holds the directory's lock; None if another process has it, or the file system has no locks.
    Processes that are started do not inherit it."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
        else:
            return descriptor
    return None
