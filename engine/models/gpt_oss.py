"""gpt-oss (arXiv 2508.10925): Llama's shape, with sinks and biases in attention, a window in every second layer, and
experts with biases and a clamped gate, which are published in floats of four bits."""

from ..checkpoint.model_spec import CheckpointError, ModelSpec
from ..checkpoint.weights import WeightLoader
from ..cpu.elementwise import CLAMPED_SWIGLU
from ..layers.mlp import FeedForward, MixtureOfExperts
from ..layers.self_attention import AttentionProjections
from .interfaces import Decoder
from .llama import LlamaVariant, build_llama_variant, mlp_spec


def build_gpt_oss(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    bias = spec.attention_bias
    projections = AttentionProjections(qkv_bias=bias, out_bias=bias, sinks=True)
    return build_llama_variant(spec, loader, LlamaVariant(projections, _build_experts))


def _build_experts(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    if spec.experts is None:
        raise CheckpointError(f"{spec.architecture} needs num_experts_per_tok in its config.json")
    expert = mlp_spec(spec, index)._replace(bias=True, activation=CLAMPED_SWIGLU)
    return MixtureOfExperts(loader, expert, spec.experts, router="router")
