"""Phi-3 and 4 (arXiv 2404.14219): Llama's shape, its projections fused in the checkpoint."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import Loader
from ..layers.mlp import GatedMLP
from ..layers.self_attention import Projections
from .interfaces import Decoder
from .llama import FeedForward, Kin, like_llama, mlp


def phi3(spec: ModelSpec, load: Loader) -> Decoder:
    return like_llama(spec, load, Kin(Projections(fused=True), _fused))


def _fused(spec: ModelSpec, load: Loader, index: int) -> FeedForward:
    return GatedMLP(load, mlp(spec, index)._replace(fused="gate_up_proj", bias=False))
