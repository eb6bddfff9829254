"""Normalisation, gating, rotation and embedding in C: one call where torch needs several, and float32 inside.

References are the torch classes of `layers/`. Inputs are float32 or bfloat16 on the CPU, with neighbours in the last
axis side by side in memory.
"""

import torch
from torch import Tensor

from . import library
from .op_trace import EMBED, GATE, NORM, OpStruct, SymbolicTensor, SymbolicTokenIds, TensorOrSymbol

ACTIVATION_CODES = {
    "silu": 0,
    "swish": 0,
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), 1),
    "gelu": 2,
    "gelu_python": 2,
    "quick_gelu": 3,
}
"""config.json's name -> `enum activation` in elementwise.c."""


class FusedNorm:
    """x [N, n] in `dtype`, contiguous -> x / rms(x) * weight (arXiv 1910.07467).

    `weight` [n] or [heads, n] is float32."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weight, self._eps, self._kind = weight.contiguous(), eps, library.DTYPE_CODES[dtype]
        self._size, self._weights = weight.shape[-1], weight.numel() // weight.shape[-1]
        self._address, self._norm = self._weight.data_ptr(), library.bind_function("charonia_norm")

    def __call__(self, x: TensorOrSymbol) -> TensorOrSymbol:
        return self._rows(x, None)

    def add_and_norm(self, x: TensorOrSymbol, delta: TensorOrSymbol) -> TensorOrSymbol:
        """Adds `delta` to x [N, n] in place; the norm of the sum. Both are contiguous."""
        return self._rows(x, delta)

    def norm_heads(self, x: TensorOrSymbol, heads: int) -> None:
        """The first `heads` of x [N, more, n], contiguous, in place."""
        if isinstance(x, SymbolicTensor):
            x.trace.add_in_place(self._operation(heads, x.width), x)
        else:
            self._into(x, x, 0, heads, x.stride(0))

    def _rows(self, x: TensorOrSymbol, delta: TensorOrSymbol | None) -> TensorOrSymbol:
        if isinstance(x, SymbolicTensor):
            return x.trace.add_op(self._operation(1, self._size), x, self._size, delta=delta)
        out = torch.empty_like(x)
        self._into(out, x, 0 if delta is None else delta.data_ptr(), 1, self._size)
        return out

    def _into(self, out: Tensor, x: Tensor, delta: int, heads: int, stride: int) -> None:
        sizes = x.shape[0], heads, stride, self._weights, self._size
        self._norm(x.data_ptr(), delta, self._address, out.data_ptr(), *sizes, self._eps, self._kind)

    def _operation(self, heads: int, stride: int) -> OpStruct:
        numbers = {"heads": heads, "stride": stride, "weights": self._weights, "size": self._size}
        return OpStruct(kind=NORM, what=self._address, number=self._eps, **numbers)


class FusedGate:
    """x [N, gate and up, n] as [N, 2n] -> activation(gate) * up [N, n]; x is contiguous (arXiv 2002.05202)."""

    def __init__(self, activation: str) -> None:
        self._activation, self._gate = ACTIVATION_CODES[activation], library.bind_function("charonia_gate")

    def __call__(self, x: TensorOrSymbol) -> TensorOrSymbol:
        if isinstance(x, SymbolicTensor):
            size = x.width // 2
            return x.trace.add_op(OpStruct(kind=GATE, size=size, activation=self._activation), x, size)
        rows, size = x.shape[0], x.shape[1] // 2
        out = torch.empty((rows, size), dtype=x.dtype)
        self._gate(x.data_ptr(), out.data_ptr(), rows, size, self._activation, library.DTYPE_CODES[x.dtype])
        return out


def apply_rope(x: Tensor, turns: Tensor) -> Tensor:
    """x [N, heads, head_dim] with its halves turned against each other by `turns` [N, cos and sin, head_dim / 2],
    float32 (arXiv 2104.09864)."""
    rows, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype)
    library.bind_function("charonia_turn")(
        x.data_ptr(),
        turns.data_ptr(),
        out.data_ptr(),
        rows,
        heads,
        x.stride(0),
        size // 2,
        library.DTYPE_CODES[x.dtype],
    )
    return out


def trace_embedding(ids: SymbolicTokenIds, table: Tensor, factor: float) -> SymbolicTensor:
    """The rows `ids` of `table` [vocabulary, n], contiguous, multiplied with `factor`."""
    if table.dtype != ids.trace.dtype or not table.is_contiguous():
        raise TypeError(f"a tape of {ids.trace.dtype} takes no table of {table.dtype}")
    size = table.shape[1]
    return ids.trace.add_source(OpStruct(kind=EMBED, what=table.data_ptr(), size=size, number=factor), size)
