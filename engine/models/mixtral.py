"""Mixtral (arXiv 2401.04088): Mistral's shape with a mixture of experts in every layer."""

from ..checkpoint.model_spec import CheckpointError, ModelSpec
from ..checkpoint.weights import Loader
from ..layers.experts import MixtureOfExperts, Router
from ..layers.mlp import Gated
from .interfaces import Decoder
from .llama import FeedForward, Kin, like_llama


def mixtral(spec: ModelSpec, load: Loader) -> Decoder:
    return like_llama(spec, load, Kin(feed_forward=_sparse))


def _sparse(spec: ModelSpec, load: Loader, index: int) -> FeedForward:
    if spec.experts is None:
        raise CheckpointError("a Mixtral without num_experts_per_tok in its config.json")
    name, hidden, inner = f"model.layers.{index}.block_sparse_moe", spec.hidden_size, spec.experts.intermediate_size
    experts = [
        Gated(f"{name}.experts.{number}", hidden, inner, gate="w1", up="w3", down="w2")
        for number in range(spec.experts.count)
    ]
    return MixtureOfExperts(load, Router(load, f"{name}.gate", hidden, spec.experts), experts)
