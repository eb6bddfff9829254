"""Llama 1 to 3 (arXiv 2302.13971, 2407.21783) and architectures of its shape: pre-norm, RoPE, GQA, SwiGLU, dense or
with a mixture of experts in place of the MLP."""

from collections.abc import Callable
from typing import NamedTuple

from ..checkpoint.model_spec import CheckpointError, ModelSpec, RopeSpec
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.mlp import FeedForward, GatedMLP, GatedMLPSpec, MixtureOfExperts
from ..layers.norm import Norm, rms_norm
from ..layers.rotary import Rotary, build_rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from .interfaces import Decoder
from .native_decoder import DecoderLayer, NativeDecoder, StackedLayer
from .pre_norm_layer import PreNormLayer


def build_dense_mlp(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    return GatedMLP(loader, mlp_spec(spec, index))


def build_fused_mlp(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    """An MLP whose gate and up are in one matrix."""
    return GatedMLP(loader, mlp_spec(spec, index)._replace(fused="gate_up_proj", bias=False))


def mlp_spec(spec: ModelSpec, index: int) -> GatedMLPSpec:
    name = f"model.layers.{index}.mlp"
    return GatedMLPSpec(name, spec.hidden_size, spec.mlp_size(index), spec.mlp_bias, spec.activation)


class LlamaVariant(NamedTuple):
    """The differences between an architecture of Llama's shape and Llama."""

    projections: AttentionProjections = AttentionProjections()
    build_feed_forward: Callable[[ModelSpec, WeightLoader, int], FeedForward] = build_dense_mlp


def build_llama_variant(spec: ModelSpec, loader: WeightLoader, variant: LlamaVariant) -> Decoder:
    rotaries = layer_rotaries(spec, loader)
    layers: list[DecoderLayer] = [
        build_layer(spec, loader, index, variant, rotary) for index, rotary in rotaries.items()
    ]
    for place, index in enumerate(rotaries):
        if index < spec.deepstack:
            layers[place] = StackedLayer(layers[place], index)
    return NativeDecoder(build_ends(spec, loader, rms_norm), layers)


def layer_rotaries(spec: ModelSpec, loader: WeightLoader) -> dict[int, Rotary]:
    """The rotary embedding of each of this rank's layers; those with the same share one."""
    ropes = {index: spec.layer_rope(index) for index in loader.stage.layers(spec.layers)}
    shared = {rope: shared_rotary(rope, spec, loader) for rope in ropes.values()}
    return {index: shared[rope] for index, rope in ropes.items()}


def shared_rotary(rope: RopeSpec, spec: ModelSpec, loader: WeightLoader, head_dim: int | None = None) -> Rotary:
    """The rotary embedding that all layers with `rope`, and heads of `head_dim`, share."""
    size = head_dim or spec.head_dim
    return build_rotary(rope, size, loader.context.max_positions, loader.dtype, loader.device)


def layer_norm(spec: ModelSpec, loader: WeightLoader, index: int, name: str) -> Norm:
    """The norm of this name that layer `index` has."""
    return rms_norm(loader.vector(f"model.layers.{index}.{name}.weight", spec.hidden_size), spec.norm_eps)


def build_layer(
    spec: ModelSpec, loader: WeightLoader, index: int, variant: LlamaVariant, rotary: Rotary
) -> PreNormLayer:
    before_mixer = layer_norm(spec, loader, index, "input_layernorm")
    attention = SelfAttention(loader, spec, index, variant.projections, rotary)
    before_mlp = layer_norm(spec, loader, index, "post_attention_layernorm")
    return PreNormLayer(before_mixer, attention, before_mlp, variant.build_feed_forward(spec, loader, index))


def build_llama(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    """Llama, and SmolLM3 (huggingface.co/blog/smollm3), of whose layers some do not rotate."""
    bias = spec.attention_bias
    return build_llama_variant(spec, loader, LlamaVariant(AttentionProjections(qkv_bias=bias, out_bias=bias)))


def build_seed_oss(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    """Seed-OSS, with biases on queries, keys and values, and perhaps another on what comes out."""
    projections = AttentionProjections(qkv_bias=spec.attention_bias, out_bias=spec.attention_out_bias)
    return build_llama_variant(spec, loader, LlamaVariant(projections))


def build_mistral(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    """Mistral 7B and its successors (arXiv 2310.06825), Ministral 3 among them; a sliding window, if any, is in every
    layer."""
    return build_llama_variant(spec, loader, LlamaVariant())


def build_qwen2(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    """Qwen 2 and 2.5 (arXiv 2407.10671), with biases on queries, keys and values only."""
    return build_llama_variant(spec, loader, LlamaVariant(AttentionProjections(qkv_bias=True)))


def build_qwen3(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    """Qwen 3 (arXiv 2505.09388), with queries and keys normalised head by head."""
    return build_llama_variant(spec, loader, LlamaVariant(qwen3_projections(spec)))


def qwen3_projections(spec: ModelSpec) -> AttentionProjections:
    return AttentionProjections(qkv_bias=spec.attention_bias, out_bias=spec.attention_bias, norm=rms_norm)


def build_phi3(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    """Phi-3 and 4 (arXiv 2404.14219), with projections that the checkpoint stores fused."""
    return build_llama_variant(spec, loader, LlamaVariant(AttentionProjections(fused=True), build_fused_mlp))


def build_mixtral(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    """Mixtral (arXiv 2401.04088): Mistral's shape, a mixture in every layer."""
    return build_llama_variant(spec, loader, LlamaVariant(build_feed_forward=_mixtral_experts))


def _mixtral_experts(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    if spec.experts is None:
        raise CheckpointError("a Mixtral without num_experts_per_tok in its config.json")
    name = f"model.layers.{index}.block_sparse_moe"
    inner = spec.experts.intermediate_size
    expert = GatedMLPSpec(name, spec.hidden_size, inner, gate="w1", up="w3", down="w2")
    return MixtureOfExperts(loader, expert, spec.experts)


def build_qwen3_moe(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    """Qwen 3's mixtures (arXiv 2505.09388), of which some layers may be dense."""
    return build_llama_variant(spec, loader, LlamaVariant(qwen3_projections(spec), _qwen3_experts))


def _qwen3_experts(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    if spec.experts is None or not spec.experts.sparse_layers[index]:
        return build_dense_mlp(spec, loader, index)
    expert = mlp_spec(spec, index)._replace(intermediate=spec.experts.intermediate_size)
    if loader.has(f"{expert.name}.experts.0.gate_up_proj.weight"):  # Qwen3-VL's
        expert = expert._replace(fused="gate_up_proj")
    return MixtureOfExperts(loader, expert, spec.experts)
