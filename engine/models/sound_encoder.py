"""Whisper's encoder of sounds (arXiv 2212.04356), by the engine's products and attention: in the precision of its
decoder. A window's rows depend on no other window where the C kernels compute."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.backend import CacheSpec
from ..attention.layer_places import LayerPlace
from ..attention.selector import create_backend
from ..checkpoint.build_context import BuildContext
from ..checkpoint.encoder_shape import EncoderShape
from ..checkpoint.hf_checkpoint import open_checkpoint
from ..checkpoint.hf_config import read_spec
from ..checkpoint.model_spec import LayerAttention, ModelSpec
from ..checkpoint.weights import CheckpointWeights, TensorSlice, WeightLoader
from ..cpu import library
from ..cpu.elementwise import UNGATED
from ..cpu.matmul import MatmulFormat, PackedMatmul
from ..layers.mlp import GatedMLP, GatedMLPSpec, fastest_gate
from ..layers.norm import WholeNorm, layer_norm
from ..layers.self_attention import AttentionProjections, SelfAttention
from ..layers.step_context import StepContext
from ..layers.torch_matmul import Matmul, torch_matmul
from ..step_batch import StepBatch, StepPositions
from .llama import layer_rotaries
from .pre_norm_layer import PreNormLayer

_PREFIXES = ("model.encoder.", "encoder.")
"""Beginnings of the encoder's names in checkpoints, by the class that wrote them."""
_SIZES = ("layers", "attention_heads", "ffn_dim")
"""What config.json says of both parts, each by a name of its own."""
_PROJECTIONS = AttentionProjections(qkv_bias=True, key_bias=False, out_bias=True, out="out_proj")
_KERNEL = 3
"""Frames that each output of a convolution sees."""
_BLOCK_SIZE = 256


def load_sound_encoder(
    directory: Path, dtype: torch.dtype, device: torch.device, quantization: str
) -> Callable[[Tensor], Tensor]:
    """The encoder of a checkpoint. float16 is computed in float32 on the host.

    Raises:
        CheckpointError: it lacks some of it, or its config.json means no such encoder.
    """
    if device.type == "cpu" and dtype == torch.float16:
        dtype = torch.float32
    checkpoint = open_checkpoint(directory)
    spec = read_spec(_encoder_config(checkpoint.config), checkpoint.where)
    assert spec.encoder is not None, "a model that hears has an encoder"
    kinds = (LayerAttention(both_ways=True),) * spec.layers
    context = BuildContext(dtype, device, spec.encoder.rows, quantization=quantization)
    loader = WeightLoader(CheckpointWeights(directory, _own_name), context)
    return SoundEncoder(loader, replace(spec, attention=kinds), spec.encoder)


