"""Reads tensors out of GGUF files by a checkpoint's names for them, slice by slice.

Specification: docs/gguf.md of ggml. Llama's converter permutes the rows of queries and keys, so that numbers that are
rotated together are adjacent. Gemma's adds one to the weights of norms. The experts of a layer are one tensor."""

import mmap
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ...core.regular_files import open_regular
from ...tokenization.gguf_file import GgufFile, GgufTensor
from ..cpu.matmul import GroupedRows
from .code_forms import StoredForm, dequantise_codes
from .gguf_blocks import BLOCKS, decode_rows
from .gguf_config import ROPE_TENSORS
from .gguf_fields import drafting_blocks
from .gguf_names import GgufNames, StoredName
from .model_spec import CheckpointError
from .recurrence import DeltaNetSpec, RecurrenceSpec
from .weights import WHOLE, TensorSlice

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


_MIXED = frozenset({"attn_qkv", "ssm_conv1d"})
"""Tensors with rows of all queries and keys before those of values."""

_TILED_ROWS = _MIXED | {"attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"}


class TiledHeads:
    """The order of a delta rule's value heads in a file, where a key head serves several: the first of each key head,
    then the second of each. Here those of a key head are next to each other."""

    def __init__(self, net: DeltaNetSpec) -> None:
        self._tiles = net.value_heads // net.key_heads, net.key_heads, -1
        self.keyed = 2 * net.key_width
        self.size = net.value_dim

    def places(self, first: int, total: int) -> Tensor:
        """Where in the file each of `total` rows or columns is, which value heads have in equal parts from the `first`
        on."""
        heads = torch.arange(first, total).view(self._tiles)
        return torch.cat((torch.arange(first), heads.transpose(0, 1).flatten()))


