"""Images of blocks and of states as files of a directory that several servers share, and that outlives them.

A file is written aside, and renamed to the hash of its content. There are no locks: a file that vanishes, or whose
checksum is wrong, is not there. Beyond the budget those used longest ago are removed.
"""

import os
import re
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum, auto
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

_HEADER = struct.Struct("<16s32s")
"""Magic, and the SHA-256 of the key and the image that follows."""
_MAGIC = b"charonia image1\n"
_PART = ".part"
_ABANDONED_SECONDS = 600.0
"""The age after which a part is of a server that died."""
_USE_SECONDS = 30.0
"""Uses within so many seconds count as one: each is a write to the file's inode."""
_RECOUNT_SECONDS = 120.0
_RECOUNT_PART = 32
"""What others write is counted once this server has written so much of the budget, or after `_RECOUNT_SECONDS`."""
_ROOM_PART = 16
"""One part in so many of the budget is made free at once."""
_SHARE = re.compile(r"[0-9a-f]{32}-[0-9]+of[0-9]+")
_FILE = re.compile(r"[0-9a-f]{64,66}")


class ReadOutcome(Enum):
    """What became of reading an image."""

    READ = auto()
    MISSING = auto()
    DAMAGED = auto()
    """It was no image of this key and size, and has been removed."""
    FAILED = auto()
    """The system refused."""


class _StoredFile(NamedTuple):
    path: str
    bytes: int
    used: int
    """In whole seconds since 1970."""


def share_name(fingerprint: bytes, rank: int = 0, ranks: int = 1) -> str:
    """The folder of one rank's images; `fingerprint`: of all that its images mean something to."""
    return f"{fingerprint.hex()[:32]}-{rank}of{ranks}"


class ImageDirectory:
    """The images of one `share` below `root`, whose files have `budget` bytes at most, those of other shares included.
    For any thread. Servers that write at the same time may exceed the budget by a 32nd of it each."""

    def __init__(self, root: Path, share: str, budget: int, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._share = os.path.join(root, share)
        self._budget = budget
        self._clock = clock
        self._counting = threading.Lock()
        self._counted_at = -_RECOUNT_SECONDS
        self._bytes = 0  # of all files, as far as this server knows
        self._written = 0  # since they were counted
        self.evicted = 0
        """Files that this server has removed to make room."""

    def __contains__(self, key: bytes) -> bool:
        return os.path.exists(self._path(key))

    def read(self, key: bytes, into: memoryview) -> ReadOutcome:
        """Fill `into`, which has the size of an image, and mark the file as used."""
        path = self._path(key)
        header = bytearray(_HEADER.size)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                count = os.readv(file, [header, into])
                while 0 < count - len(header) < len(into) and (more := os.readv(file, [into[count - len(header) :]])):
                    count += more
                status = os.fstat(file)
                if status.st_size == count == len(header) + len(into):
                    magic, checksum = _HEADER.unpack(header)
                    if magic == _MAGIC and checksum == _checksum(key, into):
                        if self._clock() - status.st_mtime > _USE_SECONDS:
                            with suppress(OSError):
                                os.utime(file)
                        return ReadOutcome.READ
            finally:
                os.close(file)
        except FileNotFoundError:
            return ReadOutcome.MISSING
        except OSError:
            return ReadOutcome.FAILED
        with suppress(OSError):
            os.unlink(path)
        return ReadOutcome.DAMAGED

    def write(self, key: bytes, image: memoryview) -> bool:
        """Keep an image, unless it is there: then nothing is written, and False is returned. Raises `OSError`."""
        path = self._path(key)
        if os.path.exists(path):
            return False
        size = _HEADER.size + len(image)
        self._make_room(size)
        folder = os.path.dirname(path)
        os.makedirs(folder, 0o700, exist_ok=True)
        part = os.path.join(folder, f"{secrets.token_hex(8)}{_PART}")
        try:
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(file, "wb", buffering=0) as out:
                for piece in (_HEADER.pack(_MAGIC, _checksum(key, image)), image):
                    left = memoryview(piece)
                    while left:
                        left = left[out.write(left) :]
            os.rename(part, path)  # not synchronised before: half a file after a loss of power is a damaged one
        except OSError:
            with suppress(OSError):
                os.unlink(part)
            raise
        with self._counting:
            self._bytes += size
            self._written += size
        return True

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._share}/{name[:2]}/{name}"

    def _make_room(self, size: int) -> None:
        """Remove files until another one of this size fits. One larger than the budget never does: `OSError`."""
        if size > self._budget:
            raise OSError(f"an image of {size} bytes is larger than the directory's budget of {self._budget}")
        with self._counting:
            late = self._clock() - self._counted_at > _RECOUNT_SECONDS
            if late or self._written > self._budget // _RECOUNT_PART or self._bytes + size > self._budget:
                ages = self._count()
                if self._bytes + size > self._budget:
                    kept = self._budget * (_ROOM_PART - 1) // _ROOM_PART
                    self._remove_oldest(ages, self._bytes + size - kept)

    def _count(self) -> Counter[int]:
        """Count the bytes of all files, by when they were used."""
        ages = Counter[int]()
        for file in self._files():
            ages[file.used] += file.bytes
        self._bytes = ages.total()
        self._written = 0
        self._counted_at = self._clock()
        return ages

    def _remove_oldest(self, ages: Counter[int], excess: int) -> None:
        """Remove the files that were used longest ago, of all shares, until at least `excess` bytes are free. Others
        may do the same at the same time: what they removed is free too."""
        oldest, last = 0, 0
        for last in sorted(ages):
            oldest += ages[last]
            if oldest >= excess:
                break
        of_last = excess - (oldest - ages[last])  # of files used in that second, as many as are needed
        for file in self._files():
            if file.used < last or (file.used == last and of_last > 0):
                of_last -= file.bytes * (file.used == last)
                with suppress(FileNotFoundError):
                    os.unlink(file.path)
                    self.evicted += 1
                self._bytes -= file.bytes

    def _files(self) -> Iterator[_StoredFile]:
        """All images. Parts that a dead server left are removed; what is not ours is left alone."""
        for share in _entries(self._root):
            if not _SHARE.fullmatch(share.name):
                continue
            for folder in _entries(share.path):
                for entry in _entries(folder.path):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if _FILE.fullmatch(entry.name):
                            yield _StoredFile(entry.path, status.st_size, int(status.st_mtime))
                        elif entry.name.endswith(_PART) and self._clock() - status.st_mtime > _ABANDONED_SECONDS:
                            os.unlink(entry.path)


def _checksum(key: bytes, image: memoryview) -> bytes:
    content = sha256(key)
    content.update(image)
    return content.digest()


def _entries(folder: Path | str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return [*entries]
    except (FileNotFoundError, NotADirectoryError):
        return []
