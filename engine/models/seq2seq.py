"""Decoders that attend to an encoder's output (arXiv 1706.03762): Whisper's (2212.04356), in every size, and those of
BART (1910.13461), mBART, Marian, Pegasus, M2M-100 and NLLB. They differ in where norms stand and in their positions."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import TensorSlice, WeightLoader
from ..cpu.elementwise import UNGATED
from ..layers.cross_attention import CrossAttention
from ..layers.embed_and_head import InputPositions, build_ends
from ..layers.mlp import GatedMLP, GatedMLPSpec
from ..layers.norm import WholeNorm, layer_norm
from ..layers.self_attention import AttentionProjections, SelfAttention
from .cross_layer import CrossLayer, CrossParts, PostNormCrossLayer
from .interfaces import Decoder
from .llama import layer_rotaries
from .native_decoder import DecoderLayer, NativeDecoder

_PROJECTIONS = AttentionProjections(qkv_bias=True, out_bias=True, out="out_proj")
_LOGITS_BIAS = "final_logits_bias"


class Seq2SeqVariant(NamedTuple):
    """The differences between decoders of this kind."""

    pre_norm: bool = True
    """Norms stand before a layer's parts, and one behind all layers; else behind the parts."""
    embedding_norm: bool = False
    """Embeddings and positions together are normalised, too."""
    key_bias: bool = True
    first_line: int = 0
    """The line of position 0 in the table of positions."""
    sinusoids: bool = False
    """Positions are sines and cosines, and not learned."""
    whole_span: bool = False
    """The slowest of them has a wave of 10,000 times the fastest one's, and not a little less."""


def build_whisper(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return _build(spec, loader, Seq2SeqVariant(key_bias=False))


def build_bart(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return _build(spec, loader, Seq2SeqVariant(pre_norm=False, embedding_norm=True, first_line=2))


def build_mbart(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return _build(spec, loader, Seq2SeqVariant(embedding_norm=True, first_line=2))


def build_marian(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return _build(spec, loader, Seq2SeqVariant(pre_norm=False, sinusoids=True))


def build_pegasus(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return _build(spec, loader, Seq2SeqVariant(sinusoids=True))


def build_m2m(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    return _build(spec, loader, Seq2SeqVariant(sinusoids=True, whole_span=True, first_line=2))


def _build(spec: ModelSpec, loader: WeightLoader, variant: Seq2SeqVariant) -> Decoder:
    def norm(name: str) -> WholeNorm:
        weight, bias = (loader.vector(f"model.{name}.{part}", spec.hidden_size) for part in ("weight", "bias"))
        return layer_norm(weight, bias, spec.norm_eps)

    projections = _PROJECTIONS._replace(key_bias=variant.key_bias)
    sizes = spec.hidden_size, spec.intermediate_size
    mlp_spec = GatedMLPSpec("", *sizes, bias=True, activation=UNGATED[spec.activation], up="fc1", down="fc2")
    layers: list[DecoderLayer] = []
    crosses = []
    for index, rotary in layer_rotaries(spec, loader).items():
        name = f"layers.{index}"
        attention = SelfAttention(loader, spec, index, projections, rotary)
        cross = CrossAttention(loader, spec, index, projections._replace(name="encoder_attn"))
        mlp = GatedMLP(loader, mlp_spec._replace(name=f"model.{name}"))
        parts = CrossParts(attention, cross, mlp)
        of_mixer, of_cross = (norm(f"{name}.{part}_layer_norm") for part in ("self_attn", "encoder_attn"))
        if variant.pre_norm:
            layers.append(CrossLayer(parts, of_mixer, of_cross, norm(f"{name}.final_layer_norm")))
        else:
            before = norm(f"layers.{index - 1}.final_layer_norm") if index else None
            layers.append(PostNormCrossLayer(parts, before, of_mixer, of_cross))
        crosses.append(cross)
    embedding_norm = norm("layernorm_embedding") if variant.embedding_norm and loader.stage.first else None
    positions = InputPositions(_position_lines(spec, loader, variant), variant.first_line, embedding_norm)
    last = "layer_norm" if variant.pre_norm else f"layers.{spec.layers - 1}.final_layer_norm"
    bias = None
    if loader.has(_LOGITS_BIAS):
        bias = loader.floats(_LOGITS_BIAS, 1, spec.vocab_size)[0].to(loader.dtype)
    scale = spec.multipliers.embedding
    ends = build_ends(spec, loader, lambda *_: norm(last), scale, f"model.{last}.weight", positions, bias)
    return NativeDecoder(ends, layers, crosses)


def _position_lines(spec: ModelSpec, loader: WeightLoader, variant: Seq2SeqVariant) -> Tensor:
    """What is added at each position, [first_line + positions, hidden]."""
    lines = spec.max_position + variant.first_line
    if not variant.sinusoids:
        return loader.mapped(TensorSlice("model.embed_positions.weight", (lines, spec.hidden_size)))
    waves = spec.hidden_size // 2
    exponents = torch.arange(waves, dtype=torch.float64) / (waves - 1 if variant.whole_span else waves)
    radians = torch.outer(torch.arange(lines, dtype=torch.float64), torch.exp(exponents * -math.log(10000)))
    return torch.cat((radians.sin(), radians.cos()), 1).to(loader.device, loader.dtype)
