"""Files and batches on disk: one directory of one server, readable by its owner alone.

A file is there once its record is, a small JSON file that is written last; what a server that died left half done the
next one removes. The index lives in one event loop; `write_...` and `open_store` block: call them in a thread.
"""

import asyncio
import errno
import fcntl
import logging
import os
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from ...api.http.error_responses import ApiError
from ...core.errors import InvalidArgument
from ...processes.private_directory import PART_SUFFIX, replace_file
from .options import FileLimits
from .records import BatchRecord, StoredFile

log = logging.getLogger(__name__)

FILE_CHARGE = 64 << 10
"""Bytes that the shortest file counts as: it takes an inode, and memory, as well."""

_LOCK = ".lock"
_FILES = "files"
_BATCHES = "batches"
_RECORD = ".json"
_MAX_RECORD_BYTES = 8 << 20
"""The most bytes of a record: that of a batch with the errors of a hundred lines may have a megabyte."""

_THREADS = 4

P = ParamSpec("P")
T = TypeVar("T")
Record = TypeVar("Record", StoredFile, BatchRecord)


class StorageFull(ApiError):
    """Nothing more can be stored: `--files-tenant-bytes` or `--files-total-bytes` is reached, or the disk is full or
    broken."""


def quota_reached(whose: str, limit: int, flag: str) -> StorageFull:
    text = f"{whose} take all of the {limit} bytes that they may have together ({flag}): delete some"
    return StorageFull(text, 413, "storage_quota_exceeded")


