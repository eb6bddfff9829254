"""Mistral 7B and its line (arXiv 2310.06825): Llama's shape, every layer looking through a window if there is one."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import Loader
from .interfaces import Decoder
from .llama import Kin, like_llama


def mistral(spec: ModelSpec, load: Loader) -> Decoder:
    return like_llama(spec, load, Kin())
