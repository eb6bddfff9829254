"""Mistral 7B and its line (arXiv 2310.06825): Llama's shape, every layer looking through a window if there is one."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from .interfaces import Decoder
from .llama import LlamaVariant, build_llama_variant


def build_mistral(spec: ModelSpec, load: WeightLoader) -> Decoder:
    return build_llama_variant(spec, load, LlamaVariant())
