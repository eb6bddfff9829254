"""Reads tensors out of a checkpoint's files, slice by slice, for layers. Knows nothing of architectures."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..cpu import library
from ..cpu.matmul import GroupedRows
from ..cpu.memory import HugePageArena
from ..gpu.pinned_memory import pinned_empty
from .build_context import BuildContext, TensorGroup
from .code_forms import CodeForm, CodeRange, StoredForm, common_form, turn_codes
from .hf_checkpoint import find_weights
from .model_spec import CheckpointError
from .packing_cache import Packing
from .row_table import RowTable
from .served_forms import ServedForm, ServedForms, float_error
from .stacked_experts import StackedMatrix, stacked_matrices
from .weight_files import describe, open_weight_file

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""The supported dtypes: safetensors' name -> torch's."""

WHOLE = slice(None)

TILE_BYTES = 1 << 24
"""Bytes of a matrix that are converted at a time: the memory that reading needs beside the result."""

SAMPLED = 64
"""Rows of a matrix by which it is judged."""


class TensorSlice(NamedTuple):
    """Some rows, and columns of a matrix, of a tensor that has `shape` in the checkpoint."""

    name: str
    shape: tuple[int, ...]
    rows: slice = WHOLE
    columns: slice = WHOLE
    factor: float = 1.0
    """What its numbers are multiplied by for a product."""

    @property
    def row_range(self) -> range:
        return range(*self.rows.indices(self.shape[0]))

    @property
    def column_range(self) -> range:
        return range(*self.columns.indices(self.shape[1]))

    @property
    def label(self) -> str:
        """A name that no other slice of the checkpoint has."""
        rows, columns = self.row_range, self.column_range
        factor = "" if self.factor == 1 else f" times {self.factor}"
        step = "" if rows.step == 1 else f":{rows.step}"
        return f"{self.name}[{rows.start}:{rows.stop}{step},{columns.start}:{columns.stop}]{factor}"

    @property
    def width(self) -> int:
        return len(self.column_range)

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return len(self.row_range) * (self.width if len(self.shape) == 2 else 1)


class WeightSource(Protocol):
    """The weights of a checkpoint by the names of their tensors, whatever its files are. Matrices may be stored as
    codes (`code_forms.py`); every tensor can be read as floats."""

    @property
    def files(self) -> list[Path]:
        """All files of weights, which the key of packed weights names."""

    @property
    def bytes(self) -> int: ...

    @property
    def unread(self) -> list[str]:
        """The names of tensors that neither `form` nor `read` nor `codes` was called for."""

    @property
    def quantization(self) -> str | None:
        """The integers that matrices are stored as, for people; None: floats."""

    def __contains__(self, name: str) -> bool: ...

    def form(self, piece: TensorSlice) -> StoredForm:
        """How the tensor of `piece` is stored. Raises `CheckpointError` if it is missing, broken, or not of the
        expected shape or a supported dtype."""

    def read(self, piece: TensorSlice) -> Tensor:
        """`piece` as floats: a mapped view in the stored dtype, or dequantised in float32. Callers take a few rows at a
        time. Raises as `form`."""

    def codes(self, piece: TensorSlice) -> GroupedRows:
        """The rows of `piece` with all columns, in the codes of `form`. Raises `CheckpointError` as `form`, and for an
        invalid code."""

    def blocks(self, piece: TensorSlice) -> tuple[str, Tensor] | None:
        """The rows of `piece` as the file has them, uint8 [rows, bytes], and which of BLOCKS they consist of; None: of
        none. Raises as `form`."""


