"""The blocks of numbers that GGUF files have, as codes with scales and offsets. gguf_blocks.c says the same in C.

Specification: ggml's documentation of its tensor types.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..cpu import library
from ..cpu.matmul import GroupedRows
from .code_forms import FLOAT4_CODES, CodeForm, Zeros
from .model_spec import CheckpointError


def decode_rows(kind: str, rows: Tensor) -> GroupedRows:
    """The codes of `rows` uint8 [n, bytes], whole blocks of a type in BLOCKS, in that type's form."""
    block = BLOCKS[kind]
    if rows.device.type != "cpu" or library.level() is None or block.form.float4:
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


def _mxfp4(blocks: Tensor) -> GroupedRows:
    exponents = blocks[..., 0].to(torch.int32)
    if bool((exponents == 255).any()):
        raise CheckpointError("a scale of MXFP4 is no number")
    scales = torch.ldexp(torch.ones(exponents.shape), exponents - 128)
    return GroupedRows(FLOAT4_CODES[_halves(blocks[..., 1:]).int()].flatten(1), scales)


class BlockType(NamedTuple):
    """A type of blocks: its bytes, and the form of its codes, which `decode` makes where C does not."""

    decode: Callable[[Tensor], GroupedRows]
    bytes: int
    form: CodeForm

    @property
    def numbers(self) -> int:
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
    "MXFP4": BlockType(_mxfp4, 17, CodeForm(8, 32, float4=True)),
}
"""By ggml's names, in the order of gguf_blocks.c, which lacks the last. Codes of five and six bits become eight. In the
last three types before it a scale is a product of two numbers, longer than eleven bits."""
