"""ERNIE 4.5 (ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf), text: numbers that are rotated against each
other are neighbours. The mixtures' router takes a softmax, and a correction where it chooses."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.mlp import FeedForward
from ..layers.self_attention import AttentionProjections
from .glm import build_shared_experts
from .interfaces import Decoder
from .llama import LlamaVariant, build_llama_variant

_PROJECTIONS = AttentionProjections(adjacent_pairs=True)


def build_ernie(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return build_llama_variant(spec, loader, LlamaVariant(_PROJECTIONS))


def build_ernie_moe(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return build_llama_variant(spec, loader, LlamaVariant(_PROJECTIONS, _build_experts))


def _build_experts(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    bias_shape = (1, spec.experts.count) if spec.experts is not None else ()
    return build_shared_experts(spec, loader, index, "moe_statics.e_score_correction_bias", bias_shape)
