"""Reads tensors out of a checkpoint's files, slice by slice, and hands layers their weights.

Knows nothing of architectures.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple
from weakref import WeakValueDictionary
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...tokenization.checkpoint_files import refuse_lfs_pointer
from ..cpu.memory import HugePageArena
from .build_context import BuildContext, TensorGroup
from .hf_checkpoint import find_weights
from .model_spec import CheckpointError
from .packing_cache import Packing

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""The supported dtypes: safetensors' name -> torch's."""

WHOLE = slice(None)

TILE_BYTES = 1 << 24
"""Bytes of a matrix that are converted at a time while it is read: the memory needed beside the result."""


SAMPLED = 64
"""Rows of a matrix that are looked at to judge it."""


class TensorSlice(NamedTuple):
    """Some rows and, of a matrix, columns of a named tensor, which has `shape` in the checkpoint."""

    name: str
    shape: tuple[int, ...]
    rows: slice = WHOLE
    columns: slice = WHOLE

    @property
    def row_range(self) -> range:
        return range(*self.rows.indices(self.shape[0]))

    @property
    def label(self) -> str:
        """Tells it from any other part of the checkpoint."""
        rows, columns = self.row_range, range(*self.columns.indices(self.shape[1]))
        return f"{self.name}[{rows.start}:{rows.stop},{columns.start}:{columns.stop}]"

    @property
    def width(self) -> int:
        return len(range(*self.columns.indices(self.shape[1])))


class CheckpointWeights:
    """The weights in one directory, safetensors or torch's .bin: a single file, or shards under an index. Files are
    memory-mapped: `read` returns views, and nothing is copied before it is used."""

    def __init__(self, directory: Path, own_name: Callable[[str], str] = str) -> None:
        """`own_name`: from a tensor's name in the file to the name that `read` knows it by.

        Raises:
            CheckpointError: no weights, a missing shard, a truncated file.
        """
        files, by_tensor = find_weights(directory)
        self._where = directory
        self._open: dict[Path, Any] = {path: _open(path) for path in files}
        self._files = dict.fromkeys(self._open[files[0]].keys(), files[0]) if by_tensor is None else by_tensor
        self._stored = {own_name(stored): stored for stored in self._files}
        self._unread = set(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    @property
    def files(self) -> list[Path]:
        return list(self._open)

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self._open)

    @property
    def unread(self) -> list[str]:
        return sorted(self._unread)

    def read(self, piece: TensorSlice) -> Tensor:
        """A mapped view of `piece`, in the dtype it is stored in.

        Raises:
            CheckpointError: the tensor is missing, or its shape or dtype is not what is expected.
        """
        stored = self._stored.get(piece.name)
        if stored is None:
            raise CheckpointError(f"{self._where}: tensor {piece.name} is missing from the weights")
        path = self._files[stored]
        file = self._open[path]
        try:
            found = file[stored] if isinstance(file, dict) else file.get_slice(stored)
        except (SafetensorError, KeyError) as error:
            raise CheckpointError(f"{path}: tensor {stored} is missing, though the index puts it here") from error
        is_tensor = isinstance(found, Tensor)
        dtype = found.dtype if is_tensor else STORED.get(found.get_dtype(), found.get_dtype())
        shape = tuple(found.shape if is_tensor else found.get_shape())
        if dtype not in STORED.values():
            supported = f"which is not supported ({', '.join(STORED)} are)"
            raise CheckpointError(f"{path}: tensor {piece.name} has dtype {dtype}, {supported}")
        if shape != piece.shape:
            meant = f"config.json means {list(piece.shape)}"
            raise CheckpointError(f"{path}: tensor {piece.name} has shape {list(shape)}, but {meant}")
        self._unread.discard(stored)
        view: Tensor = found[piece.rows] if len(piece.shape) == 1 else found[piece.rows, piece.columns]
        return view


def _open(path: Path) -> Any:
    """The tensors of a file by their names: what `safe_open` returns, or a dict."""
    try:
        refuse_lfs_pointer(path)
        return _load_torch_file(path) if path.suffix == ".bin" else safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the file is missing") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: truncated or not a safetensors file: {error}") from error


