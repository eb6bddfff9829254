"""Decoders of T5 (arXiv 1910.10683), its version 1.1, Flan-T5 and mT5: scores of keys are not scaled, and have learned
additions by distance; norms have no bias."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..cpu.elementwise import UNGATED
from ..layers.cross_attention import CrossAttention
from ..layers.embed_and_head import HEAD_WEIGHT, build_ends
from ..layers.mlp import GatedMLP, GatedMLPSpec
from ..layers.norm import WholeNorm, divided_rms_norm, rms_norm
from ..layers.self_attention import AttentionProjections, SelfAttention
from .cross_layer import CrossLayer, CrossParts
from .interfaces import Decoder
from .llama import layer_rotaries
from .native_decoder import DecoderLayer, NativeDecoder

_BIAS = "model.layers.0.self_attn.relative_attention_bias.weight"
_LAST_NORM = "model.layer_norm.weight"


def build_t5(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    def norm(name: str) -> WholeNorm:
        return rms_norm(loader.vector(f"model.{name}.weight", spec.hidden_size), spec.norm_eps)

    spec = replace(spec, tied_embeddings=not loader.has(HEAD_WEIGHT))
    kind = spec.attention[0]
    assert kind is not None, "every layer attends"
    projections = AttentionProjections(near=_by_distance(spec, loader, kind.distances))
    gated = spec.mlp_matrices == 3
    activation = spec.activation if gated else UNGATED[spec.activation]
    mlp_spec = GatedMLPSpec("", spec.hidden_size, spec.intermediate_size, activation=activation)
    layers: list[DecoderLayer] = []
    crosses = []
    for index, rotary in layer_rotaries(spec, loader).items():
        name = f"layers.{index}"
        cross = CrossAttention(loader, spec, index, AttentionProjections(name="encoder_attn"))
        mlp = GatedMLP(loader, mlp_spec._replace(name=f"model.{name}"))
        parts = CrossParts(SelfAttention(loader, spec, index, projections, rotary), cross, mlp)
        norms = (norm(f"{name}.{part}_layer_norm") for part in ("self_attn", "encoder_attn", "final"))
        layers.append(CrossLayer(parts, *norms))
        crosses.append(cross)
    divisor = spec.multipliers.logits_divisor
    ends = build_ends(spec, loader, lambda weight, eps: divided_rms_norm(weight, eps, divisor), last_norm=_LAST_NORM)
    return NativeDecoder(ends, layers, crosses)


def _by_distance(spec: ModelSpec, loader: WeightLoader, distances: int) -> Tensor:
    """What is added to the scores of keys that lie so far back, [heads, distances]: half of the buckets are of one
    distance each, the others of logarithmically more, up to the last distance."""
    assert spec.distance_buckets > 1, "the family has buckets"
    table = loader.floats(_BIAS, spec.distance_buckets, spec.heads)
    exact = spec.distance_buckets // 2
    back = torch.arange(distances, device=table.device)
    # In single precision, as transformers has it: that decides where a bucket ends.
    share = torch.log(back.clamp(min=1).float() / exact) / math.log((distances - 1) / exact)
    far = exact + (share * (spec.distance_buckets - exact)).long()
    buckets = torch.where(back < exact, back, far.clamp(max=spec.distance_buckets - 1))
    return table[buckets].T.contiguous()
