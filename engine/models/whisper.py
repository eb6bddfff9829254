"""The decoder of Whisper (arXiv 2212.04356), in every size: a transformer with learned positions (arXiv 1706.03762),
each of whose layers attends to what an encoder made of 30 seconds of sound. The encoder is a model beside it."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import TensorSlice, WeightLoader
from ..cpu.elementwise import UNGATED
from ..layers.cross_attention import CrossAttention
from ..layers.embed_and_head import build_ends
from ..layers.mlp import GatedMLP, GatedMLPSpec
from ..layers.norm import WholeNorm, layer_norm
from ..layers.self_attention import AttentionProjections, SelfAttention
from .cross_layer import CrossLayer
from .interfaces import Decoder
from .llama import layer_rotaries
from .native_decoder import NativeDecoder

_PROJECTIONS = AttentionProjections(qkv_bias=True, key_bias=False, out_bias=True, out="out_proj")


def build_whisper(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    def norm(name: str) -> WholeNorm:
        weight, bias = (loader.vector(f"model.{name}.{part}", spec.hidden_size) for part in ("weight", "bias"))
        return layer_norm(weight, bias, spec.norm_eps)

    layers, crosses = [], []
    for index, rotary in layer_rotaries(spec, loader).items():
        name = f"layers.{index}"
        attention = SelfAttention(loader, spec, index, _PROJECTIONS, rotary)
        cross = CrossAttention(loader, spec, index, _PROJECTIONS._replace(name="encoder_attn"))
        mlp = GatedMLP(loader, _mlp_spec(spec, f"model.{name}"))
        norms = [norm(f"{name}.{part}_layer_norm") for part in ("self_attn", "encoder_attn", "final")]
        layers.append(CrossLayer(norms[0], attention, norms[1], cross, norms[2], mlp))
        crosses.append(cross)
    lines = TensorSlice("model.embed_positions.weight", (spec.max_position, spec.hidden_size))
    positions = loader.mapped(lines) if loader.stage.first else None
    ends = build_ends(spec, loader, lambda *_: norm("layer_norm"), last_norm="model.layer_norm.weight", lines=positions)
    return NativeDecoder(ends, layers, crosses)


def _mlp_spec(spec: ModelSpec, name: str) -> GatedMLPSpec:
    activation = UNGATED[spec.activation]
    return GatedMLPSpec(name, spec.hidden_size, spec.intermediate_size, True, activation, up="fc1", down="fc2")
