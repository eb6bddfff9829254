"""Checks of weight files by their names, indexes and headers, before a library opens them: libraries hold the GIL while
they read headers."""

import os
from pathlib import Path

import msgspec

from ..core.errors import InvalidArgument
from ..core.regular_files import count_bytes, file_within, open_regular, read_regular
from .checkpoint_files import refuse_lfs_pointer

_LARGEST_HEADER = 1 << 23
"""The most bytes of a header: some 80,000 tensors."""

_LARGEST_INDEX, _MOST_TENSORS, _MOST_SHARDS = 1 << 27, 1 << 20, 1 << 13
"""The limits of an index: bytes, tensors and files. Qwen3.5-397B-A17B in GPTQ has up to 369,000 tensors: four for
each matrix of 30,720 experts. A tensor takes some 105 bytes, so that as many as there may be have room."""


class _Index(msgspec.Struct, frozen=True):
    """What is read of an index; the rest of it takes no memory."""

    weight_map: dict[str, str]


def refuse_long_header(path: Path) -> None:
    """Raises `InvalidArgument` for a safetensors file whose header takes long to read, and as `open_regular`."""
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if _LARGEST_HEADER < length <= os.fstat(file.fileno()).st_size:
            raise InvalidArgument(f"{path}: its header has {length} bytes, and may have {_LARGEST_HEADER} at most")


def read_weight_index(path: Path) -> dict[str, Path]:
    """The file of each tensor by an index. Raises `InvalidArgument` if it is none, takes long to read, or names a file
    outside its directory."""
    refuse_lfs_pointer(path)
    weight_map = _read_index(path).weight_map
    shards = {name: file_within(path.parent, name) for name in dict.fromkeys(weight_map.values())}
    if len(shards) > _MOST_SHARDS:
        raise InvalidArgument(f"{path}: it names {len(shards)} files, and may name {_MOST_SHARDS} at most")
    return {tensor: shards[name] for tensor, name in weight_map.items()}


def _read_index(path: Path) -> _Index:
    content = read_regular(path, _LARGEST_INDEX)
    if count_bytes(content, b":") > _MOST_TENSORS:
        raise InvalidArgument(f"{path}: it names more than {_MOST_TENSORS} tensors")
    try:
        return msgspec.json.decode(content, type=_Index)
    except msgspec.ValidationError:
        raise InvalidArgument(f"{path}: not an index of weights: it has no weight_map of file names") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error


def check_weight_files(directory: Path) -> None:
    """Check all files that a library may open in a directory. Raises as the above."""
    for path in directory.rglob("*.safetensors"):
        refuse_long_header(path)
    for path in directory.rglob("*.index.json"):
        read_weight_index(path)
