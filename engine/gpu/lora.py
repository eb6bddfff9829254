"""Adds LoRA adapters (arXiv 2106.09685) to a product on a GPU, in two launches for all adapters of a step.

Places are sorted in blocks of one adapter (`AdapterBlocks`), with its matrices' address: a recorded step serves later
ones. Pieces of the input times A are added in order where B is multiplied: rows are independent. The reference is
`layers.linear.TorchLora`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..step_adapters import BLOCK_PLACES, LoraPart, StepAdapters
from .attention_plan import next_power_of_2
from .runtime import DIVISIBLE, TRITON_TYPES, Specialisation

_PIECE = 2048
"""Inputs that a program multiplies with A."""

_BLOCK_INPUTS, _BLOCK_OUTPUTS = 64, 64
_VARYING = ["stride", "product", "pieces"]
"""Arguments that vary from product to product and step to step, for which no kernel is compiled again."""

_RECORD_WORDS = 6
"""int64 numbers of a part in `AdapterRecords`."""
_WORDS = tl.constexpr(_RECORD_WORDS)


class AdapterRecords:
    """An adapter's `parts` of each product as the kernels read them, int64 on the device: first the begin of each
    product's records, and the end of the last; then, for each part, the addresses of `a` and `b`, the rank, the scale's
    bits as float64, `first` and `outputs`."""

    def __init__(self, parts: Sequence[Sequence[LoraPart]], device: torch.device) -> None:
        ends = len(parts) + 1 + _RECORD_WORDS * np.cumsum([0, *map(len, parts)])
        flat = [part for product in parts for part in product]
        scales = np.array([part.scale for part in flat], np.float64).view(np.int64).tolist()
        words = [
            (part.a.data_ptr(), part.b.data_ptr(), len(part.a), scale, part.first, part.outputs)
            for part, scale in zip(flat, scales, strict=True)
        ]
        numbers = np.concatenate([ends, np.array(words, np.int64).reshape(-1)]).astype(np.int64)
        self._numbers = torch.from_numpy(numbers).to(device)
        self.address = self._numbers.data_ptr()


@triton.jit
def _find_part(packed, stride, product, matrix):
    """The address of the record of part `matrix` of this block's adapter, and whether it exists."""
    address = tl.load(packed + stride + tl.program_id(0))
    valid = address != 0
    records = address.to(tl.pointer_type(tl.int64))
    begin = tl.load(records + product, mask=valid, other=0) + matrix * _WORDS
    return records + begin, valid & (begin < tl.load(records + product + 1, mask=valid, other=0))


@triton.jit
def _block_lines(packed, stride, ROWS: tl.constexpr):
    """This block's lines among the places that have an adapter, which of them exist, and the places."""
    line = tl.load(packed + 2 * stride + tl.program_id(0)) + tl.arange(0, ROWS)
    valid = line < tl.load(packed + 3 * stride + tl.program_id(0))
    return line, valid, tl.load(packed + line, mask=valid, other=0)


