"""Mistral 7B and its line (arXiv 2310.06825): Llama's shape, every layer looking through a window if there is one."""

from ..spec import ModelSpec
from ..weights import Loader
from .llama import Kin, Llama


def mistral(spec: ModelSpec, load: Loader) -> Llama:
    return Llama(spec, load, Kin())
