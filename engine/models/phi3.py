"""Phi-3 and 4 (arXiv 2404.14219): Llama's shape, with projections that the checkpoint stores fused."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.mlp import GatedMLP
from ..layers.self_attention import AttentionProjections
from .interfaces import Decoder
from .llama import FeedForward, LlamaVariant, build_llama_variant, mlp_spec


def build_phi3(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return build_llama_variant(spec, loader, LlamaVariant(AttentionProjections(fused=True), _build_fused_mlp))


def _build_fused_mlp(spec: ModelSpec, loader: WeightLoader, index: int) -> FeedForward:
    return GatedMLP(loader, mlp_spec(spec, index)._replace(fused="gate_up_proj", bias=False))
