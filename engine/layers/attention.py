"""Grouped-query self-attention: projections and rotation here, the cache behind `Attend`."""

from torch import Tensor

from ..attention.base import Attend
from ..spec import ModelSpec
from ..weights import Loader
from .group import kv_part, part, times
from .linear import ColumnLinear, Output, RowLinear
from .rotary import Angles


class SelfAttention:
    """x [N, hidden] -> [N, hidden], this rank's heads of layer `index`."""

    def __init__(self, load: Loader, spec: ModelSpec, index: int, *, qkv_bias: bool, out_bias: bool) -> None:
        name, size = f"model.layers.{index}.self_attn", spec.head_dim
        heads, kv_heads = part(spec.heads, load.group), kv_part(spec.kv_heads, load.group)
        self._index, self._head_dim = index, size
        self._heads, self._kv_heads = heads.stop - heads.start, kv_heads.stop - kv_heads.start
        outputs = [
            Output(f"{name}.q_proj", spec.heads * size, times(heads, size)),
            Output(f"{name}.k_proj", spec.kv_heads * size, times(kv_heads, size)),
            Output(f"{name}.v_proj", spec.kv_heads * size, times(kv_heads, size)),
        ]
        self._qkv = ColumnLinear(load, outputs, spec.hidden_size, bias=qkv_bias)
        columns = times(heads, size)
        self._out = RowLinear(load, f"{name}.o_proj", spec.heads * size, columns, spec.hidden_size, bias=out_bias)

    def __call__(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        heads = self._qkv(x).view(len(x), -1, self._head_dim)
        turning = self._heads + self._kv_heads
        turned = angles.rotate(heads[:, :turning])
        mixed = attend(self._index, turned[:, : self._heads], turned[:, self._heads :], heads[:, turning:])
        return self._out(mixed)
