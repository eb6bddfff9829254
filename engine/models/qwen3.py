"""Qwen 3 (arXiv 2505.09388): Llama's shape, queries and keys normalised head by head; also its mixture of experts."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import Loader
from ..layers.experts import MixtureOfExperts, Router
from ..layers.norm import rms_norm
from ..layers.self_attention import Projections
from .interfaces import Decoder
from .llama import FeedForward, Kin, gated, like_llama, mlp


def qwen3(spec: ModelSpec, load: Loader) -> Decoder:
    return like_llama(spec, load, Kin(_projections(spec)))


def qwen3_moe(spec: ModelSpec, load: Loader) -> Decoder:
    return like_llama(spec, load, Kin(_projections(spec), _sparse))


def _projections(spec: ModelSpec) -> Projections:
    return Projections(qkv_bias=spec.attention_bias, out_bias=spec.attention_bias, norm=rms_norm)


def _sparse(spec: ModelSpec, load: Loader, index: int) -> FeedForward:
    if spec.experts is None or not spec.experts.layers[index]:
        return gated(spec, load, index)
    dense = mlp(spec, index)
    expert = dense._replace(intermediate=spec.experts.intermediate_size)
    experts = [expert._replace(name=f"{dense.name}.experts.{number}") for number in range(spec.experts.count)]
    return MixtureOfExperts(load, Router(load, f"{dense.name}.gate", spec.hidden_size, spec.experts), experts)
