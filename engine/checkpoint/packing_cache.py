"""Packed weights on disk: a later start takes them from a file instead of packing a checkpoint again.

A file is arrays by their names, after a header with a checksum. It is written aside and renamed, and only its owner
reads it. Its key is what the arrays were made from, so none is ever out of date; the oldest go when their bytes exceed
the budget. Knows neither torch nor layers.
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

FORMAT = 1
"""Changes with the layout of the file, of packed lines, and with the numbers that quantisation chooses."""

_PREFIX = struct.Struct("<16sQ32s")
"""Magic, the header's bytes, their SHA-256; the header is JSON, and arrays begin at the page after it."""
_MAGIC, _PAGE = b"charonia packed\n", 4096
_CACHE_LINE = 64
_SUFFIX, _PART = ".packed", ".part"
_ABANDONED = 3600
"""Seconds after which nobody is writing a part any more."""
_LARGEST_HEADER = 1 << 28
_PIECE, _READERS = 1 << 23, 8
"""Bytes that are read at a time, and at how many places at once: what takes time is mostly that the system finds memory
for them."""


class StoredArray(msgspec.Struct, frozen=True, array_like=True):
    """An array of one dimension in the file, `offset` bytes after the header's last page."""

    dtype: str
    offset: int
    size: int


class PackedMatrix(msgspec.Struct, frozen=True):
    """A matrix whose weights are kept as `kept`, and the names of its arrays."""

    kept: str
    arrays: dict[str, StoredArray]


class PackingHeader(msgspec.Struct, frozen=True):
    """`about`: the model and the way it was packed, for people. `content`: SHA-256 of all arrays as they lie in the
    file, made when they were written; a start does not read them to compare."""

    about: str
    content: str
    matrices: dict[str, PackedMatrix]


class CacheEntry(NamedTuple):
    """A file of the cache; `used`: when it was last read, in seconds since 1970."""

    path: Path
    bytes: int
    used: float
    about: str


class PackedWeights:
    """What a file of the cache holds, in memory that the caller gives."""

    def __init__(self, path: Path, allocate: Callable[[int], Array]) -> None:
        """Read all of it. `allocate(size)`: memory, uint8 [size].

        Raises:
            OSError, ValueError: it is not there, or is none.
        """
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
            name: np.frombuffer(self._numbers.data, each.dtype, each.size, each.offset)
            for name, each in matrix.arrays.items()
        }


def is_whole(path: Path) -> bool:
    """Whether the arrays of a file are what was written; reads all of them.

    Raises:
        OSError, ValueError: it is not there, or is none.
    """
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
        """What is kept under that key, marked as used. A file that is damaged is removed."""
        path = self._path(key)
        try:
            found = PackedWeights(path, allocate)
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("%s: these packed weights are not used, but made again: %s", path, error)
            path.unlink(missing_ok=True)
            return None
        return found

    def keep(self, key: str, about: str, matrices: Mapping[str, tuple[str, Mapping[str, Array]]]) -> None:
        """Write the arrays of each matrix, with the dtype its weights are kept as. A disk that refuses is logged, and
        costs a later start its time alone."""
        header, pieces = _lay_out(about, matrices)
        size = sum(len(piece) for piece in (header, *pieces))
        if size > self.budget:
            log.warning(
                "packed weights are not kept: %d bytes are more than the cache may have (--cache-max-bytes %d)",
                size,
                self.budget,
            )
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
        """What is kept, the one used last first."""
        found = [_entry(path) for path in self.directory.glob(f"*{_SUFFIX}")]
        return sorted((each for each in found if each), key=lambda entry: -entry.used)

    def clear(self) -> int:
        """Remove everything; returns how many files that were."""
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
    whole = np.empty(size + _CACHE_LINE, np.uint8)  # kernels read from the beginning of cache lines on
    return whole[-whole.ctypes.data % _CACHE_LINE :][:size]


class Packing:
    """The packed matrices of one load: those that an earlier one kept, or else those that this one packs."""

    def __init__(
        self,
        cache: PackingCache | None = None,
        key: str = "",
        about: str = "",
        allocate: Callable[[int], Array] = _ordinary_memory,
    ) -> None:
        """Without a `cache` nothing is found, and nothing kept. `allocate`: the memory of what is found."""
        self._cache, self._key, self._about = cache, key, about
        self._found = None if cache is None else cache.find(key, allocate)
        self._made: dict[str, tuple[str, Mapping[str, Array]]] = {}

    @property
    def found(self) -> bool:
        return self._found is not None

    def find(self, name: str) -> tuple[str, dict[str, Array]] | None:
        """The dtype that the weights of matrix `name` are kept as, and its arrays."""
        matrix = None if self._found is None else self._found.header.matrices.get(name)
        return None if self._found is None or matrix is None else (matrix.kept, self._found.arrays(matrix))

    def add(self, name: str, kept: str, arrays: Mapping[str, Array]) -> None:
        if self._cache is not None:
            self._made[name] = kept, arrays

    def keep(self) -> None:
        """Write what was added, when all of it is there."""
        if self._cache is not None and self._made:
            self._cache.keep(self._key, self._about, self._made)
            self._made.clear()


def open_packing_cache(directory: Path, budget: int) -> PackingCache:
    """The cache in `directory`, which is made if it is not there.

    Raises:
        InvalidArgument: it can't be made, or somebody else may write to it: who does chooses the weights.
    """
    make_private_directory(directory, "cache_dir")
    return PackingCache(directory, budget)


def packing_key(files: Iterable[Path], facts: Mapping[str, Any]) -> str:
    """The key of what is packed from `files` as `facts` say: it changes with each file's identity, size, time and
    header, and with what packs it. Contents are not read."""
    made_from = [[*_identity(path)] for path in sorted(files)]
    what = json.dumps([FORMAT, __version__, made_from, facts], sort_keys=True)
    return sha256(what.encode()).hexdigest()[:40]


def _identity(path: Path) -> tuple[str, int, int, int, int, str]:
    with open_regular(path) as file:
        found, begin = os.fstat(file.fileno()), file.read(8)
        # The header of a safetensors file; of others, as much as may be one.
        length = int.from_bytes(begin, "little") if path.suffix == ".safetensors" else 1 << 16
        header = sha256(begin + file.read(min(length, _LARGEST_HEADER))).hexdigest()
    return path.name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, header


def _entry(path: Path) -> CacheEntry | None:
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            header, _ = _read_header(file.fileno())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return CacheEntry(path, path.stat().st_size, 0.0, "damaged, or of another version")
    return CacheEntry(path, found.st_size, found.st_mtime, header.about)


def _read_header(file: int) -> tuple[PackingHeader, int]:
    """The header, and where the arrays begin.

    Raises:
        ValueError: there is none, its checksum is another, or another version wrote it.
    """
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
    """The file's beginning, filled up to whole pages, and its arrays with what is between them."""
    stored, pieces, offset, content = {}, [], 0, sha256()
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
        os.fsync(file)  # before the name is there: a machine that loses power must not leave a half under it


def _bytes_of(array: StoredArray) -> int:
    return array.size * np.dtype(array.dtype).itemsize


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
