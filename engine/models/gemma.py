"""Gemma 2 and 3 (arXiv 2408.00118, 2503.19786): norms on both sides of each part, scaled embeddings, GeGLU, layers with
and without a window. Gemma 2 caps scores and logits; Gemma 3 normalises heads, and its layers with a window have rotary
frequencies of their own."""

import math

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.mlp import GatedMLP
from ..layers.norm import Norm, offset_rms_norm
from ..layers.rotary import Rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from .interfaces import Decoder
from .llama import layer_rotaries, mlp_spec
from .native_decoder import NativeDecoder
from .pre_norm_layer import SandwichLayer


def build_gemma2(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return _build_gemma(spec, loader, AttentionProjections(spec.attention_bias, spec.attention_bias))


def build_gemma3(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    projections = AttentionProjections(spec.attention_bias, spec.attention_bias, norm=offset_rms_norm)
    return _build_gemma(spec, loader, projections)


def _build_gemma(spec: ModelSpec, loader: WeightLoader, projections: AttentionProjections) -> Decoder:
    rotaries = layer_rotaries(spec, loader)
    layers = [_build_layer(spec, loader, index, projections, rotary) for index, rotary in rotaries.items()]
    return NativeDecoder(build_ends(spec, loader, offset_rms_norm, math.sqrt(spec.hidden_size)), layers)


def _build_layer(
    spec: ModelSpec, loader: WeightLoader, index: int, projections: AttentionProjections, rotary: Rotary
) -> SandwichLayer:
    def norm(name: str) -> Norm:
        weight = loader.vector(f"model.layers.{index}.{name}.weight", spec.hidden_size)
        return offset_rms_norm(weight, spec.norm_eps)

    return SandwichLayer(
        norm("input_layernorm"),
        SelfAttention(loader, spec, index, projections, rotary),
        norm("post_attention_layernorm"),
        norm("pre_feedforward_layernorm"),
        GatedMLP(loader, mlp_spec(spec, index)._replace(bias=False)),
        norm("post_feedforward_layernorm"),
    )
