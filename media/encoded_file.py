"""What an encoder elsewhere made of an image, in a file: safetensors, or numpy's `.npy` of numbers alone. Nothing is
unpickled."""

import io
import struct
import tokenize
import zlib
from collections.abc import Sequence
from math import isqrt, prod
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ..core.errors import InvalidArgument
from ..core.media import EMBEDS
from ..core.native_calls import NativeCall

Grid: TypeAlias = tuple[int, int, int]

_GRIDS = "image_grid_thw"
_PICKLES = (b"PK", b"\x80")
"""How files of `torch.save`, new and old, and of `numpy.savez` begin."""
_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_WHOLE = {"I32": np.int32, "I64": np.int64}
_INFINITE = 0x7F80
"""The bits of bfloat16's exponent, which infinity and what is no number alone have all."""
_LARGEST_SIDE = 1 << 20
_LONGEST_HEADER, _MOST_DIMENSIONS = 1 << 16, 8
"""The most bytes of a header of safetensors, since the library holds Python's lock while it reads one, and the most
dimensions of what a file has: numpy has limits of its own."""


class EncodedImage(NamedTuple):
    """What a file has of one image."""

    rows: NDArray[Any]
    """[rows, width] in float32, float16, or the bits of bfloat16 as uint16."""
    grid: Grid = (0, 0, 0)
    """Its patches by time, height and width, if the file says so."""


def read_rows(data: bytes, width: int = 0) -> EncodedImage:
    """The rows of one image. Raises `InvalidArgument` for a pickle, another format, dtype or `width`, a file that is
    broken, and for numbers that are not finite."""
    long_header = int.from_bytes(data[:8], "little") > len(data)  # of safetensors, whose first bytes may be a pickle's
    if long_header and data.startswith(_PICKLES):
        raise InvalidArgument("it is a pickle (as torch.save writes), which is never read: send safetensors or .npy")
    image = _read_npy(data) if data.startswith(npy.MAGIC_PREFIX) else _read_safetensors(data)
    rows = image.rows.reshape(image.rows.shape[1:]) if image.rows.ndim == 3 and len(image.rows) == 1 else image.rows
    if rows.ndim != 2:
        raise InvalidArgument(f"it must be [rows, width], got {list(image.rows.shape)}")
    if width and rows.shape[1] != width:
        raise InvalidArgument(f"its rows have {rows.shape[1]} numbers, and this model's have {width}")
    finite = np.isfinite(rows) if rows.dtype != np.uint16 else (rows & _INFINITE) != _INFINITE
    if not finite.all():
        raise InvalidArgument(f"row {int(np.argmin(finite.all(1)))} has numbers that are not finite")
    return image._replace(rows=np.ascontiguousarray(rows))


def grid_of_places(grid: Grid, rows: int) -> Grid:
    """The grid of an image's places: its patches [time, height, width] joined to squares, so that `rows` are left.
    Raises `InvalidArgument` if none can be."""
    time, height, width = grid
    if min(grid) >= 1 and max(grid) < _LARGEST_SIDE:
        side = isqrt(prod(grid) // rows)
        if side and side * side * rows == prod(grid) and not (height % side or width % side):
            return time, height // side, width // side
    raise InvalidArgument(f"{_GRIDS} {list(grid)} does not lead to its {rows} rows")


def blank_image(width: int, height: int) -> bytes:
    """A black picture, as a file of PNG."""
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(height * (1 + width)), 1)),
        (b"IEND", b""),
    )
    chunks = (struct.pack(">I", len(data)) + name + data for name, data in parts)
    ends = (struct.pack(">I", zlib.crc32(name + data)) for name, data in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk + end for chunk, end in zip(chunks, ends, strict=True))


def _read_npy(data: bytes) -> EncodedImage:
    file = io.BytesIO(data)
    try:
        read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
        shape, by_columns, dtype = read(file)
    except (ValueError, TypeError, LookupError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError) as error:
        raise InvalidArgument(f"it is no .npy that is read: {error}") from error
    if dtype.str not in ("<f4", "<f2"):
        raise InvalidArgument(f"its dtype must be float32 or float16, got {dtype}")
    if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize != len(data) - file.tell():
        raise InvalidArgument(f"its data are not those of {dtype} {list(shape)}")
    return EncodedImage(_shaped(np.frombuffer(data, dtype, offset=file.tell()), shape, "F" if by_columns else "C"))


def _shaped(values: NDArray[Any], shape: Sequence[int], order: Literal["C", "F"] = "C") -> NDArray[Any]:
    """Raises `InvalidArgument` for a shape that has no numbers, or more dimensions than anything that is read."""
    if not values.size or len(shape) > _MOST_DIMENSIONS:
        raise InvalidArgument(f"it must be [rows, width], got {list(shape[:_MOST_DIMENSIONS])}")
    return values.reshape([int(size) for size in shape], order=order)


def _read_safetensors(data: bytes) -> EncodedImage:
    import safetensors

    if _LONGEST_HEADER < (header := int.from_bytes(data[:8], "little")) <= len(data):
        raise InvalidArgument(f"its header has {header:,} bytes, and may have {_LONGEST_HEADER:,}")
    deserialize: Any = safetensors.deserialize  # which has no types
    try:
        with NativeCall("the library failed"):
            tensors = dict(deserialize(data))
    except safetensors.SafetensorError as error:
        raise InvalidArgument(f"it is neither safetensors nor .npy: {error}") from error
    grids = tensors.pop(_GRIDS, None)
    tensor = tensors.get(EMBEDS) or next(iter(tensors.values()), None)
    if tensor is None or len(tensors) > 1:
        names = ", ".join(sorted(tensors)[:3])
        raise InvalidArgument(f"it must have one tensor, {EMBEDS}, and may have {_GRIDS}; it has {names or 'none'}")
    if tensor["dtype"] not in _FLOATS:
        raise InvalidArgument(f"its dtype must be one of {', '.join(_FLOATS)}, got {tensor['dtype']}")
    rows = _shaped(np.frombuffer(tensor["data"], _FLOATS[tensor["dtype"]]), tensor["shape"])
    if grids is None:
        return EncodedImage(rows)
    if grids["dtype"] not in _WHOLE or prod(grids["shape"]) != 3:
        raise InvalidArgument(f"{_GRIDS} must be three whole numbers, got {grids['dtype']} {grids['shape']}")
    time, height, width = np.frombuffer(grids["data"], _WHOLE[grids["dtype"]]).tolist()
    return EncodedImage(rows, (time, height, width))
