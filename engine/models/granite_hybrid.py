"""Granite 4's hybrids, dense or with experts: most layers are Mamba-2's, a few attend without positions; embeddings,
branches, scores and logits are multiplied by numbers of config.json."""

from functools import partial

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.mamba2 import Mamba2
from ..layers.mlp import FeedForward, GatedMLP, GatedMLPSpec, MixtureOfExperts, SharedExpert
from ..layers.norm import divided_rms_norm, rms_norm
from ..layers.rotary import Rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from .interfaces import Decoder
from .llama import shared_rotary
from .native_decoder import NativeDecoder
from .pre_norm_layer import Mixer, PreNormLayer


def build_granite_hybrid(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    scales = spec.multipliers
    last_norm = partial(divided_rms_norm, divisor=scales.logits_divisor)
    rotary = shared_rotary(spec.rope, spec, loader)
    layers = [build_layer(spec, loader, index, rotary) for index in loader.stage.layers(spec.layers)]
    return NativeDecoder(build_ends(spec, loader, last_norm, scales.embedding), layers)


def build_feed_forward(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    """An MLP of every token's; in larger models beside it experts."""
    name = f"model.layers.{index}"
    shared = GatedMLPSpec(
        f"{name}.shared_mlp",
        spec.hidden_size,
        spec.intermediate_size,
        activation=spec.activation,
        fused="input_linear",
        down="output_linear",
    )
    if loader.has(f"{shared.name}.gate_proj.weight"):  # as GGUF has them
        shared = shared._replace(fused=None)
    if spec.experts is None:
        return GatedMLP(loader, shared)
    expert = shared._replace(name=f"{name}.block_sparse_moe", intermediate=spec.experts.intermediate_size)
    return SharedExpert(loader, MixtureOfExperts(loader, expert, spec.experts, router="router.layer"), shared)


def build_layer(spec: ModelSpec, loader: WeightLoader, index: int, rotary: Rotary) -> PreNormLayer:
    name = f"model.layers.{index}"
    hidden = spec.hidden_size
    before_mixer = rms_norm(loader.vector(f"{name}.input_layernorm.weight", hidden), spec.norm_eps)
    scales = spec.multipliers
    mixer: Mixer
    if spec.attention[index] is None:
        mixer = Mamba2(loader, spec, index, f"{name}.mamba")
        mixer_scale = scales.mamba
    else:
        projections = AttentionProjections(qkv_bias=spec.attention_bias, out_bias=spec.attention_bias)
        mixer = SelfAttention(loader, spec, index, projections, rotary)
        mixer_scale = scales.attention
    before_mlp = rms_norm(loader.vector(f"{name}.post_attention_layernorm.weight", hidden), spec.norm_eps)
    feed_forward = build_feed_forward(spec, loader, index)
    return PreNormLayer(before_mixer, mixer, before_mlp, feed_forward, mixer_scale, scales.mlp)
