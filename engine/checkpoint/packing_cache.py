"""Packed weights on disk: a later start reads them from a file instead of packing a checkpoint again.

A file is named arrays after a header with a checksum. Its key is what the arrays were made from, so it is never out of
date; the least recently used go when all exceed the budget. Knows neither torch nor layers.
"""

import json
import logging
import os
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ... import __version__
from ...core.regular_files import open_regular
from ...processes.private_directory import make_private_directory

log = logging.getLogger(__name__)

Array: TypeAlias = npt.NDArray[Any]

FORMAT = 2
"""Changes with the layout of the file or of packed lines, and with quantisation's results."""

_PREFIX = struct.Struct("<16sQ32s")
"""Magic, the header's bytes, their SHA-256; the header is JSON, and arrays begin at the page after it."""
_MAGIC, _PAGE = b"charonia packed\n", 4096
_CACHE_LINE = 64
_SUFFIX, _PART = ".packed", ".part"
_ABANDONED = 3600
"""Seconds after which a part counts as abandoned."""
_LARGEST_HEADER = 1 << 28
_PIECE, _READERS = 1 << 23, 8
"""Bytes of one read, and concurrent reads: most of the time the system finds memory for them."""


class StoredArray(msgspec.Struct, frozen=True, array_like=True):
    """A one-dimensional array in the file, `offset` bytes after the header's last page."""

    dtype: str
    offset: int
    size: int


class PackedMatrix(msgspec.Struct, frozen=True):
    """A matrix in the dtype `kept`, as named arrays."""

    kept: str
    arrays: dict[str, StoredArray]


class PackingHeader(msgspec.Struct, frozen=True):
    """The header of a file."""

    about: str
    """The model and how it was packed, for people."""
    content: str
    """SHA-256 of all arrays as they were written; a start does not compare it."""
    matrices: dict[str, PackedMatrix]


class CacheEntry(NamedTuple):
    """A file of the cache."""

    path: Path
    bytes: int
    used: float
    """When it was last read, in seconds since 1970."""
    about: str


class PackedWeights:
    """The matrices of a file of the cache, read into memory of `allocate(size)`, uint8 [size].

    Raises:
        OSError, ValueError: the file is missing or damaged.
    """

    def __init__(self, path: Path, allocate: Callable[[int], Array]) -> None:
        with path.open("rb", buffering=0) as file:
            self.header, start = _read_header(file.fileno())
            size = os.fstat(file.fileno()).st_size - start
            stored = [array for matrix in self.header.matrices.values() for array in matrix.arrays.values()]
            if any(array.offset + _bytes_of(array) > size for array in stored):
                raise ValueError("the file ends early")
            self._numbers = allocate(size)[:size]
            fill = partial(_fill, file.fileno(), start, self._numbers)
            with ThreadPoolExecutor(_READERS) as readers:
                deque(readers.map(fill, range(0, size, _PIECE)), maxlen=0)

    def arrays(self, matrix: PackedMatrix) -> dict[str, Array]:
        return {
            name: np.frombuffer(self._numbers.data, array.dtype, array.size, array.offset)
            for name, array in matrix.arrays.items()
        }


def is_whole(path: Path) -> bool:
    """Whether all arrays of a file are as they were written. Raises `OSError` or `ValueError` for a file that is
    missing or none of the cache."""
    with path.open("rb") as file:
        header, start = _read_header(file.fileno())
        file.seek(start)
        return file_digest(file, "sha256").hexdigest() == header.content


def _fill(file: int, start: int, numbers: Array, first: int) -> None:
    """Read a piece of `numbers` from its place in the file."""
    left = numbers.data[first : first + _PIECE]
    while left:
        count = os.preadv(file, [left], start + first)
        if not count:
            raise ValueError("the file ends early")
        left, first = left[count:], first + count


class PackingCache(NamedTuple):
    """A directory of packed weights, of at most `budget` bytes."""

    directory: Path
    budget: int

    def find(self, key: str, allocate: Callable[[int], Array]) -> PackedWeights | None:
        """The weights under a key, which are marked as used. A damaged file is removed."""
        path = self._path(key)
        try:
            packed = PackedWeights(path, allocate)
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("%s: these packed weights are not used, but made again: %s", path, error)
            path.unlink(missing_ok=True)
            return None
        return packed

    def keep(self, key: str, about: str, matrices: Mapping[str, tuple[str, Mapping[str, Array]]]) -> None:
        """Write each matrix's dtype and arrays. An error of the disk is logged, and only costs a later start time."""
        header, pieces = _lay_out(about, matrices)
        size = sum(len(piece) for piece in (header, *pieces))
        if size > self.budget:
            message = "packed weights are not kept: %d bytes are more than the cache may have (--cache-max-bytes %d)"
            log.warning(message, size, self.budget)
            return
        part = self.directory / f"{key}.{secrets.token_hex(8)}{_PART}"
        try:
            self._make_room(size)
            _write(part, (header, *pieces))
            part.rename(self._path(key))
        except OSError as error:
            log.warning("packed weights are not kept: %s", error)
            part.unlink(missing_ok=True)

    def entries(self) -> list[CacheEntry]:
        """All files, the most recently used first."""
        entries = [_entry(path) for path in self.directory.glob(f"*{_SUFFIX}")]
        return sorted((entry for entry in entries if entry), key=lambda entry: -entry.used)

    def clear(self) -> int:
        """Remove all files; returns how many there were."""
        paths = [path for suffix in (_SUFFIX, _PART) for path in self.directory.glob(f"*{suffix}")]
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{_SUFFIX}"

    def _make_room(self, size: int) -> None:
        for part in self.directory.glob(f"*{_PART}"):
            if time.time() - part.stat().st_mtime > _ABANDONED:
                part.unlink(missing_ok=True)
        kept = self.entries()
        total = sum(entry.bytes for entry in kept) + size
        while total > self.budget and kept:
            oldest = kept.pop()
            log.info("%s: packed weights make room for others: %s", oldest.path, oldest.about)
            oldest.path.unlink(missing_ok=True)
            total -= oldest.bytes