class CheckpointWeights:
    """A `WeightSource` over safetensors or torch's .bin in a directory, a file or shards under an index. Files are
    memory-mapped, and `read` returns views."""

    def __init__(self, directory: Path, own_name: Callable[[str], str] = str) -> None:
        """`own_name`: from a tensor's name in the file to the name that `read` knows it by.

        Raises:
            CheckpointError: no weights, a missing shard, a truncated file.
        """
        files, by_tensor = find_weights(directory)
        self.where = directory
        self._open: dict[Path, Any] = {path: open_weight_file(path) for path in files}
        self._files = dict.fromkeys(self._open[files[0]].keys(), files[0]) if by_tensor is None else by_tensor
        self._stored = {own_name(stored): stored for stored in self._files}
        self._unread = set(self._files)
        self._stacked: dict[str, StackedMatrix] = {}
        self._stacked = stacked_matrices(self._stored, lambda name: self.described(name)[1])

    def __contains__(self, name: str) -> bool:
        return name in self._stored or name in self._stacked

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

    def blocks(self, piece: TensorSlice) -> tuple[str, Tensor] | None:
        return None

    def read(self, piece: TensorSlice) -> Tensor:
        return self.view(piece, STORED)

    def view(self, piece: TensorSlice, dtypes: Mapping[str, torch.dtype]) -> Tensor:
        """A mapped view of `piece` in its stored dtype, which must be one of `dtypes` (safetensors' name -> torch's).
        Raises `CheckpointError` for a missing tensor, or another shape or dtype."""
        matrix = self._stacked.get(piece.name)
        stored, path, tensor = self._find(piece.name if matrix is None else matrix.stored)
        dtype, shape = describe(tensor)
        if matrix is not None:
            shape = matrix.shape(shape)
        dtype = dtypes.get(str(dtype), dtype)
        if dtype not in dtypes.values():
            supported = f"which is not supported ({', '.join(dtypes)} are)"
            raise CheckpointError(f"{path}: tensor {piece.name} has dtype {dtype}, {supported}")
        if shape != piece.shape:
            meant = f"config.json means {list(piece.shape)}"
            raise CheckpointError(f"{path}: tensor {piece.name} has shape {list(shape)}, but {meant}")
        self._unread.discard(stored)
        if not shape:
            return tensor if isinstance(tensor, Tensor) else self._open[path].get_tensor(stored)
        if matrix is not None:
            return matrix.view(tensor, piece.row_range, piece.columns)
        view: Tensor = tensor[piece.rows] if len(shape) == 1 else tensor[piece.rows, piece.columns]
        return view

    def described(self, name: str) -> tuple[torch.dtype | str, tuple[int, ...]]:
        """The dtype of tensor `name`, torch's or its name in safetensors, and its shape. Raises `CheckpointError` if it
        is missing."""
        if (matrix := self._stacked.get(name)) is not None:
            dtype, shape = describe(self._find(matrix.stored)[2])
            return dtype, matrix.shape(shape)
        return describe(self._find(name)[2])

    def _find(self, name: str) -> tuple[str, Path, Any]:
        """The name in the file, the file, and the tensor, or `safe_open`'s slice of it."""
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"{self.where}: tensor {name} is missing from the weights")
        path = self._files[stored]
        file = self._open[path]
        try:
            return stored, path, file[stored] if isinstance(file, dict) else file.get_slice(stored)
        except (SafetensorError, KeyError) as error:
            raise CheckpointError(f"{path}: tensor {stored} is missing, though the index puts it here") from error


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

    def for_dtype(self, dtype: torch.dtype) -> "WeightLoader":
        """This loader for layers that compute in another dtype."""
        other = copy(self)
        other.dtype = dtype
        return other

    def has(self, name: str) -> bool:
        """Whether the checkpoint has such a tensor, where it may be stored in more than one form."""
        return name in self._weights

    def vector(self, name: str, size: int) -> Tensor:
        return self.concatenate([TensorSlice(name, (size,))])

    def floats(self, name: str, *shape: int) -> Tensor:
        """A small tensor in float32, which must not be rounded to the model's dtype, such as the logarithms of
        decays."""
        piece = TensorSlice(name, shape)
        self.pass_over([piece])
        return self._weights.read(piece).to(self.device, torch.float32, copy=True)

    def number(self, name: str) -> float:
        """A tensor [1]."""
        piece = TensorSlice(name, (1,))
        self.pass_over([piece])
        return float(self._weights.read(piece)[0])

    def mapped(self, piece: TensorSlice) -> Tensor:
        """One slice: a mapped view of the file where dtype and device allow it, else a copy that all callers share. A
        view counts as no memory, since only the rows in use are read."""
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

    def table(self, piece: TensorSlice, on_host: bool = False) -> RowTable:
        """A table of which a step takes single rows: in blocks where the file has them and kernels decode them, else as
        `mapped`, or with `on_host` in the host's memory."""
        pinned = on_host and self.device.type not in ("cpu", "meta")
        blocks = self._weights.blocks(piece) if library.supports(self.dtype, self.device) else None
        if blocks is not None:
            form = self._weights.form(piece)
            self.reading.count(piece, form, mapped=True)
            self.count_served([piece], form.name, form.bits, float_error(self.dtype), product=False)
            return RowTable(blocks[1], piece.width, self.dtype, blocks[0])
        if not pinned:
            return RowTable(self.mapped(piece), piece.width, self.dtype)
        table = pinned_empty((len(piece.row_range), piece.width), self.dtype)
        for first, rows in self.tiles([piece]):
            table[first : first + len(rows)].copy_(rows)
        return RowTable(table, piece.width, self.dtype)

    def concatenate(self, pieces: Iterable[TensorSlice]) -> Tensor:
        """The slices, concatenated by rows, in memory of their own."""
        pieces = list(pieces)
        shape = sum(len(piece.row_range) for piece in pieces), *([pieces[0].width] if len(pieces[0].shape) == 2 else [])
        whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        if self.device.type == "meta":
            self.pass_over(pieces)
            return whole
        for first, part in self._parts(pieces):
            rows = self._read(part)
            whole[first : first + len(rows)].copy_(rows)
        return whole

    def sample(self, piece: TensorSlice) -> Tensor:
        """At most SAMPLED rows, spread over a matrix, float32 on the device."""
        view = self._read(piece)
        return view[:: -(-len(view) // SAMPLED)].to(self.device).float()

    def pass_over(self, pieces: Iterable[TensorSlice]) -> None:
        """Count matrices as read that were packed before. They must exist all the same."""
        for piece in pieces:
            self.reading.count(piece, self._weights.form(piece))

    def tiles(self, pieces: Iterable[TensorSlice]) -> Iterator[tuple[int, Tensor]]:
        """The tensors, concatenated by rows, as floats: a few rows at a time, with the index of the first."""
        return ((first, self._read(part)) for first, part in self._parts(pieces))

    def common_form(self, pieces: Sequence[TensorSlice]) -> CodeForm | None:
        """The form to which `code_tiles` can convert the codes of all pieces; None: some are stored as floats, or no
        form is common."""
        parts = [self._code_range(piece) for piece in pieces]
        whole = [part for part in parts if part is not None]
        return common_form(whole) if len(whole) == len(parts) else None

    def code_tiles(self, pieces: Iterable[TensorSlice], to: CodeForm) -> Iterator[tuple[int, GroupedRows]]:
        """As `tiles`, but codes, converted to the form `to`."""
        for first, part in self._parts(pieces):
            stored = self._code_range(part)
            assert stored is not None, "a common form is of codes"
            yield first, turn_codes(self._codes(part), stored, to)

    def count_served(
        self, pieces: Iterable[TensorSlice], kept: str, bits: float, error: float | None, product: bool = True
    ) -> None:
        """Count matrices that are kept as `kept`, `bits` a number (see `ServedForm`). Each step reads those of a
        `product` whole."""
        for piece in pieces:
            form = self._weights.form(piece)
            served = ServedForm(form.name, kept, error, form.plain)
            self.served.add(served, piece.size, form.bits, bits, product)

    def count_floats(self, pieces: Iterable[TensorSlice], product: bool = True) -> None:
        """Count matrices that are floats of the model's dtype."""
        self.count_served(pieces, dtype_name(self.dtype), 8 * self.dtype.itemsize, float_error(self.dtype), product)

    def _code_range(self, piece: TensorSlice) -> CodeRange | None:
        codes = self._weights.form(piece).codes
        return None if codes is None else CodeRange(codes, piece.column_range, piece.shape[1])

    def _parts(self, pieces: Iterable[TensorSlice]) -> Iterator[tuple[int, TensorSlice]]:
        first = 0
        for piece in pieces:
            rows = piece.row_range
            form = self._weights.form(piece)
            row_bytes = (piece.shape[1] if len(piece.shape) == 2 else 1) * torch.float32.itemsize
            step = max(TILE_BYTES // row_bytes, 1)
            for start in range(0, len(rows), step):
                some = rows[start : start + step]
                part = piece._replace(rows=slice(some.start, some[-1] + 1, some.step))
                yield first, part
                first += len(some)
                self.reading.count(part, form)

    def _read(self, part: TensorSlice) -> Tensor:
        """The slice as floats; sources know rows that are adjacent alone."""
        rows = part.row_range
        some = self._weights.read(part._replace(rows=slice(rows.start, rows.stop)))[:: rows.step]
        return some if part.factor == 1 else some.float() * part.factor

    def _codes(self, part: TensorSlice) -> GroupedRows:
        """The slice as quantised values; as `_read` otherwise."""
        rows = part.row_range
        codes = self._weights.codes(part._replace(rows=slice(rows.start, rows.stop)))
        zeros = None if codes.zeros is None else codes.zeros[:: rows.step]
        offsets = None if codes.offsets is None else codes.offsets[:: rows.step] * part.factor
        return GroupedRows(codes.weights[:: rows.step], codes.scales[:: rows.step] * part.factor, zeros, offsets)


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in config.json and options."""
    return str(dtype).removeprefix("torch.")
