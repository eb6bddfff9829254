"""RMS norm, gating, rotation and embedding in C: one call where torch needs several, with float32 inside.

The references are the torch classes of `layers/`. Inputs are float32 or bfloat16 tensors on the CPU whose last axis is
contiguous.
"""

import torch
from torch import Tensor

from . import library
from .op_trace import EMBED, GATE, JOIN, NORM, POSITIONS, SOFT_CAP, OpStruct, OpTrace, SymbolicTensor, TensorOrSymbol

CLAMPED_SWIGLU = "clamped_swiglu"
"""quick_gelu(gate) * (up + 1) of a gate of at most CLAMP, and an up within it on both sides (arXiv 2508.10925)."""
CLAMP = 7.0
SQUARED_RELU = "squared_relu"
"""max(x, 0)^2 of rows that have no gate (arXiv 2109.08668)."""

UNGATED = {"silu": "ungated_silu", "gelu_tanh": "ungated_gelu_tanh", "gelu": "ungated_gelu", "relu": "ungated_relu"}
"""Activations -> the same of rows that have no gate."""

ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "quick_gelu": 3, CLAMPED_SWIGLU: 4, SQUARED_RELU: 5}
ACTIVATION_CODES |= {name: code for code, name in enumerate(UNGATED.values(), 6)}
"""The numbers of `enum activation` of elementwise.c."""

HAVE_NO_GATE = frozenset({SQUARED_RELU, *UNGATED.values()})


class FusedNorm:
    """RMS norm (arXiv 1910.07467): x / rms(x) * weight, x in `dtype`; `weight` [n] or [heads, n] in float32. With a
    `bias` like it, the same of x - mean(x), and the bias added (arXiv 1607.06450)."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype, bias: Tensor | None = None) -> None:
        self._weight = weight.contiguous() if bias is None else torch.stack((weight, bias))
        self._centred = int(bias is not None)
        self._eps = eps
        self._kind = library.DTYPE_CODES[dtype]
        self._size, self._weights = weight.shape[-1], weight.numel() // weight.shape[-1]
        self._address = self._weight.data_ptr()
        self._norm = library.bind_function("charonia_norm")

    def __call__(self, x: TensorOrSymbol) -> TensorOrSymbol:
        """x [N, n], contiguous -> [N, n]."""
        return self.add_and_norm(x, None)

    def add_and_norm(self, x: TensorOrSymbol, delta: TensorOrSymbol | None) -> TensorOrSymbol:
        """Adds `delta`, if any, to x [N, n] in place; returns the norm of the sum. Both are contiguous."""
        if isinstance(x, SymbolicTensor):
            return x.trace.add_op(self._operation(1, self._size), x, self._size, delta=delta)
        out = torch.empty_like(x)
        self._normalize(out, x, delta, 1, self._size)
        return out

    def norm_heads(self, x: TensorOrSymbol, heads: int) -> None:
        """Normalizes the first `heads` of x [N, more heads, n], contiguous, in place."""
        if isinstance(x, SymbolicTensor):
            x.trace.add_in_place(self._operation(heads, x.width), x)
        else:
            self._normalize(x, x, None, heads, x.stride(0))

    def norm_part(self, x: TensorOrSymbol, first: int) -> None:
        """Normalizes n numbers of each token's, from number `first` on, of x [N, heads, size], contiguous, in place."""
        if isinstance(x, SymbolicTensor):
            operation = self._operation(1, x.width)
            operation.layer = first
            x.trace.add_in_place(operation, x)
        else:
            part = x.flatten(1)[:, first:]
            self._normalize(part, part, None, 1, part.stride(0))

    def _normalize(self, out: Tensor, x: Tensor, delta: Tensor | None, heads: int, stride: int) -> None:
        sizes = x.shape[0], heads, stride, self._weights, self._size
        addresses = x.data_ptr(), 0 if delta is None else delta.data_ptr(), self._address, out.data_ptr()
        self._norm(*addresses, *sizes, self._eps, self._kind, self._centred)

    def _operation(self, heads: int, stride: int) -> OpStruct:
        sizes = {"heads": heads, "stride": stride, "weights": self._weights, "size": self._size}
        return OpStruct(kind=NORM, what=self._address, number=self._eps, activation=self._centred, **sizes)


class FusedGate:
    """Gate and up features side by side, [N, 2n] and contiguous -> activation(gate) * up [N, n] (arXiv 2002.05202); of
    those in HAVE_NO_GATE the features [N, n] alone."""

    def __init__(self, activation: str) -> None:
        self._activation = ACTIVATION_CODES[activation]
        self._gate = library.bind_function("charonia_gate")
        self._parts = 1 if activation in HAVE_NO_GATE else 2

    def __call__(self, x: TensorOrSymbol) -> TensorOrSymbol:
        if isinstance(x, SymbolicTensor):
            size = x.width // self._parts
            return x.trace.add_op(OpStruct(kind=GATE, size=size, activation=self._activation), x, size)
        rows, size = x.shape[0], x.shape[1] // self._parts
        out = torch.empty((rows, size), dtype=x.dtype)
        self._gate(x.data_ptr(), out.data_ptr(), rows, size, self._activation, library.DTYPE_CODES[x.dtype])
        return out


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [N, heads, head_dim] with the halves of each head rotated against each other by `cos_sin`, float32
    [N, cos and sin, head_dim / 2] (arXiv 2104.09864)."""
    rows, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype)
    addresses = (x.data_ptr(), cos_sin.data_ptr(), out.data_ptr())
    kind = library.DTYPE_CODES[x.dtype]
    library.bind_function("charonia_rope")(*addresses, rows, heads, x.stride(0), size // 2, kind)
    return out


class FusedSoftCap:
    """cap * tanh(x / cap), in place (arXiv 2408.00118)."""

    def __init__(self, cap: float) -> None:
        self._cap = cap
        self._soft_cap = library.bind_function("charonia_soft_cap")

    def __call__(self, x: TensorOrSymbol) -> TensorOrSymbol:
        """x [N, n], contiguous."""
        if isinstance(x, SymbolicTensor):
            x.trace.add_in_place(OpStruct(kind=SOFT_CAP, size=x.width, number=self._cap), x)
        else:
            self._soft_cap(x.data_ptr(), *x.shape, self._cap, library.DTYPE_CODES[x.dtype])
        return x


def join_features(first: TensorOrSymbol, second: TensorOrSymbol, column: int = 0) -> TensorOrSymbol:
    """A tensor [N, n], and behind it n numbers of each line of the second one, from `column` on: [N, 2n]."""
    if isinstance(first, SymbolicTensor):
        operation = OpStruct(kind=JOIN, size=first.width, stride=second.width, layer=column)
        return first.trace.add_op(operation, first, 2 * first.width, delta=second)
    return torch.cat((first, second[:, column : column + first.shape[1]]), -1)


def trace_embedding(trace: OpTrace, table: Tensor, size: int, block_type: int, factor: float) -> SymbolicTensor:
    """The token ids' rows of `table`, contiguous, of `size` numbers of the trace's dtype, or in blocks of that type,
    multiplied by `factor`."""
    struct = OpStruct(kind=EMBED, what=table.data_ptr(), size=size, layer=block_type, number=factor)
    return trace.add_op(struct, None, size)


def trace_positions(x: SymbolicTensor, table: Tensor, first: int) -> None:
    """To each token's line of `x` [N, n] that of its position is added, of `table` [lines, n], in which position 0 is
    line `first`."""
    operation = OpStruct(kind=POSITIONS, what=table.data_ptr(), size=table.shape[1], layer=first)
    x.trace.add_in_place(operation, x)
