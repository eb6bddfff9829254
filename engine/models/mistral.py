"""Mistral 7B and its successors (arXiv 2310.06825): Llama's shape; a sliding window, if any, is in every layer."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from .interfaces import Decoder
from .llama import LlamaVariant, build_llama_variant


def build_mistral(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return build_llama_variant(spec, loader, LlamaVariant())
