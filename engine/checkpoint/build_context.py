"""What a decoder is built for: a rank's share of the model, and the device, dtype and lengths it computes with."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .model_spec import DecoderShape
from .pipeline_stage import PipelineStage
from .tensor_group import SingleRank, TensorGroup, kv_head_slice, rank_slice


class PipelineLink(Protocol):
    """The stages before and after this one: hidden states [N, hidden] of one step after the other, in the model's
    dtype. All ranks of a stage have the same; what one sends, the one with its place in the next stage receives."""

    def receive(self, into: Tensor) -> None:
        """Fill `into` with what the stage before sent for this step. Waits for it."""

    def send(self, x: Tensor) -> None:
        """Hand `x`, contiguous, to the stage after. It is the pipe's from now on: nobody writes to it any more."""


class Shard(NamedTuple):
    """A rank's share of a model: of every layer its slice among `group`, of all layers those of `stage`.

    `pipe` is None where there is one stage. One rank alone is the plain case."""

    group: TensorGroup = SingleRank()
    stage: PipelineStage = PipelineStage()
    link: PipelineLink | None = None

    @property
    def is_whole(self) -> bool:
        return self.group.size * self.stage.count == 1

    def local_shape(self, shape: DecoderShape) -> DecoderShape:
        """What of a whole model's `shape` this rank's attention has: heads, key/value heads, and layers."""
        heads, kv_heads = rank_slice(shape.heads, self.group), kv_head_slice(shape.kv_heads, self.group)
        layers = self.stage.layers(len(shape.attention))
        return replace(
            shape,
            heads=heads.stop - heads.start,
            kv_heads=kv_heads.stop - kv_heads.start,
            attention=shape.attention[layers.start : layers.stop],
        )


class BuildContext(NamedTuple):
    """This rank's device and share, for sequences of at most `positions` tokens.

    `progress` is told the fraction of the rank's bytes read so far. `quantized`: its matrices become int8.
    `whole_experts`: of a mixture it has some experts whole, instead of a slice of each."""

    dtype: torch.dtype
    device: torch.device
    max_positions: int
    shard: Shard = Shard()
    progress: Callable[[float], None] = lambda _: None
    quantized: bool = False
    whole_experts: bool = False
