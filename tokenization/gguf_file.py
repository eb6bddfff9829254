"""Reads the metadata and the tensor table of a GGUF file, or of its shards, but no tensor's data.

Every count, length and offset is checked against the file first. Specification: ggml, docs/gguf.md.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from ..core.errors import InvalidArgument, NotFound
from ..core.gguf_files import shard_paths
from ..core.regular_files import open_regular
from .checkpoint_files import refuse_lfs_pointer

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_LARGEST_HEADER = 1 << 28
"""The most bytes of metadata and tensor table. Vocabularies of 260,000 tokens take 20 million."""
_MOST_DIMS = 4
_ALIGNMENT = 32
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING = 8
_ARRAY = 9


class TensorType(NamedTuple):
    """A storage type: blocks of `values` numbers in `bytes` bytes."""

    name: str
    values: int
    bytes: int

    @property
    def kept_bytes(self) -> float:
        """The bytes of a number in memory: kernels compute with four and with eight bits."""
        stored_bytes = self.bytes / self.values
        return stored_bytes if stored_bytes < 0.7 else 1.125


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}
"""The supported types by ggml's number."""

_OTHER_TYPES = {9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
_OTHER_TYPES |= {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64"}
_OTHER_TYPES |= {28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"}
"""The names of types that are refused."""


class StringArray(NamedTuple):
    """An array of strings as stored, decoded on demand."""

    data: bytes
    length: int

    def read(self) -> list[str]:
        strings = []
        at = 0
        for _ in range(self.length):
            end = at + 8 + int.from_bytes(self.data[at : at + 8], "little")
            strings.append(self.data[at + 8 : end].decode())
            at = end
        return strings


MetadataValue: TypeAlias = "int | float | bool | str | npt.NDArray[Any] | StringArray"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's place, `offset` bytes from the beginning of `file`. `shape` has the rows first, as in torch."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    file: Path
    offset: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) // self.type.values * self.type.bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model in one file, or in `files`, its shards, of which the first has the metadata."""

    path: Path
    files: tuple[Path, ...]
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, GgufTensor]
    prefix: str = ""
    """The prefix of every key that is read: empty, or an architecture's name and a dot."""

    def error(self, message: str) -> InvalidArgument:
        return InvalidArgument(f"{self.path}: {message}")

    def value(self, key: str, default: object = None) -> Any:
        """The value of a field, of any kind."""
        return self.metadata.get(f"{self.prefix}{key}", default)

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._value(key, default, (str,), "text"))

    def number(self, key: str, default: int | None = None) -> int:
        return int(self._value(key, default, (int,), "a whole number"))

    def real(self, key: str, default: float | None = None) -> float:
        return float(self._value(key, default, (int, float), "a number"))

    def flag(self, key: str, default: bool | None = None) -> bool:
        return bool(self._value(key, default, (bool,), "true or false"))

    def numbers(self, key: str) -> npt.NDArray[Any]:
        numbers: npt.NDArray[Any] = self._value(key, None, (np.ndarray,), "an array of numbers")
        return numbers

    def strings(self, key: str) -> list[str]:
        try:
            return list(self._value(key, None, (StringArray,), "an array of strings").read())
        except UnicodeDecodeError as error:
            raise self.error(f"a string of {key} is not UTF-8: {error}") from error

    def _value(self, key: str, default: Any, kinds: tuple[type, ...], expected: str) -> Any:
        """The value of a field. Raises `InvalidArgument` if it is missing without a default, or of another kind."""
        value = self.value(key, default)
        if value is None:
            raise self.error(f"its metadata has no {self.prefix}{key}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            got = repr(value)[:80] if isinstance(value, str | int | float) else "an array"
            raise self.error(f"{self.prefix}{key} must be {expected}, got {got}")
        return value


def read_gguf(path: Path) -> GgufFile:
    """The model in a file, with all its shards.

    Raises:
        NotFound: a shard is missing.
        InvalidArgument: it is no GGUF file, is broken, or has something unsupported; the message says what.
    """
    shards = shard_paths(path)
    first, *others = (_read_one(shard) for shard in shards)
    count = first.number("split.count", 1)
    tensors = dict(first.tensors)
    if max(count, 1) != len(shards):
        raise first.error(f"its split.count is {count}, but its name means {len(shards)} files")
    for number, shard in enumerate(others, 1):
        if (shard.number("split.no"), shard.number("split.count")) != (number, count):
            raise shard.error(f"it is not part {number + 1} of {count}, as its name says")
        if duplicate := next((name for name in shard.tensors if name in tensors), None):
            raise shard.error(f"tensor {duplicate} is in another shard, too")
        tensors |= shard.tensors
    if others and (total := first.number("split.tensors.count")) != len(tensors):
        raise first.error(f"its shards have {len(tensors)} tensors, not {total} as split.tensors.count says")
    return GgufFile(first.path, shards, first.metadata, tensors)


def _read_one(path: Path) -> GgufFile:
    try:
        refuse_lfs_pointer(path)
        if not path.stat().st_size:
            raise InvalidArgument(f"{path}: no GGUF file: it is empty")
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return GgufFile(path, (path,), *_Header(path, content).read())
    except FileNotFoundError:
        raise NotFound(f"{path}: the file is missing") from None
    except ValueError as error:
        raise InvalidArgument(f"{path}: no GGUF file: {error}") from error
    except OSError as error:
        raise InvalidArgument(f"{path}: {error}") from error


class _Header:
    """The beginning of a file, read from front to back."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._at = 0
        self._size = len(content)
        self._end = min(len(content), _LARGEST_HEADER)

    def read(self) -> tuple[dict[str, MetadataValue], dict[str, GgufTensor]]:
        if self._take(4) != _MAGIC:
            self._fail("no GGUF file: it does not begin with GGUF")
        version = self._number("<I")
        if version not in _VERSIONS:
            other = "big-endian" if version and not version % (1 << 24) else f"of version {version}"
            self._fail(
                f"it is {other}; little-endian files of version {' and '.join(map(str, _VERSIONS))} are supported"
            )
        tensors, pairs = self._count(8 + 4 + 4 + 8), self._count(8 + 4)
        metadata: dict[str, MetadataValue] = {}
        for _ in range(pairs):
            key = self._string()
            if key in metadata:
                self._fail(f"its metadata has {key} twice")
            metadata[key] = self._value(self._number("<I"), key)
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            self._fail(f"general.alignment must be a power of two from 8 to 65536, got {alignment!r}")
        return metadata, self._tensors(tensors, alignment)

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        descriptions = [self._tensor(alignment) for _ in range(count)]
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        end = 0
        for name, shape, kind, offset in sorted(descriptions, key=lambda description: description[3]):
            tensors[name] = tensor = GgufTensor(name, shape, kind, self._path, start + offset)
            if offset < end:
                self._fail(f"tensor {name} overlaps another one")
            end = offset + tensor.bytes
            if start + end > self._size:
                self._fail(f"truncated: tensor {name} ends at byte {start + end} of {self._size}")
        if len(tensors) != len(descriptions):
            self._fail("two of its tensors have the same name")
        return tensors

    def _tensor(self, alignment: int) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = self._string()
        dims = self._number("<I")
        if not 1 <= dims <= _MOST_DIMS:
            self._fail(f"tensor {name} has {dims} dimensions; 1 to {_MOST_DIMS} are possible")
        shape = tuple(self._number("<Q") for _ in range(dims))[::-1]
        number = self._number("<I")
        offset = self._number("<Q")
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            type_name = _OTHER_TYPES.get(number, "unknown")
            supported = ", ".join(tensor_type.name for tensor_type in TENSOR_TYPES.values())
            self._fail(f"tensor {name} has type {type_name} ({number}), which is not supported; supported: {supported}")
        if min(shape) < 1 or prod(shape) > self._size * kind.values or shape[-1] % kind.values:
            self._fail(f"tensor {name} of type {kind.name} can't have shape {list(shape)}")
        if offset % alignment:
            self._fail(f"tensor {name} begins at {offset}, which is no multiple of {alignment}")
        return name, shape, kind, offset

    def _value(self, kind: int, key: str) -> MetadataValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._number("<I"), key)
        if kind not in _NUMBERS:
            self._fail(f"{key} has a value of kind {kind}, which GGUF has not")
        dtype = np.dtype(_NUMBERS[kind])
        value: int | float | bool = np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()
        return value

    def _array(self, kind: int, key: str) -> MetadataValue:
        if kind == _STRING:
            count = self._count(8)
            start = self._at
            for _ in range(count):
                self._at += 8 + int.from_bytes(self._content[self._at : self._at + 8], "little")
                if self._at > self._end:
                    self._fail_at_end()
            return StringArray(self._content[start : self._at], count)
        if kind not in _NUMBERS:
            self._fail(f"{key} is an array of kind {kind}, which is not supported")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._take(self._count(dtype.itemsize) * dtype.itemsize), dtype)

    def _string(self) -> str:
        try:
            return self._take(self._number("<Q")).decode()
        except UnicodeDecodeError as error:
            self._fail(f"a name or a text before byte {self._at} is not UTF-8: {error}")

    def _count(self, least: int) -> int:
        """Read a count of things of at least `least` bytes each."""
        count = self._number("<Q")
        if count > (self._end - self._at) // least:
            self._fail_at_end()
        return count

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    def _take(self, size: int) -> bytes:
        if size > self._end - self._at:
            self._fail_at_end()
        self._at += size
        return self._content[self._at - size : self._at]

    def _fail_at_end(self) -> NoReturn:
        if self._end < self._size:
            self._fail(f"its metadata and table of tensors take more than {_LARGEST_HEADER} bytes")
        self._fail(f"truncated, or no GGUF file: something in it ends after its last byte, {self._size}")

    def _fail(self, message: str) -> NoReturn:
        raise InvalidArgument(f"{self._path}: {message}")
