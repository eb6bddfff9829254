"""Gates of heads behind attention and recurrences, and the norm that heads of these have besides: one pass, computed in
float32, a program a head. The reference is `layers.head_gate.TorchHeadGate`."""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from ..cpu.recurrent import HeadNorm
from .gate import sigmoid
from .norm import plan_rows
from .runtime import DIVISIBLE, TRITON_TYPES, Specialisation


@triton.jit
def _head_gate_kernel(
    x,
    gates,
    weight,
    out,
    heads,
    size,
    gates_stride,
    column,
    weights,
    eps,
    NORMALISED: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[row] = x[row] times the gate; NORMALISED: norm(x[row]) * weight[head % weights] times the gate, or if it
    GATES_FIRST the norm of that product. Row r is head r % heads of token r // heads; gates begin at `column`."""
    row = tl.program_id(0).to(tl.int64)
    head = row % heads
    place = tl.arange(0, BLOCK)
    valid = place < size
    values = tl.load(x + row * size + place, mask=valid, other=0.0)
    gate = tl.load(gates + row // heads * gates_stride + column + head * size + place, mask=valid, other=0.0)
    gate = gate.to(tl.float32)
    gate = sigmoid(gate) if SIGMOID else gate * sigmoid(gate)
    wide = values.to(tl.float32)
    if GATES_FIRST:
        wide *= gate
    if NORMALISED:
        wide *= tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
        wide *= tl.load(weight + head % weights * size + place, mask=valid, other=0.0)
    if not GATES_FIRST:
        wide *= gate
    tl.store(out + row * size + place, wide.to(values.dtype), mask=valid)


class TritonHeadGate:
    """The same as `HeadGate`, by a kernel."""

    untraceable: str | None = "Triton gates its heads"

    def __init__(self, heads: int, size: int, column: int, norm: HeadNorm | None) -> None:
        self._heads, self._size, self._column = heads, size, column
        self._norm = norm or HeadNorm(None, 0.0, sigmoid=True)

    def __call__(self, x: Tensor, gates: Tensor) -> Tensor:
        """x [N, heads * n], contiguous, and gates [N, width] -> [N, heads * n]."""
        out = x.new_empty(x.shape)
        weight, eps, gates_first, is_sigmoid = self._norm
        weights = 1 if weight is None else weight.numel() // self._size
        tensors = x, gates, x if weight is None else weight, out
        sizes = self._heads, self._size, gates.stride(0), self._column, weights, eps
        kinds = weight is not None, weight is not None and gates_first, is_sigmoid
        if rows := len(x) * self._heads:
            _head_gate_kernel[(rows,)](*tensors, *sizes, *kinds, **plan_rows(self._size))
        return out


def specialisations() -> Iterator[Specialisation]:
    """Those behind attention, Qwen 3.5's delta rule, and Mamba-2 with 8 groups and one."""
    kinds = "NORMALISED", "GATES_FIRST", "SIGMOID"
    forms = ((256, False, False, True), (128, True, False, False), (1024, True, True, False), (8192, True, True, False))
    for kind in TRITON_TYPES.values():
        for size, *own in forms:
            types = {"x": f"*{kind}", "gates": f"*{kind}", "weight": "*fp32", "out": f"*{kind}"}
            types |= dict.fromkeys(("heads", "size", "gates_stride", "column"), f"i32{DIVISIBLE}")
            types |= {"weights": "i32", "eps": "fp32"}
            plan = plan_rows(size) | dict(zip(kinds, own, strict=True))
            yield Specialisation.of_plan(_head_gate_kernel, types, plan)
