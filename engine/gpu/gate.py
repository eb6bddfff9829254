"""Gate of an MLP (arXiv 2002.05202): activation(gate) * up in one pass, computed in float32. The reference is
`layers.mlp.TorchGate`, which rounds once more, between activation and product.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from ..cpu.elementwise import CLAMP, CLAMPED_SWIGLU, SQUARED_RELU
from .dependent_launch import begin_dependent
from .runtime import DIVISIBLE, TRITON_TYPES, Specialisation, dependent_launch

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", CLAMPED_SWIGLU, SQUARED_RELU)
_CLAMP = tl.constexpr(CLAMP)
_BLOCK = 1024


@triton.jit
def sigmoid(x):
    return tl.sigmoid(tl.maximum(x, -80.0))  # the exponential stays finite, or the interpreter warns


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The function of that name in `layers.mlp.ACTIVATION_FUNCTIONS`, of float32."""
    if ACTIVATION == "silu":
        out = x * sigmoid(x)
    elif ACTIVATION == "gelu":
        out = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 1 + tanh(y) is 2 sigmoid(2 y)
        out = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "squared_relu":
        x = tl.maximum(x, 0.0)
        out = x * x
    else:
        tl.static_assert(ACTIVATION == "quick_gelu" or ACTIVATION == "clamped_swiglu")
        if ACTIVATION == "clamped_swiglu":
            x = tl.minimum(x, _CLAMP)
        out = x * sigmoid(1.702 * x)
    return out


@triton.jit
def lift(up, ACTIVATION: tl.constexpr):
    """What the activated gate is multiplied by, of float32 `up`."""
    if ACTIVATION == "clamped_swiglu":
        up = tl.minimum(tl.maximum(up, -_CLAMP), _CLAMP) + 1.0
    return up


@triton.jit
def _gate_kernel(packed, out, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False):
    """out[row] = activation(packed[row, :size]) * packed[row, size:]; without a gate activation(packed[row])."""
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = columns < size
    gated: tl.constexpr = ACTIVATION != "squared_relu"
    at = packed + row * (2 if gated else 1) * size + columns
    gate = tl.load(at, mask=valid, other=0.0)
    product = activate(gate.to(tl.float32), ACTIVATION)
    if gated:
        up = tl.load(at + size, mask=valid, other=0.0)
        product *= lift(up.to(tl.float32), ACTIVATION)
    tl.store(out + row * size + columns, product.to(gate.dtype), mask=valid)


class TritonGate:
    """Gate and up features side by side, [N, 2n] and contiguous -> activation(gate) * up [N, n]; of SQUARED_RELU the
    features [N, n] alone."""

    def __init__(self, activation: str) -> None:
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        rows = len(x)
        size = x.shape[1] // (1 if self._activation == SQUARED_RELU else 2)
        out = x.new_empty(rows, size)
        if rows:
            gate = _gate_kernel[rows, triton.cdiv(size, _BLOCK)]
            gate(x, out, size, self._activation, _BLOCK, num_warps=4, **dependent_launch(x.device))
        return out


def specialisations() -> Iterator[Specialisation]:
    """Every activation in every dtype."""
    for kind in TRITON_TYPES.values():
        for activation in ACTIVATIONS:
            types = {"packed": f"*{kind}", "out": f"*{kind}", "size": f"i32{DIVISIBLE}"}
            yield Specialisation(_gate_kernel, types, {"ACTIVATION": activation, "BLOCK": _BLOCK}, {"num_warps": 4})
