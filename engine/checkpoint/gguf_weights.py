"""Reads tensors out of GGUF files by the names that a checkpoint has for them, slice by slice."""

import mmap
from pathlib import Path

import torch
from torch import Tensor

from ...tokenization.gguf_file import GgufFile, GgufTensor
from ..cpu.matmul import GroupedRows
from .code_forms import StoredForm, dequantise_codes
from .gguf_blocks import BLOCKS, decode_rows
from .gguf_config import ROPE_TENSORS
from .gguf_names import GgufNames, StoredName
from .model_spec import CheckpointError
from .weights import TensorSlice

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufWeights:
    """A `WeightSource`: the weights in a GGUF file or its shards. Files are memory-mapped; blocks are decoded when they
    are read."""

    def __init__(self, file: GgufFile, head_dim: int) -> None:
        self._file, self._head_dim = file, head_dim
        self._names = GgufNames(file.text("general.architecture"))
        self._mapped = {path: _mapped(path) for path in file.files}
        self._unread = set(file.tensors) - set(ROPE_TENSORS)

    def __contains__(self, name: str) -> bool:
        stored = self._names.stored(name)
        return stored is not None and stored.name in self._file.tensors

    @property
    def files(self) -> list[Path]:
        return list(self._file.files)

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self._file.files)

    @property
    def unread(self) -> list[str]:
        return sorted(self._unread)

    @property
    def quantization(self) -> str | None:
        kinds = {tensor.type.name for tensor in self._file.tensors.values()} & set(BLOCKS)
        return " and ".join(sorted(kinds)) or None

    def form(self, piece: TensorSlice) -> StoredForm:
        kind = self._find(piece)[1].type
        block = BLOCKS.get(kind.name)
        return StoredForm(kind.name, 8 * kind.bytes / kind.values, block and block.form, plain=block is None)

    def codes(self, piece: TensorSlice) -> GroupedRows:
        place, tensor = self._find(piece)
        return decode_rows(tensor.type.name, self._rows(piece, place, tensor))

    def read(self, piece: TensorSlice) -> Tensor:
        place, tensor = self._find(piece)
        rows, block = self._rows(piece, place, tensor), BLOCKS.get(tensor.type.name)
        if block is not None:
            found = dequantise_codes(decode_rows(tensor.type.name, rows), block.form)
        else:
            found = rows.view(_PLAIN[tensor.type.name])
        if place.plus_one:
            found = found.float() - 1
        return found.flatten() if len(piece.shape) == 1 else found[:, piece.columns]

    def _find(self, piece: TensorSlice) -> tuple[StoredName, GgufTensor]:
        place = self._names.stored(piece.name)
        tensor = None if place is None else self._file.tensors.get(place.name)
        if place is None or tensor is None:
            called = "" if place is None else f" ({place.name})"
            raise CheckpointError(f"{self._file.path}: tensor {piece.name}{called} is missing")
        shape = tensor.shape
        if place.expert is not None and len(shape) == len(piece.shape) + 1 and place.expert < shape[0]:
            shape = shape[1:]
        if shape != piece.shape:
            meant = f"its metadata means {list(piece.shape)}"
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name} has shape {list(shape)}, but {meant}")
        if len(shape) == 1 and tensor.type.name not in _PLAIN:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name} is a vector in blocks, of type {tensor.type.name}"
            )
        self._unread.discard(tensor.name)
        return place, tensor

    def _rows(self, piece: TensorSlice, place: StoredName, tensor: GgufTensor) -> Tensor:
        """The bytes of the piece's rows, uint8 [rows, bytes of a row]; numbers of a vector are rows, too."""
        data = self._mapped[tensor.file][tensor.offset : tensor.offset + tensor.bytes]
        sizes = tensor.shape if len(piece.shape) == 1 else tensor.shape[:-1]
        table = data.view(*sizes, -1) if place.expert is None else data.view(*sizes, -1)[place.expert]
        if not place.rotated:
            return table[piece.rows]
        # In each head the rows i and i + head_dim / 2, which are rotated together, are neighbours.
        rows, half = torch.arange(len(table))[piece.rows], self._head_dim // 2
        within = rows % self._head_dim
        return table[rows - within + within % half * 2 + within // half]


def _mapped(path: Path) -> Tensor:
    # A private map: torch wants memory that could be written to.
    with path.open("rb") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