def write_failed(error: OSError) -> StorageFull:
    """The error of a write that the disk refused."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    text = "the server's disk is full" if full else f"the server's disk cannot be written: {error.strerror}"
    return StorageFull(text, 507 if full else 500, "storage_full" if full else "storage_failed")


class FileStore:
    """The files and batches in `directory`, which is this server's alone until `close`. `unfinished`: the batches that
    have not ended. `damaged`: by the id, why the record of a file or batch, or its content, can't be read. Made by
    `open_store`."""

    def __init__(self, directory: Path, limits: FileLimits, lock: int, clock: Callable[[], float]) -> None:
        self.directory = directory
        self.limits = limits
        self.clock = clock
        self.unfinished: dict[str, BatchRecord] = {}
        self.damaged: dict[str, str] = {}
        # Bytes of the files of each tenant, those being written included; of nobody: what is damaged.
        self._used: Counter[str | None] = Counter()
        self._files: defaultdict[str, dict[str, StoredFile]] = defaultdict(dict)
        self._batches: defaultdict[str, dict[str, BatchRecord]] = defaultdict(dict)
        self._last = 0
        self._lock = lock
        self._threads = ThreadPoolExecutor(_THREADS, "charonia-files")

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._lock)

    async def in_thread(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """The result of what blocks. The threads are the store's own: a disk that is slow holds up nothing else."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *arguments, **named))

    def in_thread_later(self, work: Callable[[], object]) -> None:
        """Let `work` run, whatever becomes of the task that asks for it."""
        asyncio.get_running_loop().run_in_executor(self._threads, work)

    def path(self, file_id: str) -> Path:
        """Where the content of a file lies. The id is one of ours, never a client's word."""
        return self.directory / _FILES / file_id

    def part_path(self, file_id: str) -> Path:
        """Where the content lies until it is whole."""
        return self.directory / _FILES / (file_id + PART_SUFFIX)

    def now(self) -> int:
        return int(self.clock())

    def time_ns(self) -> int:
        """A number above those of all records made before, though clocks are set back."""
        self._last = max(int(self.clock() * 1e9), self._last + 1)
        return self._last

    # Room

    @property
    def used(self) -> int:
        """Bytes of all files, those being written included."""
        return self._used.total()

    def charge(self, tenant: str, size: int) -> None:
        """Count bytes that are about to be written for a tenant. Raises `StorageFull` if there is no room for them."""
        if size > 0 and self._used[tenant] + size > self.limits.tenant_bytes:
            raise quota_reached("your files", self.limits.tenant_bytes, "--files-tenant-bytes")
        if size > 0 and self.used + size > self.limits.total_bytes:
            raise quota_reached("files", self.limits.total_bytes, "--files-total-bytes")
        self.count(tenant, size)

    def count(self, tenant: str | None, size: int) -> None:
        """Count bytes that are there, or no longer where `size` is negative, whatever the limits are."""
        self._used[tenant] += size
        if not self._used[tenant]:
            del self._used[tenant]

    # Files

    def find_file(self, tenant: str, file_id: str) -> StoredFile:
        """Raises `ApiError` 404 for an id that is unknown, another tenant's, or of a file whose time is over; 500 for a
        damaged one."""
        self._check_damage("file", file_id)
        file = self._files.get(tenant, {}).get(file_id)
        if file is None or self._is_over(file):
            raise ApiError(f"No such File object: {file_id[:100]}", 404, field="id")
        return file

    def _check_damage(self, kind: str, id_: str) -> None:
        """Raises `ApiError`. Ids are unguessable: who has one has had it from here."""
        if id_ in self.damaged:
            raise ApiError(
                f"the {kind} {id_} is damaged on the server's disk, whose log says how", 500, "storage_damaged"
            )

    def list_files(self, tenant: str) -> list[StoredFile]:
        """A tenant's files, the oldest first."""
        return [file for file in self._files.get(tenant, {}).values() if not self._is_over(file)]

    def _is_over(self, file: StoredFile) -> bool:
        return file.expires_at <= self.clock() and not self.in_use(file.id)

    def in_use(self, file_id: str) -> bool:
        """Whether a batch that has not ended reads the file, or writes it."""
        return any(
            file_id in (batch.input_file_id, batch.output_id, batch.error_id) for batch in self.unfinished.values()
        )

    def write_file(self, file: StoredFile) -> None:
        """The content is whole: write the record, after which the file is there on the next start too."""
        write_aside(self.path(file.id + _RECORD), msgspec.json.encode(file))

    def add_file(self, file: StoredFile) -> None:
        """Into the index; its bytes were charged."""
        self._files[file.tenant][file.id] = file
        self._last = max(self._last, file.made)

    def forget_file(self, file: StoredFile) -> None:
        """Out of the index."""
        del self._files[file.tenant][file.id]
        self.count(file.tenant, -charged(file.size))

    def unpublish(self, batch: BatchRecord) -> None:
        """Forget the files of a batch that was about to end: it writes them anew."""
        for file_id in (batch.output_id, batch.error_id):
            if (file := self._files[batch.tenant].get(file_id)) is not None:
                self.forget_file(file)

    def write_file_away(self, file_id: str) -> None:
        """Remove a file's record and content."""
        for name in (file_id + _RECORD, file_id):
            self.path(name).unlink(missing_ok=True)

    # Batches

    def find_batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Raises `ApiError` 404 for an id that is unknown or another tenant's, and 500 for one that is damaged."""
        self._check_damage("batch", batch_id)
        batch = self._batches.get(tenant, {}).get(batch_id)
        if batch is None:
            raise ApiError(f"No such Batch object: {batch_id[:100]}", 404, field="id")
        return batch

    def list_batches(self, tenant: str) -> list[BatchRecord]:
        """A tenant's batches, the oldest first."""
        return list(self._batches.get(tenant, {}).values())

    def add_batch(self, batch: BatchRecord) -> None:
        """Into the index, or under what it is now."""
        self._batches[batch.tenant][batch.id] = batch
        self._last = max(self._last, batch.made)
        if batch.status.ended:
            self.unfinished.pop(batch.id, None)
        else:
            self.unfinished[batch.id] = batch

    def forget_batch(self, batch: BatchRecord) -> None:
        """Out of the index."""
        self.unfinished.pop(batch.id, None)
        del self._batches[batch.tenant][batch.id]

    def write_batch(self, batch_id: str, record: bytes) -> None:
        """Write the record of a batch, encoded before, for it may change meanwhile."""
        write_aside(self.directory / _BATCHES / (batch_id + _RECORD), record)

    def write_batch_away(self, batch_id: str) -> None:
        (self.directory / _BATCHES / (batch_id + _RECORD)).unlink(missing_ok=True)

    # The end of what is old

    def expired(self) -> tuple[list[StoredFile], list[BatchRecord]]:
        """The files whose time is over, and the batches that ended so long ago as a file may live."""
        oldest = self.now() - self.limits.seconds
        files = [file for files in self._files.values() for file in files.values()]
        batches = [batch for batches in self._batches.values() for batch in batches.values() if batch.status.ended]
        over = [file for file in files if self._is_over(file)]
        ended = [batch for batch in batches if max(batch.times.values()) <= oldest]
        return over, ended


