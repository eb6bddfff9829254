"""Gemma 3n (E2B, E4B; text): several streams of hidden states (AltUp), a low-rank branch beside attention (LAuReL,
arXiv 2411.07501), MLPs of which some keep their largest gates alone, embeddings for each layer, and last layers that
attend to the keys and values of earlier ones. Norms stand on both sides of each part."""

import math
from typing import NamedTuple

from torch import Tensor

from ..checkpoint.model_spec import AltUpSpec, ModelSpec
from ..checkpoint.weights import WeightLoader
from ..layers.altup import AltUp, build_streams
from ..layers.embed_and_head import build_ends
from ..layers.linear import OutputShard, column_linear
from ..layers.mlp import GatedMLP
from ..layers.norm import Norm, rms_norm
from ..layers.per_layer_inputs import PerLayerGate, PerLayerInputs
from ..layers.rotary import Rotary
from ..layers.self_attention import AttentionProjections, SelfAttention
from ..layers.step_context import StepContext
from .interfaces import Decoder
from .llama import mlp_spec, shared_rotary
from .native_decoder import NativeDecoder


class FirstStreamInputs:
    """The embeddings for layers, made of the first stream as it goes into the first layer."""

    def __init__(self, spec: ModelSpec, per_layer: PerLayerInputs) -> None:
        self._hidden = spec.hidden_size
        self._per_layer = per_layer

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        return self._per_layer(x[:, : self._hidden].contiguous(), context)


class Gemma3nSharedParts(NamedTuple):
    """What layers have in common: the rotations of those with a window and of the others, and their inputs."""

    local_rotary: Rotary
    rotary: Rotary
    per_layer: PerLayerInputs
    inputs: FirstStreamInputs


def build_gemma3n(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    gemma = spec.gemma
    assert gemma is not None, "config.json of this architecture is read with it"
    assert gemma.altup is not None, "and with its streams"
    per_layer = PerLayerInputs(loader, spec, gemma)
    shared = Gemma3nSharedParts(
        shared_rotary(spec.local_rope, spec, loader),
        shared_rotary(spec.rope, spec, loader),
        per_layer,
        FirstStreamInputs(spec, per_layer),
    )
    layers = [Gemma3nDecoderLayer(spec, loader, index, gemma.altup, shared) for index in range(spec.layers)]
    ends = build_ends(spec, loader, rms_norm, math.sqrt(spec.hidden_size))
    return NativeDecoder(build_streams(loader, spec, gemma.altup, ends), layers)


class Gemma3nDecoderLayer:
    """x [N, streams * hidden] changes in place: nothing is left to be added to it."""

    untraceable: str | None = AltUp.untraceable

    def __init__(
        self, spec: ModelSpec, loader: WeightLoader, index: int, altup: AltUpSpec, shared: Gemma3nSharedParts
    ) -> None:
        name = f"model.layers.{index}"
        hidden = spec.hidden_size

        def norm(part: str) -> Norm:
            return rms_norm(loader.vector(f"{name}.{part}.weight", hidden), spec.norm_eps)

        self._streams = altup.streams
        self._altup = AltUp(loader, spec, altup, f"{name}.altup")
        self._output_scale = loader.vector(f"{name}.altup.correct_output_scale", hidden) if altup.scaled else None
        self._before_attention = norm("input_layernorm")
        rank = altup.laurel_rank
        left = OutputShard(f"{name}.laurel.linear_left", rank, slice(0, rank))
        right = OutputShard(f"{name}.laurel.linear_right", hidden, slice(0, hidden))
        self._laurel_left = column_linear(loader, [left], hidden, bias=False)
        self._laurel_right = column_linear(loader, [right], rank, bias=False)
        self._after_laurel = norm("laurel.post_laurel_norm")
        rotary = shared.local_rotary if spec.has_window(index) else shared.rotary
        bias = spec.attention_bias
        projections = AttentionProjections(bias, bias, norm=rms_norm, normed_values=True)
        self._attention = SelfAttention(loader, spec, index, projections, rotary)
        self._after_attention = norm("post_attention_layernorm")
        self._before_mlp = norm("pre_feedforward_layernorm")
        self._mlp = GatedMLP(loader, mlp_spec(spec, index)._replace(bias=False, sparsity=altup.sparsity[index]))
        self._after_mlp = norm("post_feedforward_layernorm")
        self._inputs = shared.inputs
        self._input_gate = PerLayerGate(loader, spec, index, shared.per_layer)
        self.host_bound = shared.per_layer.host_bound

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        inputs = context.shared(self._inputs, x)
        streams = x.view(len(x), self._streams, -1)
        predicted = self._altup.predict(streams)
        active = predicted[:, self._altup.active].to(x.dtype).contiguous()
        normed = self._before_attention(active)
        laurel = self._after_laurel(self._laurel_right(self._laurel_left(normed, context), context)).add_(normed)
        attended = self._after_attention(self._attention(normed, context))
        mixed = (active + attended).add_(laurel).mul_(math.sqrt(0.5))
        activated = mixed + self._after_mlp(self._mlp(self._before_mlp(mixed), context))
        corrected = self._altup.correct(predicted, activated)
        first = corrected[:, self._altup.active].to(x.dtype).contiguous()
        if self._output_scale is not None:
            first = first * self._output_scale
        corrected[:, 1:] += self._input_gate(first, inputs, context).float().unsqueeze(1)
        streams.copy_(corrected)
        return delta
