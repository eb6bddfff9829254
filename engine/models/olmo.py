"""OLMo 2 and 3 (arXiv 2501.00656, 2512.13961) and EXAONE 4 (arXiv 2507.11407): norms behind each part of a layer and
none before it. OLMo normalises all queries of a token together, and all keys; EXAONE head by head."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.norm import rms_norm
from ..layers.rotary import Rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from .interfaces import Decoder
from .llama import build_dense_mlp, layer_norm, layer_rotaries
from .native_decoder import NativeDecoder
from .pre_norm_layer import PostNormLayer


def build_olmo(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    bias = spec.attention_bias
    return _build(spec, loader, AttentionProjections(qkv_bias=bias, out_bias=bias, norm=rms_norm, whole_norms=True))


def build_exaone4(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    """Where some layers have a window, the others do not rotate."""
    return _build(spec, loader, AttentionProjections(norm=rms_norm))


def _build(spec: ModelSpec, loader: WeightLoader, projections: AttentionProjections) -> Decoder:
    rotaries = layer_rotaries(spec, loader)
    layers = [_build_layer(spec, loader, index, projections, rotary) for index, rotary in rotaries.items()]
    return NativeDecoder(build_ends(spec, loader, rms_norm), layers)


def _build_layer(
    spec: ModelSpec, loader: WeightLoader, index: int, projections: AttentionProjections, rotary: Rotary
) -> PostNormLayer:
    return PostNormLayer(
        SelfAttention(loader, spec, index, projections, rotary),
        layer_norm(spec, loader, index, "post_attention_layernorm"),
        build_dense_mlp(spec, loader, index),
        layer_norm(spec, loader, index, "post_feedforward_layernorm"),
    )
