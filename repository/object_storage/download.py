"""Reads objects of a bucket into files: several at once, in parts at once, going on where somebody stopped.

A file in `partial/` has the whole size from the beginning; beside it `.parts` has a byte for each part that is there.
Who reads an object holds the lock of its file: another server waits, and finds it read.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from hashlib import md5, sha256
from pathlib import Path
from threading import Event, Lock
from time import time
from typing import NamedTuple

from ...core.errors import ServerExiting
from .stores import ObjectStore, StoredObject, StoreUnavailable, retried

PARTS = ".parts"
PART_BYTES = 8 << 20
"""What is read at once, and need not be read again after a break."""

_OBJECTS_AT_ONCE, _PARTS_AT_ONCE = 6, 6
_LOCK_PAUSE = 0.1


class WantedObject(NamedTuple):
    """An object, and the file that it is to be."""

    stored: StoredObject
    path: Path


class ObjectFiles:
    """Where objects lie in a cache's directory: whole ones in `objects`, those that are being read in `partial`."""

    def __init__(self, directory: Path) -> None:
        self._objects, self._partial = directory / "objects", directory / "partial"
        for folder in (self._objects, self._partial):
            folder.mkdir(mode=0o700, exist_ok=True)
        self.closing = Event()
        """Nothing more is to be read."""

    def __iter__(self) -> Iterator[Path]:
        """All there are, of any server."""
        yield from self._objects.iterdir()
        yield from self._partial.iterdir()

    def entry(self, store: ObjectStore, stored: StoredObject) -> Path:
        """The file of an object that was read whole."""
        return self._objects / _digest(store, stored)

    def partial(self, store: ObjectStore, stored: StoredObject) -> Path:
        """The file of one that is being read, of its whole size; beside it, with `.parts`, a byte for each part."""
        return self._partial / _digest(store, stored)


def _digest(store: ObjectStore, stored: StoredObject) -> str:
    location = store.location
    place = (location.scheme, location.endpoint, location.bucket, location.prefix + stored.key, stored.tag, stored.size)
    return sha256(repr(place).encode()).hexdigest()[:40]


class _Stopped(Exception):
    """Another part failed."""


class Download:
    """One go at reading objects of `size` bytes together. `on_bytes` is told how many of them there are."""

    def __init__(self, files: ObjectFiles, store: ObjectStore, size: int, on_bytes: Callable[[int, int], None]) -> None:
        self._files = files
        self._store = store
        self._size = size
        self._on_bytes = on_bytes
        self._stop, self._counting = Event(), Lock()
        self._there = 0
        self.read_bytes = 0

    def run(self, wanted: Sequence[WantedObject]) -> None:
        """Read them all. Raises the first error of `ObjectStore.read`; the parts that came stay for the next time."""
        with (
            ThreadPoolExecutor(_PARTS_AT_ONCE, "download-part") as readers,
            ThreadPoolExecutor(_OBJECTS_AT_ONCE, "download") as objects,
        ):
            try:
                _all([objects.submit(self._fetch, wanted_object, readers) for wanted_object in wanted])
            finally:
                self._stop.set()

    def _fetch(self, wanted: WantedObject, readers: ThreadPoolExecutor) -> None:
        entry = self._files.entry(self._store, wanted.stored)
        partial = self._files.partial(self._store, wanted.stored)
        with self._opened(partial) as file:
            if entry.exists():  # another server has read it meanwhile
                self._count(wanted.stored.size, 0)
                if not os.fstat(file).st_size:  # made anew after that
                    partial.unlink(missing_ok=True)
            else:
                self._fill(file, wanted.stored, partial.with_suffix(PARTS), readers)
                os.fchmod(file, 0o400)
                os.utime(partial, (time(), wanted.stored.modified))
                os.rename(partial, entry)
                partial.with_suffix(PARTS).unlink(missing_ok=True)
            os.link(entry, wanted.path)

    @contextmanager
    def _opened(self, partial: Path) -> Iterator[int]:
        """The descriptor of the file, locked."""
        while True:
            file = os.open(partial, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                while not _lock(file):
                    self._stop.wait(_LOCK_PAUSE)
                    self._check()
                if os.fstat(file).st_nlink:
                    yield file
                    return
            finally:
                os.close(file)

    def _fill(self, file: int, stored: StoredObject, parts: Path, readers: ThreadPoolExecutor) -> None:
        marks = os.open(parts, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, stored.size)
            count = -(-stored.size // PART_BYTES)
            done = os.pread(marks, count, 0).ljust(count, b"\0")
            self._count(sum(min(PART_BYTES, stored.size - at * PART_BYTES) for at in range(count) if done[at]), 0)
            _all([readers.submit(self._part, file, marks, stored, at) for at in range(count) if not done[at]])
            if stored.md5 and stored.key not in self._store.encrypted and stored.md5 != _md5(file):
                os.ftruncate(marks, 0)
                raise StoreUnavailable(
                    f"{self._store.location.url}: what came of object '{stored.key}' is not what the store says it is"
                )
        finally:
            os.close(marks)

    def _part(self, file: int, marks: int, stored: StoredObject, at: int) -> None:
        start, end = at * PART_BYTES, min((at + 1) * PART_BYTES, stored.size)
        content = retried(lambda: self._read(stored, start, end), self._stop.wait)
        os.pwrite(file, content, start)
        os.fdatasync(file)  # before the mark
        os.pwrite(marks, b"\1", at)
        self._count(end - start, end - start)

    def _read(self, stored: StoredObject, start: int, end: int) -> bytes:
        self._check()
        return self._store.read(stored, start, end)

    def _check(self) -> None:
        if self._files.closing.is_set():
            raise ServerExiting
        if self._stop.is_set():
            raise _Stopped

    def _count(self, there: int, read: int) -> None:
        with self._counting:
            self._there += there
            self.read_bytes += read
            self._on_bytes(self._there, self._size)


def _all(tasks: Sequence[Future[None]]) -> None:
    """Wait for them; raises the first error, without waiting for the others."""
    failed = [error for task in wait(tasks, return_when=FIRST_EXCEPTION).done if (error := task.exception())]
    if failed:
        raise min(failed, key=lambda error: isinstance(error, _Stopped))


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _md5(file: int) -> str:
    digest, at = md5(usedforsecurity=False), 0
    while block := os.pread(file, PART_BYTES, at):
        digest.update(block)
        at += len(block)
    return digest.hexdigest()
