"""The context that a rank's decoder is built in: its share of the model, its device, dtype and longest sequence."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .model_spec import DecoderShape
from .packing_cache import PackingCache
from .partition import PipelineStage


class TensorGroup(Protocol):
    """The tensor-parallel group: ranks that each hold a slice of every split layer."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of every rank's `partial`, on every rank."""

    def all_gather(self, part: Tensor, total: int) -> Tensor:
        """Every rank's `part` of `total` features (see `rank_slice`) side by side on the last axis, on every rank."""


class SingleRank:
    """A group of one rank: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, part: Tensor, total: int) -> Tensor:
        return part


def rank_slice(total: int, group: TensorGroup) -> slice:
    """This rank's share of `total` features, heads or rows: contiguous, and as long as any other up to one."""
    return all_rank_slices(total, group.size)[group.rank]


def all_rank_slices(total: int, size: int) -> list[slice]:
    return [slice(total * rank // size, total * (rank + 1) // size) for rank in range(size)]


def kv_head_slice(heads: int, group: TensorGroup) -> slice:
    """This rank's share of `heads` key/value heads: with more ranks than heads, several ranks hold the same one."""
    if group.size <= heads:
        return rank_slice(heads, group)
    head = group.rank * heads // group.size
    return slice(head, head + 1)


class PipelineLink(Protocol):
    """The link to the stages before and after this one: it carries the hidden states [N, hidden] of one step after the
    other, in the model's dtype, from each rank to the rank of its own number in the next stage."""

    def receive(self, into: Tensor) -> None:
        """Wait for the states that the stage before sends for this step, and fill `into` with them."""

    def send(self, x: Tensor) -> None:
        """Hand `x`, contiguous, to the stage after. It belongs to the link then: the caller must not write to it."""


class Shard(NamedTuple):
    """A rank's share of a model: its slice of every layer among `group`, and the layers of its `stage`. `link` is None
    where there is one stage. The default is the whole model."""

    group: TensorGroup = SingleRank()
    stage: PipelineStage = PipelineStage()
    link: PipelineLink | None = None

    @property
    def is_whole(self) -> bool:
        return self.group.size * self.stage.count == 1

    @property
    def reports_results(self) -> bool:
        """Whether it is the first rank of the last stage."""
        return self.stage.last and self.group.rank == 0

    def local_shape(self, shape: DecoderShape) -> DecoderShape:
        """The `shape` of a whole model cut to this rank: its heads, key/value heads and layers."""
        heads, kv_heads = rank_slice(shape.heads, self.group), kv_head_slice(shape.kv_heads, self.group)
        layers = self.stage.layers(shape.layers)
        return replace(
            shape,
            heads=heads.stop - heads.start,
            kv_heads=kv_heads.stop - kv_heads.start,
            attention=shape.attention[layers.start : layers.stop],
            states=shape.states[layers.start : layers.stop],
        )


class Int4Plan(NamedTuple):
    """What a calibration found out about matrices, by the labels of their slices: the mean `squares` of the inputs of
    each, float32 [inputs], and those that are too sensitive for four bits and stay `higher`."""

    squares: Mapping[str, Tensor]
    higher: frozenset[str]


class ProductObserver(Protocol):
    """Watches the products of a model while it is calibrated."""

    def watch(
        self, label: str, product: Callable[[Tensor], Tensor], outputs: int, sample: Tensor
    ) -> Callable[[Tensor], Tensor]:
        """The same `product`, observed. `sample`: some of the `outputs` rows of its weights, float32 [n, inputs]."""


class BuildContext(NamedTuple):
    """A rank's device and shard, for sequences of at most `max_positions` tokens. `progress` is called with the
    fraction of the rank's bytes read so far. `quantization`: what matrices become while they are loaded, "none", "int8"
    or "int4", for which a calibration may have made a `plan`; an `observer` watches what could become int4.
    `whole_experts`: the rank has some experts of a mixture whole, instead of a slice of each. `cache`: where packed
    weights are kept. `max_lora_rank`: of adapters that may come; 0: none will."""

    dtype: torch.dtype
    device: torch.device
    max_positions: int
    shard: Shard = Shard()
    progress: Callable[[float], None] = lambda _: None
    quantization: str = "none"
    whole_experts: bool = False
    cache: PackingCache | None = None
    plan: Int4Plan = Int4Plan({}, frozenset())
    observer: ProductObserver | None = None
    max_lora_rank: int = 0
