"""How transformers' towers compute on the host: linear layers and patches with weights that oneDNN has packed once,
and attention without a mask as products of a head's queries with all keys, window by window.

torch packs weights again for each product, in single precision it leaves products to a library that is slow on
processors of other makers, and its own attention multiplies small blocks.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_ATTENTION = "charonia_flash"
"""The name of `attend` in transformers, whose towers hand over the bounds of windows to names with "flash" in them."""

_PACKED_ROWS = 32
"""The number of rows that oneDNN's packed layout is chosen for; it serves every number of rows."""

_LONG_WINDOW = 128
"""Tokens of a window from which on its heads are computed one by one."""

_QUERIES, _SCORES = 512, 1 << 22
"""Queries of a long window, and scores of short ones, that are computed at a time: they stay in the caches."""


def compute_on_host(tower: Any, parts: Iterable[str]) -> None:
    """Let a loaded model of transformers compute so. `parts`: the names of the configurations in its own whose modules
    attend to media; where torch's attention is theirs, this one takes its place."""
    if not packing_works(tower.dtype):
        return
    _pack_layers(tower)
    _register_attention()
    for part in parts:
        config = getattr(tower.config, part, None)
        if config is not None and config._attn_implementation == "sdpa":
            config._attn_implementation = _ATTENTION


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed products exist and agree with torch's: its operators are torch's private ones."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    x, weight = (torch.linspace(-1, 1, rows * 48).sin().view(rows, 48).to(dtype) for rows in (40, 80))
    try:
        difference = (_multiply(x, _pack(weight)).float() - x.float() @ weight.float().T).abs().max()
    except (AttributeError, RuntimeError):
        return False
    return bool(difference < 64 * torch.finfo(dtype).eps)


class PackedLinear(nn.Module):
    """A linear layer whose `weight` is the packed one: it has a shape and a dtype, and no numbers that torch reads."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = _pack(linear.weight)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return _multiply(x, self.weight, self.bias)


class PackedPatches(nn.Module):
    """A convolution whose kernels lie side by side: a linear layer over patches."""

    def __init__(self, convolution: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        self.weight = _pack(convolution.weight.flatten(1))
        self.bias = convolution.bias
        self._sizes = convolution.kernel_size

    def forward(self, x: Tensor) -> Tensor:
        for axis, size in enumerate(self._sizes):
            at = 2 + 2 * axis
            count = x.shape[at] // size
            x = x.narrow(at, 0, count * size).reshape(*x.shape[:at], count, size, *x.shape[at + 1 :])
        places, within = range(2, x.dim(), 2), range(3, x.dim(), 2)
        patches = x.permute(0, *places, 1, *within).flatten(1 + len(places))
        return _multiply(patches, self.weight, self.bias).movedim(-1, 1).contiguous()


def _pack_layers(tower: nn.Module) -> None:
    """Packs each layer that can be, and lets go of it before the next: one weight at a time is there twice. What is
    only derived from such a layer may compute otherwise, or be read by others, and stays."""
    packed: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
    for module in [module for module in tower.modules() if module._modules]:
        for name, child in module._modules.items():
            if child is not None and (layer := packed.get(child) or _packed(child)) is not None:
                packed[child] = layer
                setattr(module, name, layer)


def _packed(module: nn.Module) -> nn.Module | None:
    if type(module) is nn.Linear and module.weight.numel():
        return PackedLinear(module)
    if (type(module) is nn.Conv2d or type(module) is nn.Conv3d) and _parts_patches(module):
        return PackedPatches(module)
    return None


def _parts_patches(convolution: nn.Conv2d | nn.Conv3d) -> bool:
    """Whether each number belongs to one patch."""
    sizes = convolution.kernel_size
    plain = convolution.padding in ("valid", (0,) * len(sizes)) and set(convolution.dilation) == {1}
    return plain and convolution.stride == sizes and convolution.groups == 1


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_ROWS)
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


@cache
def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_ATTENTION, attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: tensors [batch, heads, tokens, size] -> [batch, tokens, heads, size].
    `cu_seq_lens_q`: the bounds of windows within a batch of one. What has a mask or an order, or attends to
    others' keys, is torch's matter."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    masked = attention_mask is not None or others.get("position_bias") is not None
    if masked or causal or query.shape[2] != key.shape[2]:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        rest = {"scaling": scaling, "is_causal": is_causal, **others}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **rest)
    batch, heads, tokens, size = query.shape
    bounds = range(0, (batch + 1) * tokens, tokens) if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    groups = heads // key.shape[1]
    tensors = [query, *(part.repeat_interleave(groups, 1) if groups > 1 else part for part in (key, value))]
    q, k, v = (tensor.transpose(1, 2).reshape(batch * tokens, heads, -1) for tensor in tensors)
    rows = attend_windows(q, k, v, bounds, size**-0.5 if scaling is None else scaling)
    return rows.view(batch, tokens, heads, -1), None


def attend_windows(q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[int], scale: float) -> Tensor:
    """Tensors [tokens, heads, size] -> the same: the tokens between two bounds see one another. Scores and what becomes
    of them are in single precision up to the product with values."""
    out = torch.empty(v.shape, dtype=v.dtype)
    begins: dict[int, list[int]] = {}
    for begin, end in pairwise(bounds):
        if end > begin:
            begins.setdefault(end - begin, []).append(begin)
    heads = q.shape[1]
    for length, windows in begins.items():
        if length >= _LONG_WINDOW:
            for begin in windows:
                window = slice(begin, begin + length)
                for head in range(heads):
                    _attend_long_window(q[window, head], k[window, head], v[window, head], scale, out[window, head])
            continue
        for group in torch.split(torch.tensor(windows), max(1, _SCORES // (heads * length**2))):
            places = (group[:, None] + torch.arange(length)).flatten()
            shape = (len(group), length, heads, -1)
            queries, keys, values = (tensor[places].view(shape).transpose(1, 2) for tensor in (q, k, v))
            scores = (queries.float() * scale) @ keys.float().transpose(-1, -2)
            rows = scores.softmax(-1).to(v.dtype) @ values
            out[places] = rows.transpose(1, 2).flatten(0, 1)
    return out


def _attend_long_window(q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> None:
    """One head of a window, [tokens, size], into `out`."""
    keys, values = _pack(k.float().contiguous()), _pack(v.T.contiguous())
    for begin in range(0, len(q), _QUERIES):
        span = slice(begin, begin + _QUERIES)
        scores = _multiply(q[span].float() * scale, keys)
        out[span] = _multiply(scores.softmax(-1).to(v.dtype), values)