class GgufWeights:
    """A `WeightSource`: the weights in a GGUF file or its shards. Files are memory-mapped; blocks are decoded when they
    are read."""

    def __init__(self, file: GgufFile, head_dim: int, recurrence: RecurrenceSpec | None = None) -> None:
        """`recurrence`: what the layers are like that keep a state, if some do."""
        self._file, self._head_dim = file, head_dim
        architecture = file.text("general.architecture")
        self._tiles: TiledHeads | None = None
        if isinstance(recurrence, DeltaNetSpec) and architecture != "qwen3next":
            self._tiles = TiledHeads(recurrence) if recurrence.value_heads != recurrence.key_heads else None
        self._names = GgufNames(architecture, file.tensors)
        self._mapped = {path: _mapped(path) for path in file.files}
        drafting = tuple(f"blk.{layer}." for layer in drafting_blocks(file))
        self._unread = {name for name in file.tensors if not name.startswith(drafting)} - set(ROPE_TENSORS)

    def __contains__(self, name: str) -> bool:
        return self._stored_in(name) is not None

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
        if (halves := self._halves_of_latents(piece)) is not None:
            return self.form(halves[1])._replace(codes=None, plain=False)
        tensor = self._find(piece)[1]
        kind = tensor.type
        block = BLOCKS.get(kind.name)
        form = block and block.form
        if form is not None and (tiles := self._column_tiles(tensor)) is not None and tiles.size % form.group_size:
            form = None  # heads are not whole groups
        return StoredForm(kind.name, 8 * kind.bytes / kind.values, form, plain=block is None)

    def codes(self, piece: TensorSlice) -> GroupedRows:
        place, tensor = self._find(piece)
        codes = decode_rows(tensor.type.name, self._rows(piece, place, tensor))
        if (tiles := self._column_tiles(tensor)) is None:
            return codes
        of_codes, of_groups = (tiles.places(0, part.shape[1]) for part in (codes.weights, codes.scales))
        offsets = None if codes.offsets is None else codes.offsets[:, of_groups]
        return GroupedRows(codes.weights[:, of_codes], codes.scales[:, of_groups], None, offsets)

    def blocks(self, piece: TensorSlice) -> tuple[str, Tensor] | None:
        place, tensor = self._find(piece)
        block = BLOCKS.get(tensor.type.name)
        if block is None or block.form.float4 or place != StoredName(place.name) or self._column_tiles(tensor):
            return None
        return (tensor.type.name, self._rows(piece, place, tensor)) if piece.columns == WHOLE else None

    def read(self, piece: TensorSlice) -> Tensor:
        if (halves := self._halves_of_latents(piece)) is not None:
            return self._join_halves(piece, *halves)
        place, tensor = self._find(piece)
        rows, block = self._rows(piece, place, tensor), BLOCKS.get(tensor.type.name)
        if block is not None:
            numbers = dequantise_codes(decode_rows(tensor.type.name, rows.flatten(0, -2)), block.form)
        else:
            numbers = rows.view(_PLAIN[tensor.type.name])
        if place.plus_one:
            numbers = numbers.float() - 1
        if _own_name(tensor) == "ssm_a":
            numbers = numbers.float().neg().log()
        if (tiles := self._column_tiles(tensor)) is not None:
            numbers = numbers[:, tiles.places(0, numbers.shape[1])]
        if len(piece.shape) == 1:
            return numbers.flatten()
        return numbers[:, piece.columns] if len(piece.shape) == 2 else numbers.view(-1, *piece.shape[1:])

    def _halves_of_latents(self, piece: TensorSlice) -> tuple[TensorSlice, TensorSlice] | None:
        """The matrices [heads, latent, keys] and [heads, values, latent] that newer files have in place of the one that
        makes keys and values of latents; None: it is another matrix, or stored as that one."""
        if not piece.name.endswith(".kv_b_proj.weight") or piece.name in self:
            return None
        names = [piece.name.replace(".kv_b_proj.", f".{part}_b_proj.") for part in "kv"]
        shapes = [self._file.tensors[stored.name].shape for name in names if (stored := self._stored_in(name))]
        if len(shapes) < 2 or any(len(shape) != 3 for shape in shapes):
            return None
        keys, values = shapes
        if (keys[0] * (keys[2] + values[1]), keys[1]) != piece.shape or (values[0], values[2]) != keys[:2]:
            meant = f"its metadata means {list(piece.shape)}"
            raise CheckpointError(f"{self._file.path}: {names[0]} and its like have {keys} and {values}, but {meant}")
        key_slice, value_slice = (TensorSlice(name, shape) for name, shape in zip(names, shapes, strict=True))
        return key_slice, value_slice

    def _join_halves(self, piece: TensorSlice, keys: TensorSlice, values: TensorSlice) -> Tensor:
        made = keys.shape[2] + values.shape[1]
        rows = piece.row_range
        heads = slice(rows.start // made, -(-rows.stop // made))
        by_head = self.read(keys._replace(rows=heads)).float().transpose(1, 2), self.read(values._replace(rows=heads))
        joined = torch.cat((by_head[0], by_head[1].float()), 1).flatten(0, 1)
        first = heads.start * made
        return joined[rows.start - first : rows.stop - first, piece.columns]

    def _stored_in(self, name: str) -> StoredName | None:
        """The place of a tensor that the file has."""
        stored = self._names.stored(name)
        return stored if stored is not None and stored.name in self._file.tensors else None

    def _find(self, piece: TensorSlice) -> tuple[StoredName, GgufTensor]:
        place = self._names.stored(piece.name)
        tensor = None if place is None else self._file.tensors.get(place.name)
        if place is None or tensor is None:
            called = "" if place is None else f" ({place.name})"
            raise CheckpointError(f"{self._file.path}: tensor {piece.name}{called} is missing")
        shape = tensor.shape
        if place.expert is not None and len(shape) == len(piece.shape) + 1 and place.expert < shape[0]:
            shape = shape[1:]
        vector = len(piece.shape) == 1 and prod(shape) == piece.shape[0]  # some are kept group by group
        if not vector and _without_ones(shape) != _without_ones(piece.shape):
            meant = f"its metadata means {list(piece.shape)}"
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name} has shape {list(shape)}, but {meant}")
        if len(piece.shape) == 1 and tensor.type.name not in _PLAIN:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name} is a vector in blocks, of type {tensor.type.name}"
            )
        self._unread.discard(tensor.name)
        return place, tensor

    def _column_tiles(self, tensor: GgufTensor) -> TiledHeads | None:
        return self._tiles if _own_name(tensor) == "ssm_out" else None

    def _rows(self, piece: TensorSlice, place: StoredName, tensor: GgufTensor) -> Tensor:
        """The bytes of the piece's rows, uint8 [rows, bytes of a row]; numbers of a vector are rows, too."""
        data = self._mapped[tensor.file][tensor.offset : tensor.offset + tensor.bytes]
        sizes = piece.shape[: max(len(piece.shape) - 1, 1)]
        table = data.view(*sizes, -1) if place.expert is None else data.view(tensor.shape[0], *sizes, -1)[place.expert]
        if self._tiles is not None and (own := _own_name(tensor)) in _TILED_ROWS:
            first = self._tiles.keyed if own in _MIXED else 0
            return table[self._tiles.places(first, len(table))[piece.rows]]
        if not place.rotated:
            return table[piece.rows]
        # In each head the rows i and i + head_dim / 2, which are rotated together, are adjacent.
        rows, half = torch.arange(len(table))[piece.rows], self._head_dim // 2
        within = rows % self._head_dim
        return table[rows - within + within % half * 2 + within // half]


def _own_name(tensor: GgufTensor) -> str:
    """The name of a layer's tensor without the layer and its kind."""
    return tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """As a convolution's weights [channels, 1, kernel] are a matrix, and a matrix of one output a vector."""
    return tuple(size for size in shape if size != 1)


def _mapped(path: Path) -> Tensor:
    # A private map, because torch wants writable memory.
    with open_regular(path) as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