class SoundEncoder:
    """Features [windows, bins, 2 * positions] -> rows [windows, positions, hidden]."""

    def __init__(self, loader: WeightLoader, spec: ModelSpec, shape: EncoderShape) -> None:
        def norm(name: str) -> WholeNorm:
            weight, bias = (loader.vector(f"model.{name}.{part}", spec.hidden_size) for part in ("weight", "bias"))
            return layer_norm(weight, bias, spec.norm_eps)

        positions = shape.rows
        self._convolutions = (
            Convolution(loader, spec, "model.conv1", shape.bins),
            Convolution(loader, spec, "model.conv2", spec.hidden_size, stride=2),
        )
        table = TensorSlice("model.embed_positions.weight", (positions, spec.hidden_size))
        self._positions = loader.concatenate([table])
        sizes = spec.hidden_size, spec.intermediate_size
        mlp = GatedMLPSpec("", *sizes, bias=True, activation=UNGATED[spec.activation], up="fc1", down="fc2")
        self._layers = [
            PreNormLayer(
                norm(f"layers.{index}.self_attn_layer_norm"),
                SelfAttention(loader, spec, index, _PROJECTIONS, rotary),
                norm(f"layers.{index}.final_layer_norm"),
                GatedMLP(loader, mlp._replace(name=f"model.layers.{index}")),
            )
            for index, rotary in layer_rotaries(spec, loader).items()
        ]
        self._norm = norm("layer_norm")
        self._features = (shape.bins, 2 * positions)
        sizes_of_heads = spec.heads, spec.kv_heads, spec.head_dim, _BLOCK_SIZE
        places = (LayerPlace(0, 0),) * spec.layers  # each layer forgets what the one before it has stored
        cache = CacheSpec(spec.cached_attention, *sizes_of_heads, loader.dtype, loader.device, places=places)
        self._attention = create_backend("auto", cache)
        self._blocks = -(-positions // _BLOCK_SIZE)
        self._windows = 0

    @torch.inference_mode()
    def __call__(self, features: Tensor) -> Tensor:
        """Raises `ValueError` for features of another shape."""
        windows, *shape = features.shape
        if tuple(shape) != self._features:
            raise ValueError(f"a window of sound has {list(self._features)} features, and not {shape}")
        x = torch.cat([self._embed(window) for window in features.to(self._attention.dtype)])
        delta = torch.zeros_like(x)
        context = self._begin(windows)
        for layer in self._layers:
            delta = layer(x, delta, context)
        return self._norm.add_and_norm(x, delta).view(windows, *self._positions.shape)

    def _embed(self, window: Tensor) -> Tensor:
        """What goes into the first layer for features [bins, frames]: [frames / 2, hidden]."""
        states = window.t()
        for convolution in self._convolutions:
            states = convolution(states)
        return states.add_(self._positions)

    def _begin(self, windows: int) -> StepContext:
        """The context in which each place of so many windows sees all others of its own."""
        if windows > self._windows:
            self._attention.allocate(windows * self._blocks)
            self._windows = windows
        device, positions = self._attention.device, len(self._positions)
        tokens = torch.zeros(windows, 1, dtype=torch.int32, device=device)
        tables = torch.arange(windows * self._blocks, device=device).view(windows, self._blocks)
        starts = np.zeros(windows, np.int32)
        batch = StepBatch(range(windows), starts, starts + positions, tokens, tables, _BLOCK_SIZE)
        batch.moved = StepPositions(starts, None, np.full(windows * positions, positions, np.int32))
        return StepContext(batch, self._attention.begin_step(batch))


class Convolution:
    """GELU of a convolution over time, as a product of three frames side by side: x [frames, inputs] ->
    [frames / stride, hidden]. Its numbers are never quantised."""

    def __init__(self, loader: WeightLoader, spec: ModelSpec, name: str, inputs: int, stride: int = 1) -> None:
        weight = loader.floats(f"{name}.weight", spec.hidden_size, inputs, _KERNEL).transpose(1, 2).flatten(1)
        bias = loader.vector(f"{name}.bias", spec.hidden_size)
        self._product: Matmul
        if library.supports(loader.dtype, loader.device):
            dtype = loader.dtype
            form = MatmulFormat(spec.hidden_size, _KERNEL * inputs, dtype, dtype, dtype)
            self._product = product = PackedMatmul(form, bias, loader.memory)
            product.pack(0, weight)
        else:
            self._product = torch_matmul(weight.to(loader.dtype), bias)
        self._gate = fastest_gate(UNGATED["gelu"], loader)
        self._stride = stride

    def __call__(self, x: Tensor) -> Tensor:
        frames, inputs = x.shape
        padded = F.pad(x, (0, 0, 1, 1)).contiguous()
        overlapping = padded.as_strided((frames // self._stride, _KERNEL * inputs), (self._stride * inputs, 1))
        return self._gate(self._product(overlapping))


def _own_name(stored: str) -> str:
    """The name of an encoder's tensor as that of a decoder's, which layers read; others keep theirs."""
    prefix = next(filter(stored.startswith, _PREFIXES), None)
    return stored if prefix is None else f"model.{stored.removeprefix(prefix)}"


def _encoder_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of a model whose decoder has the encoder's sizes."""
    sizes = {f"decoder_{size}": config[f"encoder_{size}"] for size in _SIZES if f"encoder_{size}" in config}
    return {name: value for name, value in config.items() if name.removeprefix("decoder_") not in _SIZES} | sizes
