"""Mamba-2 (arXiv 2405.21060) alone: no layer attends, and a sequence keeps its states and no tokens."""

from torch import Tensor

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.embed_and_head import build_ends
from ..layers.mamba2 import Mamba2
from ..layers.norm import rms_norm
from ..layers.step_context import StepContext
from .interfaces import Decoder
from .native_decoder import NativeDecoder


def build_mamba2(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    layers = [Mamba2Layer(spec, loader, index) for index in loader.stage.layers(spec.layers)]
    return NativeDecoder(build_ends(spec, loader, rms_norm), layers)


class Mamba2Layer:
    host_bound = False

    def __init__(self, spec: ModelSpec, loader: WeightLoader, index: int) -> None:
        name = f"model.layers.{index}"
        self._norm = rms_norm(loader.vector(f"{name}.norm.weight", spec.hidden_size), spec.norm_eps)
        self._mixer = Mamba2(loader, spec, index, f"{name}.mixer")
        self.untraceable = self._mixer.untraceable

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        return self._mixer(self._norm.add_and_norm(x, delta), context)
