"""The gated feed-forward layer (arXiv 2002.05202), gate and up projection computed as one."""

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
"""x [N, gate and up, n], flat as [N, 2n] -> activation(gate) * up [N, n]."""

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
"""config.json's name -> the function; spec.ACTIVATIONS are the same names."""


class GatedMLPSpec(NamedTuple):
    """Names, sizes and manner of one gated layer; `fused` is the name of gate and up in one matrix."""

    name: str
    hidden: int
    intermediate: int
    bias: bool = False
    activation: str = "silu"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused: str | None = None

    def outputs(self, mine: slice) -> list[OutputShard]:
        """Gate and up, the features `mine` of each."""
        if self.fused is None:
            return [OutputShard(f"{self.name}.{one}", self.intermediate, mine) for one in (self.gate, self.up)]
        matrix = OutputShard(f"{self.name}.{self.fused}", 2 * self.intermediate, mine)
        return [matrix, matrix.shifted(self.intermediate)]


class GatedMLP:
    """x [N, hidden] -> down(activation(gate(x)) * up(x)) [N, hidden]."""

    def __init__(self, load: WeightLoader, what: GatedMLPSpec) -> None:
        mine = rank_slice(what.intermediate, load.group)
        self._gate_up = ColumnLinear(load, what.outputs(mine), what.hidden, bias=what.bias)
        down = f"{what.name}.{what.down}"
        self._down = RowLinear(load, down, what.intermediate, mine, what.hidden, bias=what.bias)
        self._gate = build_gate(what.activation, load.dtype, load.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activated(x))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's share of the sum that the whole output is."""
        return self._down.partial(self._activated(x))

    def _activated(self, x: Tensor) -> Tensor:
        return self._gate(self._gate_up(x))


class TorchGate:
    """A `Gate` by torch; the reference of `FusedGate`."""

    def __init__(self, activation: str) -> None:
        self._activation = ACTIVATION_FUNCTIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return self._activation(gate).mul_(up)


def build_gate(activation: str, dtype: torch.dtype, device: torch.device) -> Gate:
    """The fastest one here."""
    return FusedGate(activation) if library.supports(dtype, device) else TorchGate(activation)
