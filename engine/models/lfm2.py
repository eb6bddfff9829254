"""LFM2 and LFM2.5, dense or with experts (arXiv 2511.23404): most layers convolve a few tokens, the others attend, with
heads that are normalised; SwiGLU in each."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.mlp import FeedForward, GatedMLP, GatedMLPSpec, MixtureOfExperts
from ..layers.norm import rms_norm
from ..layers.rotary import Rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from ..layers.short_convolution import ShortConvolution
from .interfaces import Decoder
from .llama import shared_rotary
from .native_decoder import NativeDecoder
from .pre_norm_layer import Mixer, PreNormLayer

_PROJECTIONS = AttentionProjections(norm=rms_norm, norm_suffix="layernorm", out="out_proj")


def build_lfm2(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    rotary = shared_rotary(spec.rope, spec, loader)
    layers = [build_layer(spec, loader, index, rotary) for index in loader.stage.layers(spec.layers)]
    return NativeDecoder(build_ends(spec, loader, rms_norm, last_norm="model.embedding_norm.weight"), layers)


def build_feed_forward(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    """An MLP, or experts in its place."""
    name = f"model.layers.{index}.feed_forward"
    mlp = GatedMLPSpec(name, spec.hidden_size, spec.intermediate_size, gate="w1", up="w3", down="w2")
    if spec.experts is None or not spec.experts.sparse_layers[index]:
        return GatedMLP(loader, mlp)
    expert = mlp._replace(intermediate=spec.experts.intermediate_size)
    return MixtureOfExperts(loader, expert, spec.experts, bias="expert_bias")


def build_layer(spec: ModelSpec, loader: WeightLoader, index: int, rotary: Rotary) -> PreNormLayer:
    name = f"model.layers.{index}"
    before_mixer = rms_norm(loader.vector(f"{name}.operator_norm.weight", spec.hidden_size), spec.norm_eps)
    mixer: Mixer
    if spec.attention[index] is None:
        mixer = ShortConvolution(loader, spec, index, f"{name}.conv")
    else:
        mixer = SelfAttention(loader, spec, index, _PROJECTIONS, rotary)
    before_mlp = rms_norm(loader.vector(f"{name}.ffn_norm.weight", spec.hidden_size), spec.norm_eps)
    return PreNormLayer(before_mixer, mixer, before_mlp, build_feed_forward(spec, loader, index))