@triton.jit(do_not_specialize=_VARYING)
def _shrink_kernel(
    x,
    shrunk,
    packed,
    stride,
    product,
    inputs,
    x_stride,
    lines,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """Program (block, piece, matrix and tile of its rank) writes a piece of x times A to float32 `shrunk` [pieces,
    places, matrices * lines]."""
    tiles = lines // LINES
    matrix = tl.program_id(2) // tiles
    record, valid = _find_part(packed, stride, product, matrix)
    if valid:
        rank = tl.load(record + 2).to(tl.int32)
        low = tl.program_id(2) % tiles * LINES
        if low < rank:
            line, inside, place = _block_lines(packed, stride, ROWS)
            a = tl.multiple_of(tl.load(record).to(tl.pointer_type(x.dtype.element_ty)), 16)
            of_rank = low + tl.arange(0, LINES)
            inner = tl.program_id(1) * PIECE + tl.arange(0, BLOCK_INPUTS)
            total = tl.zeros((ROWS, LINES), tl.float32)
            for first in range(0, PIECE, BLOCK_INPUTS):
                at = first + inner
                some = tl.load(
                    x + place[:, None] * x_stride + at[None, :], inside[:, None] & (at < inputs)[None, :], 0.0
                )
                mask = (of_rank < rank)[None, :] & (at < inputs)[:, None]
                matrix_a = tl.load(a + of_rank.to(tl.int64)[None, :] * inputs + at[:, None], mask, 0.0)
                total = tl.dot(some, matrix_a, total, "ieee")
            row = tl.program_id(1) * stride + line
            target = (row * tl.num_programs(2) + tl.program_id(2)) * LINES
            tl.store(shrunk + target[:, None] + tl.arange(0, LINES)[None, :], total, inside[:, None])


@triton.jit(do_not_specialize=_VARYING)
def _expand_kernel(
    shrunk,
    out,
    packed,
    stride,
    product,
    pieces,
    out_stride,
    width,
    lines,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Program (block, tile of outputs, matrix): out [places, all outputs] += scale * (x A) B. `shrunk` has `width`
    numbers for each place and piece, `lines` for each matrix. ALIGNED: matrices have multiples of 16 outputs."""
    record, valid = _find_part(packed, stride, product, tl.program_id(2))
    if valid:
        outputs = tl.load(record + 5)
        if ALIGNED:
            outputs = tl.multiple_of(outputs, 16)
        column = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        if tl.program_id(1) * BLOCK_OUTPUTS < outputs:
            line, inside, place = _block_lines(packed, stride, ROWS)
            b = tl.multiple_of(tl.load(record + 1).to(tl.pointer_type(out.dtype.element_ty)), 16)
            rank = tl.load(record + 2).to(tl.int32)
            scale = tl.load(record + 3).to(tl.float64, bitcast=True).to(tl.float32)
            total = tl.zeros((ROWS, BLOCK_OUTPUTS), tl.float32)
            for low in range(0, rank, LINES):
                of_rank = low + tl.arange(0, LINES)
                known = (of_rank < rank)[None, :]
                small = tl.zeros((ROWS, LINES), tl.float32)
                for piece in range(0, pieces):
                    row = (piece * stride + line) * width + tl.program_id(2) * lines
                    small += tl.load(shrunk + row[:, None] + of_rank[None, :], inside[:, None] & known, 0.0)
                mask = (of_rank < rank)[:, None] & (column < outputs)[None, :]
                matrix_b = tl.load(b + of_rank.to(tl.int64)[:, None] * outputs + column[None, :], mask, 0.0)
                total = tl.dot((small * scale).to(matrix_b.dtype), matrix_b, total, "ieee")
            at = out + place[:, None] * out_stride + tl.load(record + 4) + column[None, :]
            mask = inside[:, None] & (column < outputs)[None, :]
            tl.store(at, (tl.load(at, mask, 0.0).to(tl.float32) + total).to(out.dtype.element_ty), mask)


class TritonLora:
    """The kernels for product `number`, whose matrices have these `outputs`, for ranks up to `most`."""

    def __init__(self, number: int, outputs: Sequence[int], most: int) -> None:
        self._number = number
        self._matrices = len(outputs)
        self._outputs = max(outputs)
        self._shrink, self._expand = _plans(most, all(count % 16 == 0 for count in outputs))
        self._lines = next_power_of_2(max(most, 16))

    def add(self, x: Tensor, out: Tensor, step: StepAdapters) -> None:
        """Adds the products of the step's adapters with x [N, inputs] to `out` [N, outputs], in one dtype."""
        x = x if x.stride(1) == 1 else x.contiguous()
        packed, blocks = step.blocks(x.device)
        inputs = x.shape[1]
        pieces = triton.cdiv(x.shape[1], _PIECE)
        width = self._matrices * self._lines
        shrunk = torch.empty(pieces * packed.shape[1] * width, dtype=torch.float32, device=x.device)
        shared = packed, packed.stride(0), self._number
        shrink = _shrink_kernel[blocks, pieces, width // self._shrink["LINES"]]
        shrink(x, shrunk, *shared, inputs, x.stride(0), self._lines, **self._shrink)
        expand = _expand_kernel[blocks, triton.cdiv(self._outputs, _BLOCK_OUTPUTS), self._matrices]
        expand(shrunk, out, *shared, pieces, out.stride(0), width, self._lines, **self._expand)


def _plans(most: int, aligned: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The launches of the two kernels for ranks up to `most`."""
    plan = {"ROWS": BLOCK_PLACES, "LINES": min(next_power_of_2(max(most, 16)), 64), "num_warps": 4, "num_stages": 3}
    shrink = plan | {"PIECE": _PIECE, "BLOCK_INPUTS": _BLOCK_INPUTS}
    return shrink, plan | {"BLOCK_OUTPUTS": _BLOCK_OUTPUTS, "ALIGNED": aligned}


def specialisations() -> Iterator[Specialisation]:
    """Both kernels for ranks up to 16 and for higher ones, in every dtype."""
    for dtype, kind in TRITON_TYPES.items():
        for most in (16, 64):
            for kernel, plan in zip((_shrink_kernel, _expand_kernel), _plans(most, True), strict=True):
                types = dict.fromkeys(kernel.arg_names, f"i32{DIVISIBLE}") | dict.fromkeys(_VARYING, "i32")
                types |= {"x": f"*{kind}", "out": f"*{kind}", "shrunk": "*fp32", "packed": "*i64"}
                yield Specialisation.of_plan(kernel, types, plan, () if dtype == torch.float32 else ("mma",))
