"""Nemotron-H (arXiv 2504.03624) and Nemotron 3: a layer is one thing, Mamba-2, attention without positions, an MLP or
experts. MLPs have no gate; experts may be projected to fewer features."""

from ..checkpoint.model_spec import CheckpointError, ModelSpec
from ..checkpoint.weights import WeightLoader
from ..cpu.elementwise import SQUARED_RELU
from ..layers.embed_and_head import build_ends
from ..layers.mamba2 import Mamba2
from ..layers.mlp import FeedForward, GatedMLP, GatedMLPSpec, MixtureOfExperts, SharedExpert
from ..layers.norm import rms_norm
from ..layers.rotary import Rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from .interfaces import Decoder
from .llama import shared_rotary
from .native_decoder import NativeDecoder
from .pre_norm_layer import OnePartLayer


def build_nemotron_h(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    rotary = shared_rotary(spec.rope, spec, loader)
    layers = [build_layer(spec, loader, index, rotary) for index in loader.stage.layers(spec.layers)]
    return NativeDecoder(build_ends(spec, loader, rms_norm), layers)


def build_feed_forward(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    """An MLP, or experts beside one that all tokens go through."""
    name = f"model.layers.{index}.mixer"
    mlp = GatedMLPSpec(name, spec.hidden_size, spec.intermediate_size, spec.mlp_bias, SQUARED_RELU)
    experts = spec.experts
    if experts is None or not experts.sparse_layers[index]:
        return GatedMLP(loader, mlp)
    if spec.mlp_bias:
        raise CheckpointError(f"{spec.architecture} with mlp_bias beside experts is not supported")
    expert = mlp._replace(intermediate=experts.intermediate_size)
    shared = mlp._replace(name=f"{name}.shared_experts", intermediate=experts.shared_size)
    return SharedExpert(loader, MixtureOfExperts(loader, expert, experts, bias="gate.e_score_correction_bias"), shared)


def build_layer(spec: ModelSpec, loader: WeightLoader, index: int, rotary: Rotary) -> OnePartLayer:
    name = f"model.layers.{index}"
    norm = rms_norm(loader.vector(f"{name}.norm.weight", spec.hidden_size), spec.norm_eps)
    if spec.feeds[index]:
        return OnePartLayer(norm, build_feed_forward(spec, loader, index))
    if spec.attention[index] is None:
        return OnePartLayer(norm, Mamba2(loader, spec, index, f"{name}.mixer"))
    return OnePartLayer(norm, SelfAttention(loader, spec, index, AttentionProjections(name="mixer"), rotary))
