"""DeepSeek V2 and V3 (arXiv 2405.04434, 2412.19437) and what has their layers, Kimi-K2 and GLM-4.7-Flash: layers attend
over latents; the first ones are dense, the others mixtures."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.latent_attention import LatentAttention
from ..layers.mlp import FeedForward, GatedMLP, MixtureOfExperts, SharedExpert
from ..layers.norm import rms_norm
from ..layers.rotary import Rotary
from .interfaces import Decoder
from .llama import mlp_spec, shared_rotary
from .native_decoder import NativeDecoder
from .pre_norm_layer import PreNormLayer


def build_deepseek(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    rotary = shared_rotary(spec.rope, spec, loader)
    layers = [_build_layer(spec, loader, index, rotary) for index in loader.stage.layers(spec.layers)]
    return NativeDecoder(build_ends(spec, loader, rms_norm), layers)


def _build_layer(spec: ModelSpec, loader: WeightLoader, index: int, rotary: Rotary) -> PreNormLayer:
    before_mixer, before_mlp = (
        rms_norm(loader.vector(f"model.layers.{index}.{name}.weight", spec.hidden_size), spec.norm_eps)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    attention = LatentAttention(loader, spec, index, rotary)
    return PreNormLayer(before_mixer, attention, before_mlp, build_shared_experts(spec, loader, index))


def build_shared_experts(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    """The experts of a layer beside those that every token goes through, or the MLP of a dense one."""
    dense = mlp_spec(spec, index)
    experts = spec.experts
    if experts is None or not experts.sparse_layers[index]:
        return GatedMLP(loader, dense)
    expert = dense._replace(intermediate=experts.intermediate_size, bias=False)
    routed = MixtureOfExperts(loader, expert, experts, bias="gate.e_score_correction_bias")
    if not experts.shared_size:
        return routed
    shared = dense._replace(name=f"{dense.name}.shared_experts", intermediate=experts.shared_size)
    return SharedExpert(loader, routed, shared)
