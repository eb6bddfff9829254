"""Temporary directories in TMPDIR: sockets of an engine core, files of a load request. Each is locked by the process
that made it, so the next server recognises those that a killed one left behind."""

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
    """A new directory for this user alone; `close`, or the end of the block, removes it and its content."""

    def __init__(self) -> None:
        # Until it is locked it has a name that is not swept up.
        unlocked = tempfile.mkdtemp(prefix=f".{_PREFIX}")
        self._lock = _lock_directory(unlocked)
        self.path = Path(unlocked).with_name(os.path.basename(unlocked).removeprefix("."))
        os.rename(unlocked, self.path)

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
    """Remove this user's scratch directories whose processes are gone; return their number."""
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
    """A descriptor, not inherited by children, that holds the directory's lock; None if another process has it, or the
    file system has no locks."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
        else:
            return descriptor
    return None
