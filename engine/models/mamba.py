"""Mamba's first line (arXiv 2312.00752), FalconMamba (2410.05355), which normalises what its states are made of, and
Mamba-2 (2405.21060) alone: no layer attends, and a sequence keeps its states and no tokens."""

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.recurrence import Mamba2Spec
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.mamba import Mamba
from ..layers.mamba2 import Mamba2
from ..layers.norm import rms_norm
from .interfaces import Decoder
from .native_decoder import NativeDecoder
from .pre_norm_layer import OnePartLayer


def build_mamba(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    layers = [build_layer(spec, loader, index) for index in loader.stage.layers(spec.layers)]
    return NativeDecoder(build_ends(spec, loader, rms_norm), layers)


def build_layer(spec: ModelSpec, loader: WeightLoader, index: int) -> OnePartLayer:
    name = f"model.layers.{index}"
    norm = rms_norm(loader.vector(f"{name}.norm.weight", spec.hidden_size), spec.norm_eps)
    mixer = Mamba2 if isinstance(spec.recurrence, Mamba2Spec) else Mamba
    return OnePartLayer(norm, mixer(loader, spec, index, f"{name}.mixer"))
