"""The C kernels (`lora.h`) of what LoRA adapters (arXiv 2106.09685) add to products.

Rows of a step are sorted by adapter. A product's input is multiplied with A, all of an adapter's matrices one after the
other, and the few numbers that come out with B. A row's sums depend on no other row and on no thread.
"""

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..step_adapters import LoraPart, StepAdapters
from . import library
from .library import struct_fields
from .op_trace import LORA_EXPAND, LORA_SHRINK, OpStruct, SymbolicTensor

PANEL = 32
"""Outputs side by side in packed B, as in lora.h."""


class _PartStruct(ctypes.Structure):
    """`LoraPart` of lora.h."""

    _fields_ = struct_fields("p a b", "l rank first outputs", "f scale")


class _MatricesStruct(ctypes.Structure):
    """`LoraMatrices` of lora.h."""

    _fields_ = struct_fields("p parts", "l count")


class CAdapterTable:
    """C's array of an adapter's `parts`, those of each product."""

    def __init__(self, parts: Sequence[Sequence[LoraPart]]) -> None:
        self._structs = [(_PartStruct * len(product))(*map(_part_struct, product)) for product in parts]
        pairs = (_MatricesStruct(ctypes.addressof(matrices), len(matrices)) for matrices in self._structs)
        self._matrices = (_MatricesStruct * len(parts))(*pairs)
        self.address = ctypes.addressof(self._matrices)


def _part_struct(part: LoraPart) -> _PartStruct:
    return _PartStruct(part.a.data_ptr(), part.b.data_ptr(), len(part.a), part.first, part.outputs, part.scale)


def pack_outputs(b: Tensor) -> Tensor:
    """B^T [outputs, rank] as the kernels read it: [panels, rank, PANEL], zeros behind the last output."""
    padded = F.pad(b, (0, 0, 0, -len(b) % PANEL)) if len(b) % PANEL else b
    return padded.reshape(-1, PANEL, b.shape[1]).transpose(1, 2)


class NativeLora:
    """The kernels for product `number`, whose parts have `lines` lines of A together at most."""

    def __init__(self, number: int, lines: int) -> None:
        self._number, self._lines = number, lines
        self._add = library.bind_function("charonia_lora")

    def add(self, x: Tensor, out: Tensor, step: StepAdapters) -> None:
        """Adds to `out` [N, outputs], contiguous, what the step's adapters make of x [N, inputs]; both in one dtype."""
        if x.stride(1) != 1:
            x = x.contiguous()
        shrunk = torch.empty(len(x), self._lines)
        sizes = x.stride(0), x.shape[1], self._lines, out.shape[1], library.DTYPE_CODES[x.dtype]
        self._add(*step.c_fields, self._number, x.data_ptr(), shrunk.data_ptr(), out.data_ptr(), *sizes)

    def trace_shrink(self, x: SymbolicTensor) -> SymbolicTensor:
        """Record x A^T, which is computed beside the product that is recorded next."""
        operation = OpStruct(kind=LORA_SHRINK, layer=self._number, size=x.width, stride=self._lines)
        return x.trace.add_op(operation, x, self._lines, dtype=torch.float32)

    def trace_expand(self, shrunk: SymbolicTensor, out: SymbolicTensor) -> None:
        """Record that `shrunk` x B is added to the product's result."""
        operation = OpStruct(kind=LORA_EXPAND, layer=self._number, size=out.width, stride=self._lines)
        out.trace.add_in_place(operation, out, delta=shrunk)
