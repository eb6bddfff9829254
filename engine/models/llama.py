"""Llama 1 to 3.x (arXiv 2302.13971, 2407.21783), and the shape of its kin: pre-norm, RoPE, grouped queries, SwiGLU."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

from ..attention.backend import StepAttention
from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.mlp import GatedMLP, GatedMLPSpec
from ..layers.norm import rms_norm
from ..layers.rotary import RotaryAngles, build_rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from .interfaces import Decoder
from .native_decoder import LayerRotaries, NativeDecoder

FeedForward: TypeAlias = Callable[[Tensor], Tensor]
"""x [N, hidden] -> [N, hidden]."""


def build_dense_mlp(spec: ModelSpec, load: WeightLoader, index: int) -> FeedForward:
    """The dense feed-forward part of layer `index`."""
    return GatedMLP(load, mlp_spec(spec, index))


def mlp_spec(spec: ModelSpec, index: int) -> GatedMLPSpec:
    name = f"model.layers.{index}.mlp"
    return GatedMLPSpec(name, spec.hidden_size, spec.intermediate_size, spec.mlp_bias, spec.activation)


class LlamaVariant(NamedTuple):
    """What tells Llama's relatives from it."""

    attention: AttentionProjections = AttentionProjections()
    feed_forward: Callable[[ModelSpec, WeightLoader, int], FeedForward] = build_dense_mlp


def build_llama_variant(spec: ModelSpec, load: WeightLoader, kin: LlamaVariant) -> Decoder:
    """A decoder of Llama's shape."""
    turning = build_rotary(spec.rope, spec.head_dim, load.context.max_positions, load.dtype, load.device)
    layers = [LlamaDecoderLayer(spec, load, index, kin) for index in load.layers(spec.layers)]
    return NativeDecoder(build_ends(spec, load, rms_norm), layers, LayerRotaries([turning]))


class LlamaDecoderLayer:
    """One decoder layer. The residual stream x is changed in place; what each part adds to it is added by the norm of
    the next part, and the last `delta` by whoever comes after."""

    def __init__(self, spec: ModelSpec, load: WeightLoader, index: int, kin: LlamaVariant) -> None:
        name = f"model.layers.{index}"
        hidden, eps = spec.hidden_size, spec.norm_eps
        self._before_attention = rms_norm(load.vector(f"{name}.input_layernorm.weight", hidden), eps)
        self._attention = SelfAttention(load, spec, index, kin.attention)
        self._before_mlp = rms_norm(load.vector(f"{name}.post_attention_layernorm.weight", hidden), eps)
        self._mlp = kin.feed_forward(spec, load, index)

    def __call__(self, x: Tensor, delta: Tensor, angles: RotaryAngles, attend: StepAttention) -> Tensor:
        mixed = self._attention(self._before_attention.add_and_norm(x, delta), angles, attend)
        return self._mlp(self._before_mlp.add_and_norm(x, mixed))


def build_llama(spec: ModelSpec, load: WeightLoader) -> Decoder:
    bias = spec.attention_bias
    return build_llama_variant(spec, load, LlamaVariant(AttentionProjections(qkv_bias=bias, out_bias=bias)))
