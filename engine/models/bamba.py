"""Bamba, whose layers are Mamba-2's or attend, and Falcon-H1 (arXiv 2507.22448), whose layers do both beside each other
and multiply what comes out of their parts by numbers of config.json."""

from torch import Tensor

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.mamba2 import Mamba2
from ..layers.mlp import GatedMLP, GatedMLPSpec
from ..layers.norm import Norm, divided_rms_norm, rms_norm
from ..layers.rotary import Rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from ..layers.step_context import StepContext
from .interfaces import Decoder
from .llama import shared_rotary
from .native_decoder import NativeDecoder

_LAST_NORM = "model.final_layernorm.weight"


def build_bamba(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return NativeDecoder(build_ends(spec, loader, rms_norm, last_norm=_LAST_NORM), build_layers(spec, loader))


def build_falcon_h1(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    scales = spec.multipliers

    def last_norm(weight: Tensor, eps: float) -> Norm:
        return divided_rms_norm(weight, eps, scales.logits_divisor)

    return NativeDecoder(build_ends(spec, loader, last_norm, scales.embedding, _LAST_NORM), build_layers(spec, loader))


def build_layers(spec: ModelSpec, loader: WeightLoader) -> list["BambaLayer"]:
    rotary = shared_rotary(spec.rope, spec, loader)
    return [BambaLayer(spec, loader, index, rotary) for index in loader.stage.layers(spec.layers)]


class BambaLayer:
    host_bound = False

    def __init__(self, spec: ModelSpec, loader: WeightLoader, index: int, rotary: Rotary) -> None:
        name = f"model.layers.{index}"
        hidden = spec.hidden_size
        self._factors = spec.branches
        self._before_mixers = rms_norm(loader.vector(f"{name}.input_layernorm.weight", hidden), spec.norm_eps)
        self._attention: SelfAttention | None = None
        if spec.attention[index] is not None:
            projections = AttentionProjections(qkv_bias=spec.attention_bias, out_bias=spec.attention_bias)
            self._attention = SelfAttention(loader, spec, index, projections, rotary)
        self._mamba = None if spec.states[index] is None else Mamba2(loader, spec, index, f"{name}.mamba")
        self._before_mlp = rms_norm(loader.vector(f"{name}.pre_ff_layernorm.weight", hidden), spec.norm_eps)
        mlp = GatedMLPSpec(
            f"{name}.feed_forward",
            hidden,
            spec.intermediate_size,
            spec.mlp_bias,
            spec.activation,
            gate_factor=spec.branches.mlp_gate,
        )
        self._mlp = GatedMLP(loader, mlp)
        parts = self._attention, self._mamba, self._mlp
        self.untraceable = next((part.untraceable for part in parts if part is not None and part.untraceable), None)

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        mixed = self._mix(self._before_mixers.add_and_norm(x, delta), context)
        return _times(self._mlp(self._before_mlp.add_and_norm(x, mixed), context), self._factors.mlp)

    def _mix(self, x: Tensor, context: StepContext) -> Tensor:
        if self._mamba is None:
            assert self._attention is not None, "a layer does one or the other, or both"
            return self._attention(x, context)
        recurrent = _times(self._mamba(x, context), self._factors.mamba)
        if self._attention is None:
            return recurrent
        return recurrent.add_(_times(self._attention(x, context), self._factors.attention))


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x.mul_(factor)