def _ordinary_memory(size: int) -> Array:
    whole = np.empty(size + _CACHE_LINE, np.uint8)  # kernels read whole cache lines
    return whole[-whole.ctypes.data % _CACHE_LINE :][:size]


class Packing:
    """The packed matrices of one load: found in the cache, or packed now and to be kept there."""

    def __init__(
        self,
        cache: PackingCache | None = None,
        key: str = "",
        about: str = "",
        allocate: Callable[[int], Array] = _ordinary_memory,
    ) -> None:
        """Without a `cache` nothing is found or kept. `allocate`: makes the memory of found matrices."""
        self._cache = cache
        self._key = key
        self._about = about
        self._found = None if cache is None else cache.find(key, allocate)
        self._made: dict[str, tuple[str, Mapping[str, Array]]] = {}

    @property
    def found(self) -> bool:
        return self._found is not None

    def find(self, name: str) -> tuple[str, dict[str, Array]] | None:
        """The dtype and the arrays of matrix `name`, if it was found."""
        matrix = None if self._found is None else self._found.header.matrices.get(name)
        return None if self._found is None or matrix is None else (matrix.kept, self._found.arrays(matrix))

    def add(self, name: str, kept: str, arrays: Mapping[str, Array]) -> None:
        if self._cache is not None:
            self._made[name] = kept, arrays

    def keep(self) -> None:
        """Write what was added; called after the last matrix."""
        if self._cache is not None and self._made:
            self._cache.keep(self._key, self._about, self._made)
            self._made.clear()


def open_packing_cache(directory: Path, budget: int) -> PackingCache:
    """The cache in `directory`, which is made if it is missing. Raises `InvalidArgument` if it cannot be made, or if
    others, who could choose the weights, may write to it."""
    make_private_directory(directory, "cache_dir")
    return PackingCache(directory, budget)


def packing_key(files: Iterable[Path], facts: Mapping[str, Any]) -> str:
    """The key of what is packed from `files` according to `facts`. It changes with our version and with each file's
    identity, size, time and header; contents are not read."""
    identities = [[*_identity(path)] for path in sorted(files)]
    source = json.dumps([FORMAT, __version__, identities, facts], sort_keys=True)
    return sha256(source.encode()).hexdigest()[:40]


def _identity(path: Path) -> tuple[str, int, int, int, int, str]:
    with open_regular(path) as file:
        status, begin = os.fstat(file.fileno()), file.read(8)
        # The header of a safetensors file; of others as much as a header may have.
        length = int.from_bytes(begin, "little") if path.suffix == ".safetensors" else 1 << 16
        header = sha256(begin + file.read(min(length, _LARGEST_HEADER))).hexdigest()
    return path.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, header


def _entry(path: Path) -> CacheEntry | None:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            header, _ = _read_header(file.fileno())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return CacheEntry(path, path.stat().st_size, 0.0, "damaged, or of another version")
    return CacheEntry(path, status.st_size, status.st_mtime, header.about)


def _read_header(file: int) -> tuple[PackingHeader, int]:
    """The header, and where the arrays begin. Raises `ValueError` for a header that is missing, damaged or another
    version's."""
    prefix = os.pread(file, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size or prefix[: len(_MAGIC)] != _MAGIC:
        raise ValueError("no packed weights of ours")
    _, length, checksum = _PREFIX.unpack(prefix)
    text = os.pread(file, min(length, _LARGEST_HEADER), _PREFIX.size)
    if sha256(text).digest() != checksum:
        raise ValueError("its header is damaged")
    try:
        return msgspec.json.decode(text, type=PackingHeader), _whole_pages(_PREFIX.size + length)
    except msgspec.MsgspecError as error:
        raise ValueError(f"its header is another version's: {error}") from error


def _lay_out(
    about: str, matrices: Mapping[str, tuple[str, Mapping[str, Array]]]
) -> tuple[bytes, list[memoryview | bytes]]:
    """The file's first pages, and its arrays with the gaps between them."""
    stored: dict[str, PackedMatrix] = {}
    pieces: list[memoryview | bytes] = []
    offset = 0
    content = sha256()
    for name, (kept, arrays) in matrices.items():
        places = {}
        for part, array in arrays.items():
            places[part] = StoredArray(str(array.dtype), offset, array.size)
            gap = bytes(-array.nbytes % _PAGE)
            for piece in (array.data.cast("B"), gap):
                content.update(piece)
                pieces.append(piece)
            offset += array.nbytes + len(gap)
        stored[name] = PackedMatrix(kept, places)
    text = msgspec.json.encode(PackingHeader(about, content.hexdigest(), stored))
    prefix = _PREFIX.pack(_MAGIC, len(text), sha256(text).digest())
    return (prefix + text).ljust(_whole_pages(len(prefix) + len(text)), b"\0"), pieces


def _write(path: Path, pieces: Iterable[memoryview | bytes]) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(file, "wb", buffering=0) as out:
        for piece in pieces:
            left = memoryview(piece)
            while left:  # a call of the system writes at most 2 GiB
                left = left[out.write(left) :]
        os.fsync(file)  # before the rename, or a loss of power might leave half a file under the name


def _bytes_of(array: StoredArray) -> int:
    return array.size * np.dtype(array.dtype).itemsize


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
