"""Qwen 2 and 2.5 (arXiv 2407.10671): Llama's shape with biases on queries, keys and values only."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.self_attention import AttentionProjections
from .interfaces import Decoder
from .llama import LlamaVariant, build_llama_variant


def build_qwen2(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return build_llama_variant(spec, loader, LlamaVariant(AttentionProjections(qkv_bias=True)))
