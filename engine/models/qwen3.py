"""Qwen 3 (arXiv 2505.09388): Llama's shape, queries and keys normalised head by head; also its mixture of experts."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.mlp import MixtureOfExperts
from ..layers.norm import rms_norm
from ..layers.self_attention import AttentionProjections
from .interfaces import Decoder
from .llama import FeedForward, LlamaVariant, build_dense_mlp, build_llama_variant, mlp_spec


def build_qwen3(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return build_llama_variant(spec, loader, LlamaVariant(_projections(spec)))


def build_qwen3_moe(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return build_llama_variant(spec, loader, LlamaVariant(_projections(spec), _build_experts))


def _projections(spec: ModelSpec) -> AttentionProjections:
    return AttentionProjections(qkv_bias=spec.attention_bias, out_bias=spec.attention_bias, norm=rms_norm)


def _build_experts(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    if spec.experts is None or not spec.experts.sparse_layers[index]:
        return build_dense_mlp(spec, loader, index)
    dense = mlp_spec(spec, index)
    expert = dense._replace(intermediate=spec.experts.intermediate_size)
    experts = [expert._replace(name=f"{dense.name}.experts.{number}") for number in range(spec.experts.count)]
    return MixtureOfExperts(loader, f"{dense.name}.gate", spec.experts, experts)
