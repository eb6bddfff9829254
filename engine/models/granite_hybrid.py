"""Granite 4's hybrids, dense or with experts: most layers are Mamba-2's, a few attend without positions; embeddings,
branches, scores and logits are multiplied by numbers of config.json."""

from torch import Tensor

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.mamba2 import Mamba2
from ..layers.mlp import FeedForward, GatedMLP, GatedMLPSpec, MixtureOfExperts, SharedExpert
from ..layers.norm import Norm, divided_rms_norm, rms_norm
from ..layers.rotary import Rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from ..layers.step_context import StepContext
from .interfaces import Decoder
from .llama import shared_rotary
from .native_decoder import NativeDecoder


def build_granite_hybrid(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    scales = spec.multipliers

    def last_norm(weight: Tensor, eps: float) -> Norm:
        return divided_rms_norm(weight, eps, scales.logits_divisor)

    rotary = shared_rotary(spec.rope, spec, loader)
    layers = [GraniteHybridLayer(spec, loader, index, rotary) for index in loader.stage.layers(spec.layers)]
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
    if spec.experts is None:
        return GatedMLP(loader, shared)
    expert = shared._replace(name=f"{name}.block_sparse_moe", intermediate=spec.experts.intermediate_size)
    return SharedExpert(loader, MixtureOfExperts(loader, expert, spec.experts, router="router.layer"), shared)


class GraniteHybridLayer:
    def __init__(self, spec: ModelSpec, loader: WeightLoader, index: int, rotary: Rotary) -> None:
        name = f"model.layers.{index}"
        hidden = spec.hidden_size
        self._before_mixer = rms_norm(loader.vector(f"{name}.input_layernorm.weight", hidden), spec.norm_eps)
        self._mixer: SelfAttention | Mamba2
        if spec.attention[index] is None:
            self._mixer = Mamba2(loader, spec, index, f"{name}.mamba")
        else:
            projections = AttentionProjections(qkv_bias=spec.attention_bias, out_bias=spec.attention_bias)
            self._mixer = SelfAttention(loader, spec, index, projections, rotary)
        self._before_mlp = rms_norm(loader.vector(f"{name}.post_attention_layernorm.weight", hidden), spec.norm_eps)
        self._mlp = build_feed_forward(spec, loader, index)
        self._scale = spec.multipliers.residual
        self.untraceable = self._mixer.untraceable or self._mlp.untraceable
        self.host_bound = self._mlp.host_bound

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        mixed = self._mixer(self._before_mixer.add_and_norm(x, delta), context).mul_(self._scale)
        return self._mlp(self._before_mlp.add_and_norm(x, mixed), context).mul_(self._scale)