def charged(size: int) -> int:
    """The bytes that a whole file counts as."""
    return max(size, FILE_CHARGE)


def open_store(directory: Path, limits: FileLimits, clock: Callable[[], float] = time.time) -> FileStore:
    """Open a directory, made if it is not there, and clear away what was left half done.

    Raises:
        InvalidArgument: it cannot be used, or another server has it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in (_FILES, _BATCHES):
            (directory / name).mkdir(mode=0o700, exist_ok=True)
            (directory / name).chmod(0o700)
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidArgument(f"--files-dir {directory} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise InvalidArgument(f"--files-dir {directory} is another server's: each needs its own") from None
    store = FileStore(directory, limits, lock, clock)
    for batch in _read_records(store, directory / _BATCHES, BatchRecord):
        store.add_batch(batch)
    for file in _read_records(store, directory / _FILES, StoredFile):
        _add_stored_file(store, file)
    _remove_leftovers(store)
    return store


def _read_records(store: FileStore, directory: Path, kind: type[Record]) -> Iterable[Record]:
    """The records of a directory, the oldest first. What cannot be read is told of, left where it is, and `damaged`."""
    records: list[Record] = []
    for path in directory.glob("*" + _RECORD):
        try:
            record = msgspec.json.decode(_read_record(path), type=kind)
            if record.id != path.stem:
                raise ValueError(f"it is the record of {record.id[:100]!r}")
        except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
            _note_damage(store, path, error)
            continue
        records.append(record)
    return sorted(records, key=attrgetter("made"))


def _read_record(path: Path) -> bytes:
    """Raises `OSError`, and `ValueError` for what is no regular file, or too long for a record."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_RECORD_BYTES:
        raise ValueError(f"it is no regular file of up to {_MAX_RECORD_BYTES} bytes")
    return path.read_bytes()


def _add_stored_file(store: FileStore, file: StoredFile) -> None:
    path = store.path(file.id)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
            raise ValueError(f"it is no regular file of {file.size} bytes")
    except (OSError, ValueError) as error:
        _note_damage(store, path, error)
    else:
        store.add_file(file)
        store.count(file.tenant, charged(file.size))


def _note_damage(store: FileStore, path: Path, error: Exception) -> None:
    log.error("%s is damaged, and is answered with 500: %s", path, error)
    id_ = path.name.removesuffix(_RECORD)
    store.damaged[id_] = str(error)
    content = store.path(id_)
    if content.is_file():
        store.count(None, charged(content.stat().st_size))


def _remove_leftovers(store: FileStore) -> None:
    """Remove contents without a record, but for those that unfinished batches write, or may write: it is unknown which
    those of a damaged batch are. A folder is not ours."""
    damaged_batches = any((store.directory / _BATCHES / (id_ + _RECORD)).exists() for id_ in store.damaged)
    written = {name for batch in store.unfinished.values() for name in (batch.output_id, batch.error_id)}
    folder = store.directory / _FILES
    there = {path.name for path in folder.iterdir()}
    for name in there:
        has_record = name in written or name.endswith(_RECORD) or name + _RECORD in there
        if not (has_record or damaged_batches or name.endswith(PART_SUFFIX)):
            _remove(folder / name)
    for path in (*folder.glob("*" + PART_SUFFIX), *(store.directory / _BATCHES).glob("*" + PART_SUFFIX)):
        _remove(path)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s does not belong here, and cannot be removed: %s", path, error.strerror)


def write_aside(path: Path, content: bytes) -> None:
    """Write a small file so that there is either the old one or the new one, whatever happens.

    Raises:
        StorageFull: the disk refuses it.
    """
    try:
        replace_file(path, content)
    except OSError as error:
        raise write_failed(error) from None
