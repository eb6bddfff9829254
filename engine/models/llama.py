"""Llama 1 to 3.x (arXiv 2302.13971, 2407.21783), and the shape of its kin: pre-norm, RoPE, grouped queries, SwiGLU."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

from ..attention.backend import Attend
from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import Loader
from ..layers.embed_and_head import ends
from ..layers.mlp import Gated, GatedMLP
from ..layers.norm import rms_norm
from ..layers.rotary import Angles, rotary
from ..layers.self_attention import Projections, SelfAttention
from .interfaces import Decoder
from .native_decoder import Rotation, Stack

FeedForward: TypeAlias = Callable[[Tensor], Tensor]
"""x [N, hidden] -> [N, hidden]."""


def gated(spec: ModelSpec, load: Loader, index: int) -> FeedForward:
    """The dense feed-forward part of layer `index`."""
    return GatedMLP(load, mlp(spec, index))


def mlp(spec: ModelSpec, index: int) -> Gated:
    name = f"model.layers.{index}.mlp"
    return Gated(name, spec.hidden_size, spec.intermediate_size, spec.mlp_bias, spec.activation)


class Kin(NamedTuple):
    """What tells Llama's relatives from it."""

    attention: Projections = Projections()
    feed_forward: Callable[[ModelSpec, Loader, int], FeedForward] = gated


def like_llama(spec: ModelSpec, load: Loader, kin: Kin) -> Decoder:
    """A decoder of Llama's shape."""
    turning = rotary(spec.rope, spec.head_dim, load.place.positions, load.dtype, load.device)
    layers = [Layer(spec, load, index, kin) for index in load.layers(spec.layers)]
    return Stack(ends(spec, load, rms_norm), layers, Rotation([turning]))


class Layer:
    """One decoder layer. The residual stream x is changed in place; what each part adds to it is added by the norm of
    the next part, and the last `delta` by whoever comes after."""

    def __init__(self, spec: ModelSpec, load: Loader, index: int, kin: Kin) -> None:
        name = f"model.layers.{index}"
        hidden, eps = spec.hidden_size, spec.norm_eps
        self._before_attention = rms_norm(load.vector(f"{name}.input_layernorm.weight", hidden), eps)
        self._attention = SelfAttention(load, spec, index, kin.attention)
        self._before_mlp = rms_norm(load.vector(f"{name}.post_attention_layernorm.weight", hidden), eps)
        self._mlp = kin.feed_forward(spec, load, index)

    def __call__(self, x: Tensor, delta: Tensor, angles: Angles, attend: Attend) -> Tensor:
        mixed = self._attention(self._before_attention.after(x, delta), angles, attend)
        return self._mlp(self._before_mlp.after(x, mixed))


def llama(spec: ModelSpec, load: Loader) -> Decoder:
    bias = spec.attention_bias
    return like_llama(spec, load, Kin(Projections(qkv_bias=bias, out_bias=bias)))