def _load_torch_file(path: Path) -> dict[str, Tensor]:
    """A file of `torch.save`, by torch's safe loader, which runs none of its code; the oldest form is not mapped."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except (UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"{code[1]} is in it" if code else str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path}: truncated, or no weights that torch loads safely: {reason}") from error
    if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
        raise CheckpointError(f"{path}: it must hold tensors by their names, and nothing else")
    return found


class ReadProgress:
    """Counts the bytes that a rank reads, and calls `progress` with the fraction of those `expected`."""

    def __init__(self, expected: float, progress: Callable[[float], None]) -> None:
        self.bytes = 0
        self._expected, self._progress = expected, progress
        self._mapped: set[str] = set()

    def count(self, name: str, view: Tensor, mapped: bool = False) -> None:
        """Count a part of tensor `name`; one that is `mapped` counts once, though it is packed, too."""
        if name not in self._mapped:
            self.bytes += view.nbytes
        if mapped:
            self._mapped.add(name)
        self._progress(min(self.bytes / self._expected, 1.0))


class WeightLoader:
    """Hands layers this rank's slices of their weights, in the dtype and on the device of the build context."""

    def __init__(self, weights: CheckpointWeights, context: BuildContext, packing: Packing | None = None) -> None:
        """`packing`: the matrices that the CPU's kernels compute with, found or to be kept; None: neither."""
        self.context, self.packing = context, packing or Packing()
        self.dtype, self.device = context.dtype, context.device
        self.group, self.stage = context.shard.group, context.shard.stage
        self.memory = HugePageArena()
        """The memory of packed matrices."""
        self.reading = ReadProgress(weights.bytes / self.group.size / self.stage.count, context.progress)
        self._weights = weights
        self._shared: WeakValueDictionary[tuple[str, int, int], Tensor] = WeakValueDictionary()

    def for_group(self, group: TensorGroup) -> "WeightLoader":
        """This loader for layers that another group shares."""
        other = copy(self)
        other.group = group
        return other

    def vector(self, name: str, size: int) -> Tensor:
        return self.concatenate([TensorSlice(name, (size,))])

    def mapped(self, piece: TensorSlice) -> Tensor:
        """One slice: a mapped view of the file where dtype and device allow it, else a copy that all callers share."""
        key = (piece.name, piece.rows.start, piece.rows.stop)
        tensor = self._shared.get(key)
        if tensor is None:
            view = self._weights.read(piece)
            tensor = self._shared[key] = view.to(self.device, self.dtype)
            self.reading.count(piece.name, view, mapped=True)
        return tensor

    def concatenate(self, pieces: Iterable[TensorSlice]) -> Tensor:
        """The slices one below the other, in memory of their own."""
        pieces = list(pieces)
        views = [self._weights.read(piece) for piece in pieces]
        shape = (sum(len(view) for view in views), *views[0].shape[1:])
        whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        targets = torch.split(whole, [len(view) for view in views])
        for piece, target, view in zip(pieces, targets, views, strict=True):
            target.copy_(view)
            self.reading.count(piece.name, view)
        return whole

    def sample(self, piece: TensorSlice) -> Tensor:
        """Some rows of a matrix, float32 on the device: no more than SAMPLED, spread over all."""
        view = self._weights.read(piece)
        return view[:: -(-len(view) // SAMPLED)].to(self.device).float()

    def pass_over(self, pieces: Iterable[TensorSlice]) -> None:
        """Count matrices as read that need not be, because they were packed before. They must be there all the same."""
        for piece in pieces:
            self.reading.count(piece.name, self._weights.read(piece))

    def tiles(self, pieces: Iterable[TensorSlice]) -> Iterator[tuple[int, Tensor]]:
        """The matrices one below the other, a few rows at a time: (index of the first in the whole, mapped view)."""
        first = 0
        for piece in pieces:
            rows, row_bytes = piece.row_range, piece.shape[1] * torch.float32.itemsize
            step = max(TILE_BYTES // row_bytes, 1)
            for start in range(rows.start, rows.stop, step):
                part = piece._replace(rows=slice(start, min(start + step, rows.stop)))
                view = self._weights.read(part)
                yield first, view
                first += len(view)
                self.reading.count(piece.name, view)
