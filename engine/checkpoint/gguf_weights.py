"""Reads tensors out of GGUF files by a checkpoint's names for them, slice by slice.

Specification: ggml's documentation of its tensor types, and docs/gguf.md. Llama's converter permutes the rows of
queries and keys, so that numbers that are rotated together are adjacent. Gemma's adds one to the weights of norms. The
experts of a layer are one tensor."""

import mmap
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.regular_files import open_regular
from ...tokenization.gguf_file import GgufFile, GgufTensor
from ..cpu import library
from ..cpu.matmul import GroupedRows
from .code_forms import CodeForm, StoredForm, Zeros, dequantise_codes
from .gguf_config import ROPE_TENSORS
from .model_spec import CheckpointError
from .weights import TensorSlice


def decode_rows(kind: str, rows: Tensor) -> GroupedRows:
    """The codes of `rows` uint8 [n, bytes], whole blocks of a type in BLOCKS, in that type's form."""
    block = BLOCKS[kind]
    if rows.device.type != "cpu" or library.level() is None:
        return block.decode(_split(rows, -1, block.bytes))
    rows = rows.contiguous()
    numbers = rows.shape[1] // block.bytes * block.numbers
    codes = torch.empty(len(rows), numbers, dtype=torch.uint8)
    scales = torch.empty(len(rows), numbers // block.form.group_size)
    offsets = torch.empty_like(scales) if block.form.zeros is Zeros.OFFSETS else None
    addresses = codes.data_ptr(), scales.data_ptr(), 0 if offsets is None else offsets.data_ptr()
    number, count = list(BLOCKS).index(kind), codes.numel() // block.numbers
    library.bind_function("charonia_decode_blocks")(number, rows.data_ptr(), count, *addresses)
    return GroupedRows(codes, scales, None, offsets)


def _split(x: Tensor, *sizes: int) -> Tensor:
    """x with its last axis split into axes of these `sizes`."""
    return x.reshape(*x.shape[:-1], *sizes)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at` of each block [n, blocks, bytes]: float32 [n, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _halves(packed: Tensor) -> Tensor:
    """The two integers of four bits in each byte [..., bytes]: first all lower ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Bit i of the four bytes at `at` as the fifth bit of number i: uint8 [n, blocks, 32], 0 or 16."""
    bits = blocks[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).flatten(-2) << 4


def _q4_0(blocks: Tensor) -> GroupedRows:
    return GroupedRows(_halves(blocks[..., 2:]).flatten(1), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> GroupedRows:
    return GroupedRows(_halves(blocks[..., 4:]).flatten(1), _half(blocks, 0), None, -_half(blocks, 2))


def _q5_0(blocks: Tensor) -> GroupedRows:
    codes = _halves(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return GroupedRows(codes.add_(128 - 16).flatten(1), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> GroupedRows:
    codes = _halves(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return GroupedRows(codes.flatten(1), _half(blocks, 0), None, -_half(blocks, 2))


def _q8_0(blocks: Tensor) -> GroupedRows:
    return GroupedRows((blocks[..., 2:] ^ 128).flatten(1), _half(blocks, 0))


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits in twelve bytes: float32 [n, blocks, 8] each. The first four of each
    are the lower bits of the first eight bytes, whose upper two bits belong to the others; these have four bits each in
    the last four bytes."""
    first, second, shared = _split(packed, 3, 4).unbind(-2)
    scales = torch.cat((first & 63, (shared & 15) | (first >> 6) << 4), -1)
    minima = torch.cat((second & 63, (shared >> 4) | (second >> 6) << 4), -1)
    return scales.float(), minima.float()


def _with_minima(blocks: Tensor, codes: Tensor) -> GroupedRows:
    scales, minima = _k_scales(blocks[..., 4:16])
    scales *= _half(blocks, 0).unsqueeze(-1)
    minima *= _half(blocks, 2).unsqueeze(-1)
    return GroupedRows(codes.flatten(1), scales.flatten(1), None, minima.flatten(1))


def _eight_groups(packed: Tensor) -> Tensor:
    """The groups of 32 in 128 bytes: the lower halves of 32 bytes are one group, and the upper halves the next."""
    return _split(_halves(_split(packed, 4, 32)), 2, 32).flatten(2, 3)


def _q4_k(blocks: Tensor) -> GroupedRows:
    return _with_minima(blocks, _eight_groups(blocks[..., 16:]))


def _q5_k(blocks: Tensor) -> GroupedRows:
    # Bit g of byte i belongs to number i of group g.
    high = (blocks[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1)) & 1
    return _with_minima(blocks, _eight_groups(blocks[..., 48:]) | high << 4)


def _q6_k(blocks: Tensor) -> GroupedRows:
    # Each half of 128 numbers is four runs of 32: the lower four bits are in 64 bytes, and the upper two in 32.
    low = _split(_halves(_split(blocks[..., :128], 2, 64)), 4, 32)
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    high = (_split(blocks[..., 128:192], 2, 1, 32) >> shifts) & 3
    codes = (low | high << 4).flatten(1).add_(128 - 32)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208).unsqueeze(-1)
    return GroupedRows(codes, scales.flatten(1))


class BlockType(NamedTuple):
    """A type of blocks: its bytes, and the form of its codes, which `decode` makes where C does not."""

    decode: Callable[[Tensor], GroupedRows]
    bytes: int
    form: CodeForm

    @property
    def numbers(self) -> int:
        """The numbers of a block."""
        return 32 if self.bytes < 64 else 256


BLOCKS: Mapping[str, BlockType] = {
    "Q4_0": BlockType(_q4_0, 18, CodeForm(4, 32)),
    "Q4_1": BlockType(_q4_1, 20, CodeForm(4, 32, Zeros.OFFSETS)),
    "Q5_0": BlockType(_q5_0, 22, CodeForm(8, 32)),
    "Q5_1": BlockType(_q5_1, 24, CodeForm(8, 32, Zeros.OFFSETS)),
    "Q8_0": BlockType(_q8_0, 34, CodeForm(8, 32)),
    "Q4_K": BlockType(_q4_k, 144, CodeForm(4, 32, Zeros.OFFSETS, exact=False)),
    "Q5_K": BlockType(_q5_k, 176, CodeForm(8, 32, Zeros.OFFSETS, exact=False)),
    "Q6_K": BlockType(_q6_k, 210, CodeForm(8, 16, exact=False)),
}
"""By ggml's names, in the order of gguf_blocks.c. Codes of five and six bits become eight. In the last three types a
scale is a product of two numbers, longer than eleven bits."""


_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embedding_norm": "token_embd_norm",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_LFM2 = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
_LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERT = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT_NAME = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_ROTATED = ("attn_q", "attn_k")


@dataclass(frozen=True, slots=True)
class StoredName:
    """The place of a checkpoint's tensor in a GGUF file."""

    name: str
    expert: int | None = None
    """The expert that it is of a layer's, which are one tensor."""
    rotated: bool = False
    """Whether its rows are permuted heads: those that are rotated together are adjacent."""
    plus_one: bool = False
    """Whether one was added to its numbers."""


class GgufNames:
    """The names of one architecture."""

    def __init__(self, architecture: str) -> None:
        """`architecture`: general.architecture of the file."""
        gemma = architecture.startswith("gemma")
        self._layer: Mapping[str, str] = _LAYER | (
            _GEMMA_NORMS if gemma else _LFM2 if architecture == "lfm2" else _LLAMA_NORMS
        )
        self._permuted, self._plus_one = architecture == "llama", gemma

    def stored(self, name: str) -> StoredName | None:
        """The place of the tensor that a checkpoint calls `name`; None if it has none."""
        module, _, kind = name.rpartition(".")
        layer = _LAYER_NAME.fullmatch(module)
        if layer is None:
            outer = _OUTER.get(module)
            plus_one = self._plus_one and module.endswith("norm")
            return None if outer is None else StoredName(f"{outer}.{kind}", plus_one=plus_one)
        if (expert := _EXPERT_NAME.fullmatch(layer[2])) and expert[2] in _EXPERT:
            return StoredName(f"blk.{layer[1]}.{_EXPERT[expert[2]]}.{kind}", int(expert[1]))
        own = self._layer.get(layer[2])
        if own is None:
            return None
        rotated = self._permuted and own in _ROTATED
        return StoredName(f"blk.{layer[1]}.{own}.{kind}", None, rotated, self._plus_one and own.endswith("norm"))


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
            numbers = dequantise_codes(decode_rows(tensor.type.name, rows), block.form)
        else:
            numbers = rows.view(_PLAIN[tensor.type.name])
        if place.plus_one:
            numbers = numbers.float() - 1
        if len(piece.shape) == 1:
            return numbers.flatten()
        return numbers[:, piece.columns] if len(piece.shape) == 2 else numbers.view(len(numbers), *piece.shape[1:])

    def _find(self, piece: TensorSlice) -> tuple[StoredName, GgufTensor]:
        place = self._names.stored(piece.name)
        tensor = None if place is None else self._file.tensors.get(place.name)
        if place is None or tensor is None:
            called = "" if place is None else f" ({place.name})"
            raise CheckpointError(f"{self._file.path}: tensor {piece.name}{called} is missing")
        shape = tensor.shape
        if place.expert is not None and len(shape) == len(piece.shape) + 1 and place.expert < shape[0]:
            shape = shape[1:]
        if shape != _without_ones(piece.shape):
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
        # In each head the rows i and i + head_dim / 2, which are rotated together, are adjacent.
        rows, half = torch.arange(len(table))[piece.rows], self._head_dim // 2
        within = rows % self._head_dim
        return table[rows - within + within % half * 2 + within // half]


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape [channels, 1, kernel] of a convolution's weights as that of a matrix."""
    return (shape[0], shape[2]) if len(shape) == 3 and shape[1] == 1 else shape


def _mapped(path: Path) -> Tensor:
    # A private map, because torch wants writable memory.
    with open_regular(path) as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
