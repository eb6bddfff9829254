"""Mixtral (arXiv 2401.04088): Mistral's shape with a mixture of experts in every layer."""

from ..checkpoint.model_spec import CheckpointError, ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.mlp import GatedMLPSpec, MixtureOfExperts
from .interfaces import Decoder
from .llama import FeedForward, LlamaVariant, build_llama_variant


def build_mixtral(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return build_llama_variant(spec, loader, LlamaVariant(build_feed_forward=_build_experts))


def _build_experts(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    if spec.experts is None:
        raise CheckpointError("a Mixtral without num_experts_per_tok in its config.json")
    name, hidden, inner = f"model.layers.{index}.block_sparse_moe", spec.hidden_size, spec.experts.intermediate_size
    experts = [
        GatedMLPSpec(f"{name}.experts.{number}", hidden, inner, gate="w1", up="w3", down="w2")
        for number in range(spec.experts.count)
    ]
    return MixtureOfExperts(loader, f"{name}.gate", spec.experts, experts)
