"""The numbers in GGUF's blocks: small integers in groups that share a scale, and in some types a minimum, which is an
offset below zero.

Specification: ggml's documentation of its tensor types, and docs/gguf.md. All blocks of a type have one size, so rows
[n, bytes] are a table of blocks, whose columns are taken apart here.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..cpu import library
from ..cpu.matmul import GroupedRows
from .code_forms import CodeForm, Zeros


def decode_rows(kind: str, rows: Tensor) -> GroupedRows:
    """The codes of `rows` uint8 [n, bytes] of a type in BLOCKS, whole blocks, in the form that is told there."""
    found = BLOCKS[kind]
    if rows.device.type != "cpu" or library.level() is None:
        return found.decode(_split(rows, -1, found.bytes))
    rows, numbers = rows.contiguous(), rows.shape[1] // found.bytes * found.numbers
    codes = torch.empty(len(rows), numbers, dtype=torch.uint8)
    scales = torch.empty(len(rows), numbers // found.form.group_size)
    offsets = torch.empty_like(scales) if found.form.zeros is Zeros.OFFSETS else None
    addresses = codes.data_ptr(), scales.data_ptr(), 0 if offsets is None else offsets.data_ptr()
    number, count = list(BLOCKS).index(kind), codes.numel() // found.numbers
    library.bind_function("charonia_decode_blocks")(number, rows.data_ptr(), count, *addresses)
    return GroupedRows(codes, scales, None, offsets)


def _split(x: Tensor, *sizes: int) -> Tensor:
    """With axes of these `sizes` in place of the last one."""
    return x.reshape(*x.shape[:-1], *sizes)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number `at` so many bytes of each block [n, blocks, bytes]: float32 [n, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _halves(packed: Tensor) -> Tensor:
    """Two integers of four bits in each byte [..., bytes]: those in the lower halves come first."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Bit i of the four bytes `at` belongs to number i: uint8 [n, blocks, 32], 0 or 16."""
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
    lie in the lower bits of a byte of their own; the others have four bits in the last four bytes, and their upper two
    above the first ones."""
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
    """Groups of 32 in 128 bytes: of each 32 bytes the lower halves are one group and the upper ones the next."""
    return _split(_halves(_split(packed, 4, 32)), 2, 32).flatten(2, 3)


def _q4_k(blocks: Tensor) -> GroupedRows:
    return _with_minima(blocks, _eight_groups(blocks[..., 16:]))


def _q5_k(blocks: Tensor) -> GroupedRows:
    # Bit g of byte i belongs to number i of group g.
    high = (blocks[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1)) & 1
    return _with_minima(blocks, _eight_groups(blocks[..., 48:]) | high << 4)


def _q6_k(blocks: Tensor) -> GroupedRows:
    # Two halves of 128 numbers: four runs of 32, whose lower four bits lie in 64 bytes and upper two in 32.
    low = _split(_halves(_split(blocks[..., :128], 2, 64)), 4, 32)
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    high = (_split(blocks[..., 128:192], 2, 1, 32) >> shifts) & 3
    codes = (low | high << 4).flatten(1).add_(128 - 32)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208).unsqueeze(-1)
    return GroupedRows(codes, scales.flatten(1))


class BlockType(NamedTuple):
    """A type of blocks of so many `bytes`, and the form of the codes that `decode` makes of them, where C does not."""

    decode: Callable[[Tensor], GroupedRows]
    bytes: int
    form: CodeForm

    @property
    def numbers(self) -> int:
        """In a block."""
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
"""By ggml's names, in the order of gguf_blocks.c. Codes of five and six bits are given as eight. In the last three a
scale is a product of two, longer than eleven bits."""
