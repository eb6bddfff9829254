"""MiniMax-M2 (its forerunner's paper is arXiv 2506.13585): a mixture in every layer, whose sigmoid router has a
correction; queries and keys are normalised over all heads together, and rotated in part."""

from ..checkpoint.model_spec import CheckpointError, ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.mlp import FeedForward, GatedMLPSpec, MixtureOfExperts
from ..layers.norm import rms_norm
from ..layers.self_attention import AttentionProjections
from .interfaces import Decoder
from .llama import LlamaVariant, build_llama_variant


def build_minimax_m2(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    projections = AttentionProjections(norm=rms_norm, whole_norms=True)
    return build_llama_variant(spec, loader, LlamaVariant(projections, _build_experts))


def _build_experts(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    if spec.experts is None:
        raise CheckpointError(f"{spec.architecture} needs num_experts_per_tok in its config.json")
    expert = GatedMLPSpec(
        f"model.layers.{index}.block_sparse_moe",
        spec.hidden_size,
        spec.experts.intermediate_size,
        activation=spec.activation,
        gate="w1",
        up="w3",
        down="w2",
    )
    return MixtureOfExperts(loader, expert, spec.experts, bias="e_score_correction_bias")
