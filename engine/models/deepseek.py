"""DeepSeek V2 and V3 (arXiv 2405.04434, 2412.19437) and what has their layers, Kimi-K2 and GLM-4.7-Flash: layers attend
over latents; the first ones are dense, the others mixtures."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.latent_attention import LatentAttention
from ..layers.norm import rms_norm
from ..layers.rotary import Rotary
from .glm import build_shared_experts
from .interfaces import Decoder
from .llama import shared_rotary
from .native_decoder import NativeDecoder
from .pre_norm_layer import PreNormLayer


def build_deepseek(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    rotary = shared_rotary(spec.rope, spec, loader)
    layers = [_build_layer(spec, loader, index, rotary) for index in loader.stage.layers(spec.layers)]
    return NativeDecoder(build_ends(spec, loader, rms_norm), layers)


def _build_layer(spec: ModelSpec, loader: WeightLoader, index: int, rotary: Rotary) -> PreNormLayer:
    before_mixer, before_mlp = (
        rms_norm(loader.vector(f"model.layers.{index}.{name}.weight", spec.hidden_size), spec.norm_eps)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    attention = LatentAttention(loader, spec, index, rotary)
    return PreNormLayer(before_mixer, attention, before_mlp, build_shared_experts(spec, loader, index))
