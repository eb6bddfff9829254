"""Checks of weight files by their names, indexes and headers, before a library opens them: libraries hold the GIL while
they read headers."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..core.errors import InvalidArgument
from ..core.regular_files import count_bytes, file_within, open_regular, read_regular
from .checkpoint_files import refuse_lfs_pointer

_LARGEST_HEADER = 1 << 23
"""The most bytes of a header: some 80,000 tensors."""

_LARGEST_INDEX, _MOST_TENSORS, _MOST_SHARDS = 1 << 26, 1 << 20, 1 << 13
"""The limits of an index: bytes, tensors and files. Qwen3.5-397B-A17B in GPTQ has up to 369,000 tensors: four for
each matrix of 30,720 experts."""


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
    weight_map = _read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise InvalidArgument(f"{path}: not an index of weights: it has no weight_map of file names")
    shards = {name: file_within(path.parent, name) for name in dict.fromkeys(weight_map.values())}
    if len(shards) > _MOST_SHARDS:
        raise InvalidArgument(f"{path}: it names {len(shards)} files, and may name {_MOST_SHARDS} at most")
    return {tensor: shards[name] for tensor, name in weight_map.items()}


def _read_object(path: Path) -> Mapping[str, Any]:
    content = read_regular(path, _LARGEST_INDEX)
    if count_bytes(content, b":") > _MOST_TENSORS:
        raise InvalidArgument(f"{path}: it names more than {_MOST_TENSORS} tensors")
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error


def check_weight_files(directory: Path) -> None:
    """Check all files that a library may open in a directory. Raises as the above."""
    for path in directory.rglob("*.safetensors"):
        refuse_long_header(path)
    for path in directory.rglob("*.index.json"):
        read_weight_index(path)
