"""Llama's shape with a mixture of experts in place of the MLP."""

from ..checkpoint.model_spec import CheckpointError, ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.mlp import GatedMLPSpec, MixtureOfExperts
from .interfaces import Decoder
from .llama import FeedForward, LlamaVariant, build_dense_mlp, build_llama_variant, mlp_spec, qwen3_projections


def build_mixtral(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    """Mixtral (arXiv 2401.04088): Mistral's shape, a mixture in every layer."""
    return build_llama_variant(spec, loader, LlamaVariant(build_feed_forward=_mixtral_experts))


def _mixtral_experts(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    if spec.experts is None:
        raise CheckpointError("a Mixtral without num_experts_per_tok in its config.json")
    name, inner = f"model.layers.{index}.block_sparse_moe", spec.experts.intermediate_size
    expert = GatedMLPSpec(name, spec.hidden_size, inner, gate="w1", up="w3", down="w2")
    return MixtureOfExperts(loader, expert, spec.experts)


def build_qwen3_moe(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    """Qwen 3's mixtures (arXiv 2505.09388), of which some layers may be dense."""
    return build_llama_variant(spec, loader, LlamaVariant(qwen3_projections(spec), _qwen3_experts))


def _qwen3_experts(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    if spec.experts is None or not spec.experts.sparse_layers[index]:
        return build_dense_mlp(spec, loader, index)
    expert = mlp_spec(spec, index)._replace(intermediate=spec.experts.intermediate_size)
    return MixtureOfExperts(loader, expert, spec.experts)
