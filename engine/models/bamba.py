"""Bamba, whose layers are Mamba-2's or attend, and Falcon-H1 (arXiv 2507.22448), whose layers do both beside each other
and multiply what comes out of their parts by numbers of config.json."""

from functools import partial

from torch import Tensor

from ..checkpoint.model_spec import ModelSpec, Multipliers
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.mamba2 import Mamba2
from ..layers.mlp import GatedMLP, GatedMLPSpec
from ..layers.norm import divided_rms_norm, rms_norm
from ..layers.rotary import Rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from ..layers.step_context import StepContext
from .interfaces import Decoder
from .llama import shared_rotary
from .native_decoder import NativeDecoder
from .pre_norm_layer import Mixer, PreNormLayer, scaled

_LAST_NORM = "model.final_layernorm.weight"


def build_bamba(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return NativeDecoder(build_ends(spec, loader, rms_norm, last_norm=_LAST_NORM), build_layers(spec, loader))


def build_falcon_h1(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    scales = spec.multipliers
    last_norm = partial(divided_rms_norm, divisor=scales.logits_divisor)
    return NativeDecoder(build_ends(spec, loader, last_norm, scales.embedding, _LAST_NORM), build_layers(spec, loader))


def build_layers(spec: ModelSpec, loader: WeightLoader) -> list[PreNormLayer]:
    rotary = shared_rotary(spec.rope, spec, loader)
    return [build_layer(spec, loader, index, rotary) for index in loader.stage.layers(spec.layers)]


def build_layer(spec: ModelSpec, loader: WeightLoader, index: int, rotary: Rotary) -> PreNormLayer:
    name = f"model.layers.{index}"
    hidden = spec.hidden_size
    before_mixer = rms_norm(loader.vector(f"{name}.input_layernorm.weight", hidden), spec.norm_eps)
    mixer = build_mixer(spec, loader, index, rotary)
    before_mlp = rms_norm(loader.vector(f"{name}.pre_ff_layernorm.weight", hidden), spec.norm_eps)
    mlp = GatedMLPSpec(
        f"{name}.feed_forward",
        hidden,
        spec.intermediate_size,
        spec.mlp_bias,
        spec.activation,
        gate_factor=spec.multipliers.mlp_gate,
    )
    return PreNormLayer(before_mixer, mixer, before_mlp, GatedMLP(loader, mlp), mlp_scale=spec.multipliers.mlp)


def build_mixer(spec: ModelSpec, loader: WeightLoader, index: int, rotary: Rotary) -> Mixer:
    """Mamba-2 or attention, or both of them."""
    mamba = None if spec.states[index] is None else Mamba2(loader, spec, index, f"model.layers.{index}.mamba")
    if spec.attention[index] is None:
        assert mamba is not None, "a layer does one or the other, or both"
        return mamba
    projections = AttentionProjections(qkv_bias=spec.attention_bias, out_bias=spec.attention_bias)
    attention = SelfAttention(loader, spec, index, projections, rotary)
    return attention if mamba is None else ParallelMixers(mamba, attention, spec.multipliers)


class ParallelMixers:
    """Mamba-2 and attention of the same x [N, hidden], each times a number of its own, added."""

    def __init__(self, mamba: Mamba2, attention: SelfAttention, scales: Multipliers) -> None:
        self._mamba = mamba
        self._attention = attention
        self._scales = scales
        self.untraceable = mamba.untraceable or attention.untraceable
        self.host_bound = mamba.host_bound

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        recurrent = scaled(self._mamba(x, context), self._scales.mamba)
        return recurrent.add_(scaled(self._attention(x, context), self._scales.attention))
