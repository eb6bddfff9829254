"""Gemma 2 and 3 (arXiv 2408.00118, 2503.19786): norms on both sides of each part, scaled embeddings, GeGLU, layers with
and without a window. Gemma 2 caps scores and logits; Gemma 3 normalises heads, and near layers turn faster."""

import math

from torch import Tensor

from ..attention.backend import StepAttention
from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.mlp import GatedMLP
from ..layers.norm import Norm, offset_rms_norm
from ..layers.rotary import RotaryAngles, build_rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from .interfaces import Decoder
from .llama import mlp_spec
from .native_decoder import LayerRotaries, NativeDecoder


def _build_gemma(spec: ModelSpec, load: WeightLoader, has: AttentionProjections) -> Decoder:
    layers = load.layers(spec.layers)
    ropes = [spec.local_rope if spec.attention[index].window else spec.rope for index in layers]
    kinds = list(dict.fromkeys(ropes))
    rotaries = [
        build_rotary(rope, spec.head_dim, load.context.max_positions, load.dtype, load.device) for rope in kinds
    ]
    return NativeDecoder(
        build_ends(spec, load, offset_rms_norm, math.sqrt(spec.hidden_size)),
        [GemmaDecoderLayer(spec, load, index, has) for index in layers],
        LayerRotaries(rotaries, [kinds.index(rope) for rope in ropes]),
    )


class GemmaDecoderLayer:
    """One decoder layer. The residual stream x is changed in place; what each part adds to it is added by the norm of
    the next part, and the last `delta` by whoever comes after."""

    def __init__(self, spec: ModelSpec, load: WeightLoader, index: int, has: AttentionProjections) -> None:
        name = f"model.layers.{index}"
        self._before_attention = _norm(load, f"{name}.input_layernorm", spec)
        self._attention = SelfAttention(load, spec, index, has)
        self._after_attention = _norm(load, f"{name}.post_attention_layernorm", spec)
        self._before_mlp = _norm(load, f"{name}.pre_feedforward_layernorm", spec)
        self._mlp = GatedMLP(load, mlp_spec(spec, index)._replace(bias=False))
        self._after_mlp = _norm(load, f"{name}.post_feedforward_layernorm", spec)

    def __call__(self, x: Tensor, delta: Tensor, angles: RotaryAngles, attend: StepAttention) -> Tensor:
        mixed = self._after_attention(self._attention(self._before_attention.add_and_norm(x, delta), angles, attend))
        return self._after_mlp(self._mlp(self._before_mlp.add_and_norm(x, mixed)))


def _norm(load: WeightLoader, name: str, spec: ModelSpec) -> Norm:
    return offset_rms_norm(load.vector(f"{name}.weight", spec.hidden_size), spec.norm_eps)


def build_gemma2(spec: ModelSpec, load: WeightLoader) -> Decoder:
    return _build_gemma(spec, load, AttentionProjections(qkv_bias=spec.attention_bias, out_bias=spec.attention_bias))


def build_gemma3(spec: ModelSpec, load: WeightLoader) -> Decoder:
    bias = spec.attention_bias
    return _build_gemma(spec, load, AttentionProjections(qkv_bias=bias, out_bias=bias, norm=offset_rms_norm))
