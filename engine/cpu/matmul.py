"""Matrix products with constant weights, packed once: fp32, bf16 or int8 (`matmul.h` says how they lie).

A row's result does not depend on the rows beside it, nor on the threads: bit for bit. int8 is symmetric: weights by
output, activations by row, each scaled so that its largest number is 127; the sum between is exact.
"""

import ctypes
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import library
from .library import struct_fields
from .memory import HugePageArena
from .op_trace import PRODUCT, OpStruct, SymbolicTensor, TensorOrSymbol

LANES, LINE_BYTES = 16, 64
"""Outputs side by side in a line of packed weights, and its bytes, as in matmul.h."""

WEIGHT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""The dtypes that weights may be packed as, with the numbers of matmul.h."""

SOURCE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes that weights may be packed from, with the numbers of matmul_pack.c."""


class MatmulFormat(NamedTuple):
    """A matrix of weights [outputs, inputs], kept as `kept`: int8, or the dtype of the activations `x`. They and the
    results, `out`, are fp32 or bf16."""

    outputs: int
    inputs: int
    kept: torch.dtype
    x: torch.dtype
    out: torch.dtype


class _MatrixStruct(ctypes.Structure):
    """`Matrix` of matmul.h."""

    _fields_ = struct_fields("p lines scales offsets bias", "l outputs inputs", "i kind x_kind out_kind")


class PackedMatmul:
    """x [N, inputs] -> x W^T + bias [N, outputs]. Weights are zero until they are packed."""

    def __init__(self, form: MatmulFormat, bias: Tensor | None, memory: HugePageArena) -> None:
        """`bias` [outputs] of any dtype is kept in float32."""
        self.form = form
        whole = -(-form.outputs // LANES) * LANES
        self._steps = -(-form.inputs * form.kept.itemsize // 4)
        self._lines = memory.allocate(whole // LANES * self._steps * LINE_BYTES)
        quantised = form.kept == torch.int8
        self._scales = torch.zeros(whole) if quantised else None
        self._offsets = torch.zeros(whole, dtype=torch.int32) if quantised else None
        self._bias = None if bias is None else F.pad(bias.float(), (0, whole - form.outputs))
        addresses = [_address(each) for each in (self._lines, self._scales, self._offsets, self._bias)]
        kinds = [WEIGHT_CODES[each] for each in (form.kept, form.x, form.out)]
        self._matrix = _MatrixStruct(*addresses, form.outputs, form.inputs, *kinds)
        self._at, self._multiply = ctypes.addressof(self._matrix), library.bind_function("charonia_matmul")

    def pack(self, first: int, rows: Tensor) -> None:
        """Take `rows` [n, inputs], fp32, bf16 or fp16, as the outputs from `first` on."""
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        source = (rows.data_ptr(), SOURCE_CODES[rows.dtype], rows.stride(0), first, *rows.shape)
        target = (_address(self._lines), _address(self._scales), _address(self._offsets))
        _check(library.bind_function("charonia_pack")(*source, WEIGHT_CODES[self.form.kept], *target))

    def __call__(self, x: TensorOrSymbol) -> TensorOrSymbol:
        if isinstance(x, SymbolicTensor):
            operation = OpStruct(kind=PRODUCT, what=self._at, stride=self.form.inputs, size=self.form.outputs)
            return x.trace.add_op(operation, x, self.form.outputs, dtype=self.form.out)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = len(x)
        out = torch.empty(rows, self.form.outputs, dtype=self.form.out)
        _check(self._multiply(self._at, x.data_ptr(), x.stride(0), rows, out.data_ptr(), self.form.outputs))
        return out


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for a matrix product")
