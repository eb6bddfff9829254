"""Gemma 4 (E2B, E4B, 26B-A4B, 31B; text): layers with a window, and every sixth one without, whose heads are larger and
may make values of their keys' projection. The last layers may attend to keys and values of earlier ones. Small ones
have embeddings for each layer, others experts beside the MLP. Norms stand on both sides of each part."""

import math
from typing import NamedTuple

from torch import Tensor

from ..checkpoint.model_spec import ExpertsSpec, ModelSpec
from ..checkpoint.weights import WeightLoader
from ..cpu.op_trace import untraceable_reason
from ..layers.embed_and_head import build_ends
from ..layers.mlp import GatedMLP, GatedMLPSpec, MixtureOfExperts
from ..layers.norm import Norm, add_normed, divided_rms_norm, rms_norm
from ..layers.per_layer_inputs import PerLayerGate, PerLayerInputs
from ..layers.rotary import Rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from ..layers.step_context import StepContext
from .interfaces import Decoder
from .llama import mlp_spec, shared_rotary
from .native_decoder import NativeDecoder


class Gemma4SharedParts(NamedTuple):
    """What layers have in common: the rotations of those with a window and of the others, and their inputs."""

    local_rotary: Rotary
    rotary: Rotary
    inputs: PerLayerInputs | None


def build_gemma4(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    gemma = spec.gemma
    assert gemma is not None, "config.json of this architecture is read with it"
    full_head_dim = next(spec.kept(kind).key_size for kind in spec.attention if kind and kind.window is None)
    shared = Gemma4SharedParts(
        shared_rotary(spec.local_rope, spec, loader),
        shared_rotary(spec.rope, spec, loader, full_head_dim),
        PerLayerInputs(loader, spec, gemma) if gemma.per_layer_size else None,
    )
    layers = [Gemma4DecoderLayer(spec, loader, index, shared) for index in loader.stage.layers(spec.layers)]
    return NativeDecoder(build_ends(spec, loader, rms_norm, math.sqrt(spec.hidden_size)), layers)


class Gemma4DecoderLayer:
    def __init__(self, spec: ModelSpec, loader: WeightLoader, index: int, shared: Gemma4SharedParts) -> None:
        name = f"model.layers.{index}"
        gemma = spec.gemma
        assert gemma is not None, "config.json of this architecture is read with it"

        def norm(part: str) -> Norm:
            return rms_norm(loader.vector(f"{name}.{part}.weight", spec.hidden_size), spec.norm_eps)

        sees_all = not spec.has_window(index)
        bias = spec.attention_bias
        projections = AttentionProjections(bias, bias, norm=rms_norm, normed_values=True)
        if gemma.keys_as_values and sees_all:
            projections = projections._replace(values="k_proj")
        self._before_attention = norm("input_layernorm")
        rotary = shared.rotary if sees_all else shared.local_rotary
        self._attention = SelfAttention(loader, spec, index, projections, rotary)
        self._after_attention = norm("post_attention_layernorm")
        self._before_mlp = norm("pre_feedforward_layernorm")
        mlp = mlp_spec(spec, index)._replace(bias=False)
        self._mlp = GatedMLP(loader, mlp)
        self._experts = None if spec.experts is None else Gemma4Experts(loader, spec, spec.experts, mlp, name)
        self._after_mlp = norm("post_feedforward_layernorm")
        self._inputs = shared.inputs
        self._input_gate = None
        if shared.inputs is not None:
            self._input_gate = PerLayerGate(loader, spec, index, shared.inputs)
        scalar = f"{name}.layer_scalar"
        self._scalar = loader.number(scalar) if loader.has(scalar) else 1.0
        parts = (self._attention, self._mlp, self._experts, self._input_gate)
        self.untraceable = untraceable_reason(parts)
        self.host_bound = any(part is not None and part.host_bound for part in (self._experts, shared.inputs))

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        inputs = None if self._inputs is None else context.shared(self._inputs, x)
        attended = self._attention(self._before_attention.add_and_norm(x, delta), context)
        mixed = self._mlp(add_normed(self._before_mlp, x, attended, self._after_attention), context)
        if self._experts is not None:
            mixed = self._experts(x, mixed, context)
        out = self._after_mlp(mixed)
        if self._input_gate is not None and inputs is not None:
            x.add_(out)
            out = self._input_gate(x, inputs, context)
        if self._scalar != 1.0:
            x.mul_(self._scalar)
            out.mul_(self._scalar)
        return out


class Gemma4Experts:
    """What a layer's experts make of the residual stream, added to what its MLP makes of it; each normalised. The
    router sees the stream by a norm of its own."""

    def __init__(
        self, loader: WeightLoader, spec: ModelSpec, experts: ExpertsSpec, mlp: GatedMLPSpec, name: str
    ) -> None:
        hidden = spec.hidden_size

        def norm(part: str) -> Norm:
            return rms_norm(loader.vector(f"{name}.{part}.weight", hidden), spec.norm_eps)

        self._after_mlp = norm("post_feedforward_layernorm_1")
        self._before_experts = norm("pre_feedforward_layernorm_2")
        self._after_experts = norm("post_feedforward_layernorm_2")
        scale = loader.vector(f"{name}.router.scale", hidden)
        self._before_router = divided_rms_norm(scale, spec.norm_eps, math.sqrt(hidden))
        expert = mlp._replace(name=name, intermediate=experts.intermediate_size, fused="gate_up_proj")
        self._experts = MixtureOfExperts(
            loader, expert, experts, router="router.proj", scales="router.per_expert_scale"
        )
        self.untraceable = self._experts.untraceable
        self.host_bound = self._experts.host_bound

    def __call__(self, x: Tensor, mixed: Tensor, context: StepContext) -> Tensor:
        expert_sum = self._experts(self._before_experts(x), context, self._before_router(x))
        return self._after_mlp(mixed).add_(self._after_experts(expert_sum))
