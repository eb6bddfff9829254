"""Reads tensors out of a checkpoint's files, slice by slice, and hands layers their weights.

Knows nothing of architectures.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from torch import Tensor

from ...tokenization.checkpoint_files import refuse_lfs_pointer
from ..cpu.matmul import GroupedRows
from ..cpu.memory import HugePageArena
from .build_context import BuildContext, TensorGroup
from .code_forms import CodeForm, CodeRange, StoredForm, common_form, turn_codes
from .hf_checkpoint import find_weights, open_safetensors
from .model_spec import CheckpointError
from .packing_cache import Packing
from .served_forms import ServedForm, ServedForms

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
    def column_range(self) -> range:
        return range(*self.columns.indices(self.shape[1]))

    @property
    def label(self) -> str:
        """Tells it from any other part of the checkpoint."""
        rows, columns = self.row_range, self.column_range
        return f"{self.name}[{rows.start}:{rows.stop},{columns.start}:{columns.stop}]"

    @property
    def width(self) -> int:
        return len(self.column_range)

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return len(self.row_range) * (self.width if len(self.shape) == 2 else 1)


class WeightSource(Protocol):
    """The weights of a checkpoint by the names of their tensors, whatever its files are. Matrices may be stored as
    integer codes (`code_forms.py`); as floats every tensor can be had."""

    @property
    def files(self) -> list[Path]:
        """All of them: packed weights are kept for exactly these."""

    @property
    def bytes(self) -> int: ...

    @property
    def unread(self) -> list[str]:
        """The names of tensors that nothing asked for, by `form`, `read` or `codes`."""

    @property
    def quantization(self) -> str | None:
        """The integers that its matrices are stored as, for people; None: it stores floats, which may be quantised
        while they are loaded."""

    def __contains__(self, name: str) -> bool: ...

    def form(self, piece: TensorSlice) -> StoredForm:
        """How the tensor of `piece` is stored. Checks all that can be checked without reading numbers.

        Raises:
            CheckpointError: the tensor is missing, broken, or not of the expected shape or a supported dtype.
        """

    def read(self, piece: TensorSlice) -> Tensor:
        """`piece` as floats: a mapped view in the dtype they are stored in, or dequantised, float32 in memory of its
        own. Callers take a few rows at a time.

        Raises:
            CheckpointError: as `form`.
        """

    def codes(self, piece: TensorSlice) -> GroupedRows:
        """The rows of `piece`, all columns of them, in the form that `form` has told.

        Raises:
            CheckpointError: as `form`, or a code means nothing.
        """


class CheckpointWeights:
    """A `WeightSource`: the weights in one directory, safetensors or torch's .bin: a single file, or shards under an
    index. Files are memory-mapped: `read` returns views, and nothing is copied before it is used."""

    def __init__(self, directory: Path, own_name: Callable[[str], str] = str) -> None:
        """`own_name`: from a tensor's name in the file to the name that `read` knows it by.

        Raises:
            CheckpointError: no weights, a missing shard, a truncated file.
        """
        files, by_tensor = find_weights(directory)
        self.where = directory
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

    @property
    def quantization(self) -> str | None:
        return None

    def form(self, piece: TensorSlice) -> StoredForm:
        dtype = self.read(piece).dtype
        return StoredForm(dtype_name(dtype), 8 * dtype.itemsize, plain=True)

    def codes(self, piece: TensorSlice) -> GroupedRows:
        raise CheckpointError(f"{self.where}: tensor {piece.name} is stored as floats")

    def read(self, piece: TensorSlice) -> Tensor:
        return self.view(piece, STORED)

    def view(self, piece: TensorSlice, dtypes: Mapping[str, torch.dtype]) -> Tensor:
        """A mapped view of `piece`, in the dtype it is stored in, one of `dtypes` by their names in safetensors.

        Raises:
            CheckpointError: the tensor is missing, or its shape or dtype is not what is expected.
        """
        stored, path, found = self._find(piece.name)
        dtype, shape = _described(found)
        dtype = dtypes.get(str(dtype), dtype)
        if dtype not in dtypes.values():
            supported = f"which is not supported ({', '.join(dtypes)} are)"
            raise CheckpointError(f"{path}: tensor {piece.name} has dtype {dtype}, {supported}")
        if shape != piece.shape:
            meant = f"config.json means {list(piece.shape)}"
            raise CheckpointError(f"{path}: tensor {piece.name} has shape {list(shape)}, but {meant}")
        self._unread.discard(stored)
        if not shape:
            return found if isinstance(found, Tensor) else self._open[path].get_tensor(stored)
        view: Tensor = found[piece.rows] if len(shape) == 1 else found[piece.rows, piece.columns]
        return view

    def described(self, name: str) -> tuple[torch.dtype | str, tuple[int, ...]]:
        """The dtype of tensor `name`, by its name in safetensors or as torch has it, and its shape.

        Raises:
            CheckpointError: the tensor is missing.
        """
        return _described(self._find(name)[2])

    def _find(self, name: str) -> tuple[str, Path, Any]:
        """The name in the file, the file, and the tensor or what `safe_open` has of it."""
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"{self.where}: tensor {name} is missing from the weights")
        path = self._files[stored]
        file = self._open[path]
        try:
            return stored, path, file[stored] if isinstance(file, dict) else file.get_slice(stored)
        except (SafetensorError, KeyError) as error:
            raise CheckpointError(f"{path}: tensor {stored} is missing, though the index puts it here") from error


def _described(found: Any) -> tuple[torch.dtype | str, tuple[int, ...]]:
    if isinstance(found, Tensor):
        return found.dtype, tuple(found.shape)
    return found.get_dtype(), tuple(found.get_shape())


def _open(path: Path) -> Any:
    """The tensors of a file by their names: what `safe_open` returns, or a dict."""
    try:
        refuse_lfs_pointer(path)
        return _load_torch_file(path) if path.suffix == ".bin" else open_safetensors(path, "pt")
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

    def count(self, piece: TensorSlice, form: StoredForm, mapped: bool = False) -> None:
        """Count what `piece` takes in its file; one that is `mapped` counts once, though it is packed, too."""
        if piece.name not in self._mapped:
            self.bytes += int(piece.size * form.bits / 8)
        if mapped:
            self._mapped.add(piece.name)
        self._progress(min(self.bytes / self._expected, 1.0))


class WeightLoader:
    """Hands layers this rank's slices of their weights, in the dtype and on the device of the build context."""

    def __init__(self, weights: WeightSource, context: BuildContext, packing: Packing | None = None) -> None:
        """`packing`: the matrices that the CPU's kernels compute with, found or to be kept; None: neither."""
        self.context, self.packing = context, packing or Packing()
        self.dtype, self.device = context.dtype, context.device
        self.group, self.stage = context.shard.group, context.shard.stage
        self.memory = HugePageArena()
        """The memory of packed matrices."""
        self.served = ServedForms()
        self.reading = ReadProgress(weights.bytes / self.group.size / self.stage.count, context.progress)
        self.adaptable: list[list[TensorSlice]] | None = [] if context.max_lora_rank else None
        """The slices of each product that adapters may change, in the order of building; None: adapters change none."""
        self.elsewhere = set[str]()
        """The paths of linear layers that other ranks of the group have whole, and this one has nothing of."""
        self._weights = weights
        self._shared: WeakValueDictionary[tuple[str, int, int], Tensor] = WeakValueDictionary()

    def for_group(self, group: TensorGroup) -> "WeightLoader":
        """This loader for layers that another group shares."""
        other = copy(self)
        other.group = group
        return other

    def vector(self, name: str, size: int) -> Tensor:
        return self.concatenate([TensorSlice(name, (size,))])

    def floats(self, name: str, *shape: int) -> Tensor:
        """A small tensor of any shape in float32, in memory of its own: what must not be rounded to the model's dtype,
        such as the logarithms of decays."""
        piece = TensorSlice(name, shape)
        self.pass_over([piece])
        return self._weights.read(piece).to(self.device, torch.float32, copy=True)

    def mapped(self, piece: TensorSlice) -> Tensor:
        """One slice: a mapped view of the file where dtype and device allow it, else a copy that all callers share.

        Of a view only the rows that are used come into memory, so it counts for none.
        """
        key = (piece.name, piece.rows.start, piece.rows.stop)
        tensor = self._shared.get(key)
        if tensor is None:
            form = self._weights.form(piece)
            stored = self._weights.read(piece) if form.plain else self.concatenate([piece])
            tensor = self._shared[key] = stored.to(self.device, self.dtype)
            self.reading.count(piece, form, mapped=True)
            if not form.plain or stored.dtype != self.dtype or self.device.type not in ("cpu", "meta"):
                self.count_floats([piece], product=False)
        return tensor

    def concatenate(self, pieces: Iterable[TensorSlice]) -> Tensor:
        """The slices one below the other, in memory of their own."""
        pieces = list(pieces)
        shape = sum(len(piece.row_range) for piece in pieces), *([pieces[0].width] if len(pieces[0].shape) == 2 else [])
        whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        if self.device.type == "meta":
            self.pass_over(pieces)
            return whole
        for first, part in self._parts(pieces):
            rows = self._weights.read(part)
            whole[first : first + len(rows)].copy_(rows)
        return whole

    def sample(self, piece: TensorSlice) -> Tensor:
        """Some rows of a matrix, float32 on the device: no more than SAMPLED, spread over all."""
        view = self._weights.read(piece)
        return view[:: -(-len(view) // SAMPLED)].to(self.device).float()

    def pass_over(self, pieces: Iterable[TensorSlice]) -> None:
        """Count matrices as read that need not be, because they were packed before. They must be there all the same."""
        for piece in pieces:
            self.reading.count(piece, self._weights.form(piece))

    def tiles(self, pieces: Iterable[TensorSlice]) -> Iterator[tuple[int, Tensor]]:
        """The tensors one below the other as floats, a few rows at a time: (index of the first in the whole, rows)."""
        return ((first, self._weights.read(part)) for first, part in self._parts(pieces))

    def common_form(self, pieces: Sequence[TensorSlice]) -> CodeForm | None:
        """The form that `code_tiles` can turn the codes of all these matrices into; None: some are stored as floats, or
        there is no such form."""
        parts = [self._code_range(piece) for piece in pieces]
        whole = [part for part in parts if part is not None]
        return common_form(whole) if len(whole) == len(parts) else None

    def code_tiles(self, pieces: Iterable[TensorSlice], to: CodeForm) -> Iterator[tuple[int, GroupedRows]]:
        """As `tiles`, but the codes that are stored, in the form `to`."""
        for first, part in self._parts(pieces):
            found = self._code_range(part)
            assert found is not None, "a common form is of codes"
            yield first, turn_codes(self._weights.codes(part), found, to)

    def count_served(
        self, pieces: Iterable[TensorSlice], kept: str, bits: float, error: float | None, product: bool = True
    ) -> None:
        """Matrices are kept as `kept`, `bits` a number (see `ServedForm`), to be read whole by each step if they belong
        to a `product`."""
        for piece in pieces:
            form = self._weights.form(piece)
            served = ServedForm(form.name, kept, error, form.plain)
            self.served.add(served, piece.size, form.bits, bits, product)

    def count_floats(self, pieces: Iterable[TensorSlice], product: bool = True) -> None:
        """Matrices are floats of the model's dtype."""
        error = 0.0 if self.dtype == torch.float32 else torch.finfo(self.dtype).eps / 2
        self.count_served(pieces, dtype_name(self.dtype), 8 * self.dtype.itemsize, error, product)

    def _code_range(self, piece: TensorSlice) -> CodeRange | None:
        codes = self._weights.form(piece).codes
        return None if codes is None else CodeRange(codes, piece.column_range, piece.shape[1])

    def _parts(self, pieces: Iterable[TensorSlice]) -> Iterator[tuple[int, TensorSlice]]:
        first = 0
        for piece in pieces:
            rows, form = piece.row_range, self._weights.form(piece)
            row_bytes = (piece.shape[1] if len(piece.shape) == 2 else 1) * torch.float32.itemsize
            step = max(TILE_BYTES // row_bytes, 1)
            for start in range(rows.start, rows.stop, step):
                part = piece._replace(rows=slice(start, min(start + step, rows.stop)))
                yield first, part
                first += len(part.row_range)
                self.reading.count(part, form)


def dtype_name(dtype: torch.dtype) -> str:
    """As config.json and options have it."""
    return str(dtype).removeprefix("torch.")
