"""Qwen 2 and 2.5 (arXiv 2407.10671): Llama's shape with biases on queries, keys and values only."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import Loader
from ..layers.self_attention import Projections
from .interfaces import Decoder
from .llama import Kin, like_llama


def qwen2(spec: ModelSpec, load: Loader) -> Decoder:
    return like_llama(spec, load, Kin(Projections(qkv_bias=True)))
