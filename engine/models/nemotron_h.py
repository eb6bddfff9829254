"""Nemotron-H (arXiv 2504.03624) and Nemotron 3: a layer is one thing, Mamba-2, attention without positions, an MLP or
experts. MLPs have no gate; experts may be projected to fewer features."""

from typing import TypeAlias

from torch import Tensor

from ..checkpoint.model_spec import CheckpointError, ModelSpec
from ..checkpoint.weights import WeightLoader
from ..cpu.elementwise import SQUARED_RELU
from ..layers.embed_and_head import build_ends
from ..layers.mamba2 import Mamba2
from ..layers.mlp import FeedForward, GatedMLP, GatedMLPSpec, MixtureOfExperts, SharedExpert
from ..layers.norm import rms_norm
from ..layers.rotary import Rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from ..layers.step_context import StepContext
from .interfaces import Decoder
from .llama import shared_rotary
from .native_decoder import NativeDecoder

Mixer: TypeAlias = Mamba2 | SelfAttention | FeedForward


def build_nemotron_h(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    rotary = shared_rotary(spec.rope, spec, loader)
    layers = [NemotronLayer(spec, loader, index, rotary) for index in loader.stage.layers(spec.layers)]
    return NativeDecoder(build_ends(spec, loader, rms_norm), layers)


def build_mixer(spec: ModelSpec, loader: WeightLoader, index: int, rotary: Rotary) -> Mixer:
    name = f"model.layers.{index}.mixer"
    if spec.attention[index] is not None:
        return SelfAttention(loader, spec, index, AttentionProjections(name="mixer"), rotary)
    if spec.states[index] is not None:
        return Mamba2(loader, spec, index, name)
    hidden = spec.hidden_size
    mlp = GatedMLPSpec(name, hidden, spec.intermediate_size, spec.mlp_bias, SQUARED_RELU)
    experts = spec.experts
    if experts is None or not experts.sparse_layers[index]:
        return GatedMLP(loader, mlp)
    if spec.mlp_bias:
        raise CheckpointError(f"{spec.architecture} with mlp_bias beside experts is not supported")
    expert = mlp._replace(intermediate=experts.intermediate_size)
    shared = mlp._replace(name=f"{name}.shared_experts", intermediate=experts.shared_size)
    return SharedExpert(loader, MixtureOfExperts(loader, expert, experts, bias="gate.e_score_correction_bias"), shared)


class NemotronLayer:
    def __init__(self, spec: ModelSpec, loader: WeightLoader, index: int, rotary: Rotary) -> None:
        self._norm = rms_norm(loader.vector(f"model.layers.{index}.norm.weight", spec.hidden_size), spec.norm_eps)
        self._mixer = build_mixer(spec, loader, index, rotary)
        self.untraceable = self._mixer.untraceable
        self.host_bound = spec.feeds[index] and getattr(self._mixer, "host_bound", False)

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        return self._mixer(self._norm.add_and_norm(x, delta), context)
