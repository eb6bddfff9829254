"""The gated feed-forward layer (arXiv 2002.05202), gate and up projection computed as one product."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.tensor_group import rank_slice
from ..checkpoint.weights import WeightLoader
from ..cpu import library
from ..cpu.elementwise import FusedGate
from .linear import ColumnLinear, OutputShard, RowLinear

Gate: TypeAlias = Callable[[Tensor], Tensor]
"""Gate and up features side by side, [N, 2n] -> activation(gate) * up [N, n]."""

_tanh_gelu = partial(F.gelu, approximate="tanh")

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu_python_tanh": _tanh_gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_accurate": _tanh_gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
"""config.json's name -> the function; `model_spec.ACTIVATIONS` are the same names."""


class GatedMLPSpec(NamedTuple):
    """The names of a gated layer's matrices, its sizes and activation; `fused` names the one matrix that holds gate
    and up, where a checkpoint has them in one."""

    name: str
    hidden: int
    intermediate: int
    bias: bool = False
    activation: str = "silu"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused: str | None = None

    def gate_and_up(self, features: slice) -> list[OutputShard]:
        """The matrices of gate and up, of each the output `features` that this rank computes."""
        if self.fused is None:
            return [OutputShard(f"{self.name}.{one}", self.intermediate, features) for one in (self.gate, self.up)]
        matrix = OutputShard(f"{self.name}.{self.fused}", 2 * self.intermediate, features)
        return [matrix, matrix.shifted(self.intermediate)]


class GatedMLP:
    """x [N, hidden] -> down(activation(gate(x)) * up(x)) [N, hidden]."""

    def __init__(self, loader: WeightLoader, spec: GatedMLPSpec) -> None:
        mine = rank_slice(spec.intermediate, loader.group)
        self._gate_up = ColumnLinear(loader, spec.gate_and_up(mine), spec.hidden, bias=spec.bias)
        down = f"{spec.name}.{spec.down}"
        self._down = RowLinear(loader, down, spec.intermediate, mine, spec.hidden, bias=spec.bias)
        fused = library.supports(loader.dtype, loader.device)
        self._gate: Gate = FusedGate(spec.activation) if fused else TorchGate(spec.activation)
        self.untraceable = self._down.untraceable

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._gate(self._gate_up(x)))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's summand of the output."""
        return self._down.partial(self._gate(self._gate_up(x)))


class TorchGate:
    """A `Gate` by torch; the reference of `FusedGate`."""

    def __init__(self, activation: str) -> None:
        self._activation = ACTIVATION_FUNCTIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return self._activation(gate).mul_(up)
