"""GLM-4.5 to 4.7 (arXiv 2508.06471), and dots.llm1 (arXiv 2506.05767) and Solar Open, whose layers are the same: the
first layers may be dense, the others are mixtures of a corrected sigmoid router, beside experts that every token goes
through. And their forerunners, which are dense."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.mlp import FeedForward, GatedMLP, MixtureOfExperts, SharedExpert
from ..layers.norm import rms_norm
from ..layers.rotary import Rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from .interfaces import Decoder
from .llama import (
    LlamaVariant,
    build_fused_mlp,
    build_llama_variant,
    layer_norm,
    layer_rotaries,
    mlp_spec,
    qwen3_projections,
)
from .native_decoder import NativeDecoder
from .pre_norm_layer import SandwichLayer


def build_glm4_moe(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return build_llama_variant(spec, loader, glm4_moe_variant(spec))


def glm4_moe_variant(spec: ModelSpec) -> LlamaVariant:
    """Smaller ones do not normalise queries and keys; Solar Open never does."""
    norm = rms_norm if spec.normed_heads else None
    return LlamaVariant(AttentionProjections(qkv_bias=spec.attention_bias, norm=norm), build_shared_experts)


def build_dots1(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return build_llama_variant(spec, loader, LlamaVariant(qwen3_projections(spec), build_shared_experts))


def build_shared_experts(
    spec: ModelSpec,
    loader: WeightLoader,
    index: int,
    bias: str = "gate.e_score_correction_bias",
    bias_shape: tuple[int, ...] = (),
) -> FeedForward:
    """The experts of a layer beside those that every token goes through, or the MLP of a dense one. `bias`, and its
    shape if it is no vector: the correction of the router."""
    dense = mlp_spec(spec, index)
    experts = spec.experts
    if experts is None or not experts.sparse_layers[index]:
        return GatedMLP(loader, dense)
    expert = dense._replace(intermediate=experts.intermediate_size, bias=False)
    routed = MixtureOfExperts(loader, expert, experts, bias=bias, bias_shape=bias_shape)
    if not experts.shared_size:
        return routed
    shared = dense._replace(name=f"{dense.name}.shared_experts", intermediate=experts.shared_size)
    return SharedExpert(loader, routed, shared)


def build_glm(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    """GLM-4 (arXiv 2406.12793), dense; half of each head is rotated, in pairs of neighbours."""
    return build_llama_variant(spec, loader, LlamaVariant(_dense_projections(spec), build_fused_mlp))


def build_glm4(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    """GLM-4-0414 and GLM-Z1: the same with norms on both sides of each part."""
    rotaries = layer_rotaries(spec, loader)
    layers = [_build_sandwich(spec, loader, index, rotary) for index, rotary in rotaries.items()]
    return NativeDecoder(build_ends(spec, loader, rms_norm), layers)


def _dense_projections(spec: ModelSpec) -> AttentionProjections:
    return AttentionProjections(qkv_bias=spec.attention_bias, adjacent_pairs=True)


def _build_sandwich(spec: ModelSpec, loader: WeightLoader, index: int, rotary: Rotary) -> SandwichLayer:
    return SandwichLayer(
        layer_norm(spec, loader, index, "input_layernorm"),
        SelfAttention(loader, spec, index, _dense_projections(spec), rotary),
        layer_norm(spec, loader, index, "post_self_attn_layernorm"),
        layer_norm(spec, loader, index, "post_attention_layernorm"),
        build_fused_mlp(spec, loader, index),
        layer_norm(spec, loader, index, "post_mlp_layernorm"),
    )
