"""Qwen 3.5 and its successors, dense or with experts, as published from 2026 on: three of four layers keep the state of
a gated delta rule (arXiv 2412.06464), every fourth attends, with gated heads of which a part is rotated. Norms are
zero-centred."""

from torch import Tensor

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.delta_net import GatedDeltaNet
from ..layers.embed_and_head import build_ends
from ..layers.mlp import FeedForward, GatedMLP, GatedMLPSpec, MixtureOfExperts, SharedExpert
from ..layers.norm import offset_rms_norm
from ..layers.rotary import Rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from ..layers.step_context import StepContext
from .interfaces import Decoder
from .llama import mlp_spec, shared_rotary
from .native_decoder import NativeDecoder


def build_qwen3_5(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return _build(spec, loader, grouped=False)


def build_qwen3_next(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    """Qwen 3-Next, which came before: its matrices are stored in another order."""
    return _build(spec, loader, grouped=True)


def _build(spec: ModelSpec, loader: WeightLoader, grouped: bool) -> Decoder:
    rotary = shared_rotary(spec.rope, spec, loader)
    layers = [Qwen35DecoderLayer(spec, loader, index, rotary, grouped) for index in loader.stage.layers(spec.layers)]
    return NativeDecoder(build_ends(spec, loader, offset_rms_norm), layers)


def build_feed_forward(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    dense = mlp_spec(spec, index)._replace(bias=False)
    if spec.experts is None or not spec.experts.sparse_layers[index]:
        return GatedMLP(loader, dense)
    expert = dense._replace(intermediate=spec.experts.intermediate_size)
    if loader.has(f"{dense.name}.experts.0.gate_up_proj.weight"):
        expert = expert._replace(fused="gate_up_proj")
    shared = GatedMLPSpec(f"{dense.name}.shared_expert", spec.hidden_size, spec.experts.shared_size)
    experts = MixtureOfExperts(loader, expert, spec.experts)
    return SharedExpert(loader, experts, shared, gate=f"{dense.name}.shared_expert_gate")


class Qwen35DecoderLayer:
    def __init__(
        self, spec: ModelSpec, loader: WeightLoader, index: int, rotary: Rotary, grouped: bool = False
    ) -> None:
        """`grouped`: see `GatedDeltaNet`."""
        name = f"model.layers.{index}"
        self._before_mixer = offset_rms_norm(
            loader.vector(f"{name}.input_layernorm.weight", spec.hidden_size), spec.norm_eps
        )
        self._mixer: SelfAttention | GatedDeltaNet
        if spec.attention[index] is None:
            self._mixer = GatedDeltaNet(loader, spec, index, f"{name}.linear_attn", grouped)
        else:
            bias = spec.attention_bias
            projections = AttentionProjections(qkv_bias=bias, out_bias=bias, norm=offset_rms_norm, gated=True)
            self._mixer = SelfAttention(loader, spec, index, projections, rotary)
        self._before_mlp = offset_rms_norm(
            loader.vector(f"{name}.post_attention_layernorm.weight", spec.hidden_size), spec.norm_eps
        )
        self._mlp = build_feed_forward(spec, loader, index)
        self.untraceable = self._mixer.untraceable or self._mlp.untraceable
        self.host_bound = self._mlp.host_bound

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        mixed = self._mixer(self._before_mixer.add_and_norm(x, delta), context)
        return self._mlp(self._before_mlp.add_and_norm(x, mixed), context)
