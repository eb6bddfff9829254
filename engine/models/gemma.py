"""Gemma 2 and 3 (arXiv 2408.00118, 2503.19786): norms on both sides of each part, scaled embeddings, GeGLU, layers with
and without a window. Gemma 2 caps scores and logits; Gemma 3 normalises heads, and near layers turn faster."""

import math

import torch
from torch import Tensor

from ..attention.base import Attend
from ..layers.attention import Projections, SelfAttention
from ..layers.embedding import Embedding
from ..layers.linear import Head
from ..layers.mlp import GatedMLP
from ..layers.norm import Norm, offset_rms_norm
from ..layers.rotary import Angles, rotary
from ..spec import ModelSpec
from ..weights import Loader
from .llama import mlp


class Gemma:
    """Token ids and positions [N] of packed sequences -> hidden states [N, hidden] -> logits of chosen places."""

    def __init__(self, spec: ModelSpec, load: Loader, positions: int, has: Projections) -> None:
        """Build from the checkpoint; `positions` is the longest sequence to be served, in tokens."""
        self._embed = Embedding(load, "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self._scale = torch.tensor(math.sqrt(spec.hidden_size), dtype=load.dtype, device=load.device)
        ropes = {spec.rope, spec.local_rope}
        self._rotary = {rope: rotary(rope, spec.head_dim, positions, load.dtype, load.device) for rope in ropes}
        self._layers = [Layer(spec, load, index, has) for index in range(spec.layers)]
        self._ropes = [spec.local_rope if view.window else spec.rope for view in spec.views]
        self._norm = _norm(load, "model.norm", spec)
        head = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
        self._head = Head(load, head, spec.vocab_size, spec.hidden_size)
        self._cap = spec.logit_cap

    def logits(self, tokens: Tensor, positions: Tensor, attend: Attend, chosen: Tensor) -> Tensor:
        x = self._embed(tokens) * self._scale
        angles = {rope: turning(positions) for rope, turning in self._rotary.items()}
        delta = torch.zeros_like(x)
        for layer, rope in zip(self._layers, self._ropes, strict=True):
            delta = layer(x, delta, angles[rope], attend)
        logits = self._head(self._norm.after(x[chosen], delta[chosen]))
        return logits if self._cap is None else (logits / self._cap).tanh_().mul_(self._cap)


class Layer:
    """One decoder layer. The residual stream x is changed in place; what each part adds to it is added by the norm of
    the next part, and the last `delta` by whoever comes after."""

    def __init__(self, spec: ModelSpec, load: Loader, index: int, has: Projections) -> None:
        name = f"model.layers.{index}"
        self._before_attention = _norm(load, f"{name}.input_layernorm", spec)
        self._attention = SelfAttention(load, spec, index, has)
        self._after_attention = _norm(load, f"{name}.post_attention_layernorm", spec)
        self._before_mlp = _norm(load, f"{name}.pre_feedforward_layernorm", spec)
        self._mlp = GatedMLP(load, mlp(spec, index)._replace(bias=False))
        self._after_mlp = _norm(load, f"{name}.post_feedforward_layernorm", spec)

    def __call__(self, x: Tensor, delta: Tensor, angles: Angles, attend: Attend) -> Tensor:
        mixed = self._after_attention(self._attention(self._before_attention.after(x, delta), angles, attend))
        return self._after_mlp(self._mlp(self._before_mlp.after(x, mixed)))


def _norm(load: Loader, name: str, spec: ModelSpec) -> Norm:
    return offset_rms_norm(load.vector(f"{name}.weight", spec.hidden_size), spec.norm_eps)


def gemma2(spec: ModelSpec, load: Loader, positions: int) -> Gemma:
    return Gemma(spec, load, positions, Projections(qkv_bias=spec.attention_bias, out_bias=spec.attention_bias))


def gemma3(spec: ModelSpec, load: Loader, positions: int) -> Gemma:
    bias = spec.attention_bias
    return Gemma(spec, load, positions, Projections(qkv_bias=bias, out_bias=bias, norm=offset_rms_norm))
