"""ERNIE 4.5 (ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf), text: numbers that are rotated against each
other are neighbours. The mixtures' router takes a softmax, and a correction where it chooses."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.mlp import FeedForward, MixtureOfExperts, SharedExpert
from ..layers.self_attention import AttentionProjections
from .interfaces import Decoder
from .llama import LlamaVariant, build_dense_mlp, build_llama_variant, mlp_spec

_PROJECTIONS = AttentionProjections(adjacent_pairs=True)


def build_ernie(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return build_llama_variant(spec, loader, LlamaVariant(_PROJECTIONS))


def build_ernie_moe(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return build_llama_variant(spec, loader, LlamaVariant(_PROJECTIONS, _build_experts))


def _build_experts(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    experts = spec.experts
    if experts is None or not experts.sparse_layers[index]:
        return build_dense_mlp(spec, loader, index)
    dense = mlp_spec(spec, index)
    expert = dense._replace(intermediate=experts.intermediate_size)
    bias = "moe_statics.e_score_correction_bias"
    routed = MixtureOfExperts(loader, expert, experts, bias=bias, bias_shape=(1, experts.count))
    if not experts.shared_size:
        return routed
    shared = dense._replace(name=f"{dense.name}.shared_experts", intermediate=experts.shared_size)
    return SharedExpert(loader, routed, shared)
