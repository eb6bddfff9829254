"""The gated feed-forward layer (SwiGLU, arXiv 2002.05202), gate and up projection computed as one."""

import torch.nn.functional as F
from torch import Tensor

from ..weights import Loader
from .group import part
from .linear import ColumnLinear, Output, RowLinear


class GatedMLP:
    """x [N, hidden] -> down(silu(gate(x)) * up(x)) [N, hidden]."""

    def __init__(self, load: Loader, name: str, hidden: int, intermediate: int, *, bias: bool) -> None:
        mine = part(intermediate, load.group)
        outputs = [Output(f"{name}.{projection}", intermediate, mine) for projection in ("gate_proj", "up_proj")]
        self._gate_up = ColumnLinear(load, outputs, hidden, bias=bias)
        self._down = RowLinear(load, f"{name}.down_proj", intermediate, mine, hidden, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(F.silu(gate).mul_(up))
