"""Qwen 3.5 and its successors, dense or with experts, as published from 2026 on: three of four layers keep the state of
a gated delta rule (arXiv 2412.06464), every fourth attends, with gated heads of which a part is rotated. Norms are
zero-centred."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.delta_net import GatedDeltaNet
from ..layers.embed_and_head import build_ends
from ..layers.mlp import FeedForward, GatedMLP, GatedMLPSpec, MixtureOfExperts, SharedExpert
from ..layers.norm import offset_rms_norm
from ..layers.rotary import Rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from .interfaces import Decoder
from .llama import mlp_spec, shared_rotary
from .native_decoder import NativeDecoder
from .pre_norm_layer import Mixer, PreNormLayer


def build_qwen3_5(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    """And Qwen 3-Next, which came before: its matrices are stored in another order."""
    rotary = shared_rotary(spec.rope, spec, loader)
    layers = [build_qwen3_5_layer(spec, loader, index, rotary) for index in loader.stage.layers(spec.layers)]
    return NativeDecoder(build_ends(spec, loader, offset_rms_norm), layers)


def build_feed_forward(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    """An MLP, or experts beside one that every token goes through, by the token's own gate."""
    dense = mlp_spec(spec, index)._replace(bias=False)
    if spec.experts is None or not spec.experts.sparse_layers[index]:
        return GatedMLP(loader, dense)
    expert = dense._replace(intermediate=spec.experts.intermediate_size)
    if loader.has(f"{dense.name}.experts.0.gate_up_proj.weight"):
        expert = expert._replace(fused="gate_up_proj")
    shared = GatedMLPSpec(f"{dense.name}.shared_expert", spec.hidden_size, spec.experts.shared_size)
    experts = MixtureOfExperts(loader, expert, spec.experts)
    return SharedExpert(loader, experts, shared, gate=f"{dense.name}.shared_expert_gate")


def build_qwen3_5_layer(spec: ModelSpec, loader: WeightLoader, index: int, rotary: Rotary) -> PreNormLayer:
    name = f"model.layers.{index}"
    hidden = spec.hidden_size
    before_mixer = offset_rms_norm(loader.vector(f"{name}.input_layernorm.weight", hidden), spec.norm_eps)
    mixer: Mixer
    if spec.attention[index] is None:
        mixer = GatedDeltaNet(loader, spec, index, f"{name}.linear_attn")
    else:
        bias = spec.attention_bias
        projections = AttentionProjections(qkv_bias=bias, out_bias=bias, norm=offset_rms_norm, gated=True)
        mixer = SelfAttention(loader, spec, index, projections, rotary)
    before_mlp = offset_rms_norm(loader.vector(f"{name}.post_attention_layernorm.weight", hidden), spec.norm_eps)
    return PreNormLayer(before_mixer, mixer, before_mlp, build_feed_forward(spec, loader, index))
