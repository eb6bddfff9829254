"""A product for each head with weights of its own in C (`head_products.h`), in one call or as one operation of a
program. `layers/latent_attention.py` has the reference.

A row's result does not depend on the rows beside it (`matmul.py`).
"""

import ctypes

import torch
from torch import Tensor

from . import library
from .library import struct_fields
from .matmul import MatmulFormat, PackedMatmul
from .memory import HugePageArena
from .op_trace import HEADS, OpStruct, SymbolicTensor, TensorOrSymbol


class _HeadProductsStruct(ctypes.Structure):
    """`HeadProducts` of head_products.h."""

    _fields_ = struct_fields("p matrices", "l heads inputs outputs passed", "i kind")


class FusedHeadProducts:
    """The products with `weights` [heads, outputs, inputs], which stay in their dtype; `passed` more numbers of each
    head go by them."""

    def __init__(self, weights: Tensor, passed: int, memory: HugePageArena) -> None:
        heads, outputs, inputs = weights.shape
        form = MatmulFormat(outputs, inputs, weights.dtype, weights.dtype, weights.dtype)
        self._products = [PackedMatmul(form, None, memory) for _ in range(heads)]
        for product, weight in zip(self._products, weights, strict=True):
            product.pack(0, weight.contiguous())
        self._addresses = (ctypes.c_void_p * heads)(*(product.address for product in self._products))
        self._heads = heads
        self._size = outputs + passed
        sizes = heads, inputs, outputs, passed
        kind = library.DTYPE_CODES[weights.dtype]
        self._struct = _HeadProductsStruct(ctypes.addressof(self._addresses), *sizes, kind)
        self._multiply = library.bind_function("charonia_multiply_heads")

    def __call__(self, x: TensorOrSymbol, last: TensorOrSymbol | None = None) -> TensorOrSymbol:
        """x [N, heads * inputs + heads * passed], contiguous -> [N, heads * (outputs + passed)], and behind them `last`
        [N, outputs + passed], if it is there."""
        at = ctypes.addressof(self._struct)
        width = (self._heads + (last is not None)) * self._size
        if isinstance(x, SymbolicTensor):
            return x.trace.add_op(OpStruct(kind=HEADS, what=at), x, width, delta=last)
        out = torch.empty((len(x), width), dtype=x.dtype)
        address = None if last is None else last.data_ptr()
        if self._multiply(at, x.data_ptr(), address, len(x), out.data_ptr()):
            raise MemoryError("no memory for the products of heads")
        return out
