"""LFM2 and LFM2.5, dense or with experts (arXiv 2511.23404): most layers convolve a few tokens, the others attend, with
heads that are normalised; SwiGLU in each."""

from torch import Tensor

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.mlp import FeedForward, GatedMLP, GatedMLPSpec, MixtureOfExperts
from ..layers.norm import rms_norm
from ..layers.rotary import Rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from ..layers.short_convolution import ShortConvolution
from ..layers.step_context import StepContext
from .interfaces import Decoder
from .llama import shared_rotary
from .native_decoder import NativeDecoder

_PROJECTIONS = AttentionProjections(norm=rms_norm, norm_suffix="layernorm", out="out_proj")


def build_lfm2(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    rotary = shared_rotary(spec.rope, spec, loader)
    layers = [Lfm2DecoderLayer(spec, loader, index, rotary) for index in loader.stage.layers(spec.layers)]
    return NativeDecoder(build_ends(spec, loader, rms_norm, last_norm="model.embedding_norm.weight"), layers)


def build_feed_forward(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    name = f"model.layers.{index}.feed_forward"
    mlp = GatedMLPSpec(name, spec.hidden_size, spec.intermediate_size, gate="w1", up="w3", down="w2")
    if spec.experts is None or not spec.experts.sparse_layers[index]:
        return GatedMLP(loader, mlp)
    expert = mlp._replace(intermediate=spec.experts.intermediate_size)
    return MixtureOfExperts(loader, expert, spec.experts, bias="expert_bias")


class Lfm2DecoderLayer:
    def __init__(self, spec: ModelSpec, loader: WeightLoader, index: int, rotary: Rotary) -> None:
        name = f"model.layers.{index}"
        hidden = spec.hidden_size
        self._before_mixer = rms_norm(loader.vector(f"{name}.operator_norm.weight", hidden), spec.norm_eps)
        self._mixer: SelfAttention | ShortConvolution
        if spec.attention[index] is None:
            self._mixer = ShortConvolution(loader, spec, index, f"{name}.conv")
        else:
            self._mixer = SelfAttention(loader, spec, index, _PROJECTIONS, rotary)
        self._before_mlp = rms_norm(loader.vector(f"{name}.ffn_norm.weight", hidden), spec.norm_eps)
        self._mlp = build_feed_forward(spec, loader, index)
        self.untraceable = self._mixer.untraceable or self._mlp.untraceable
        self.host_bound = self._mlp.host_bound

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        mixed = self._mixer(self._before_mixer.add_and_norm(x, delta), context)
        return self._mlp(self._before_mlp.add_and_norm(x, mixed), context)
