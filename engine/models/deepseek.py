"""DeepSeek V2 and V3 (arXiv 2405.04434, 2412.19437) and what has their layers, Kimi-K2 and GLM-4.7-Flash: layers attend
over latents; the first ones are dense, the others mixtures. DeepSeek V3.2 and GLM-5 have an indexer besides, which
chooses the tokens that are attended to: while there are no more than it may choose, it chooses all."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.latent_attention import LatentAttention
from ..layers.norm import rms_norm
from ..layers.rotary import Rotary
from .glm import build_shared_experts
from .interfaces import Decoder
from .llama import layer_norm, shared_rotary
from .native_decoder import NativeDecoder
from .pre_norm_layer import PreNormLayer


def build_deepseek(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    rotary = shared_rotary(spec.rope, spec, loader)
    layers = [build_deepseek_layer(spec, loader, index, rotary) for index in loader.stage.layers(spec.layers)]
    return NativeDecoder(build_ends(spec, loader, rms_norm), layers)


def build_deepseek_layer(spec: ModelSpec, loader: WeightLoader, index: int, rotary: Rotary) -> PreNormLayer:
    return PreNormLayer(
        layer_norm(spec, loader, index, "input_layernorm"),
        LatentAttention(loader, spec, index, rotary),
        layer_norm(spec, loader, index, "post_attention_layernorm"),
        build_shared_experts(spec, loader, index),
    )


def is_of_indexer(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor belongs to an indexer, which nothing reads."""
    return spec.most_dense_tokens > 0 and ".self_attn.indexer." in name
