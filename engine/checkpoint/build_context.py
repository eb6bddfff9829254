"""The context that a rank's decoder is built in: its share of the model, its device, dtype and longest sequence."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from .model_spec import DecoderShape, LayerAttention, ModelSpec
from .packing_cache import PackingCache
from .partition import PipelineStage

if TYPE_CHECKING:
    from ..gpu.few_rows import FewRowProducts


class TensorGroup(Protocol):
    """The tensor-parallel group: ranks that each hold a slice of every split layer."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of every rank's `partial`, on every rank."""

    def all_gather(self, part: Tensor, total: int) -> Tensor:
        """Every rank's `part` of `total` features (see `rank_slice`), concatenated on the last axis, on every rank."""


class SingleRank:
    """A group of one rank: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, part: Tensor, total: int) -> Tensor:
        return part


def rank_slice(total: int, group: TensorGroup) -> slice:
    """This rank's share of `total` features, heads or rows: contiguous, and at most one longer than another's."""
    return all_rank_slices(total, group.size)[group.rank]


def all_rank_slices(total: int, size: int) -> list[slice]:
    return [slice(total * rank // size, total * (rank + 1) // size) for rank in range(size)]


def kv_head_slice(heads: int, group: TensorGroup) -> slice:
    """This rank's share of `heads` key/value heads; with more ranks than heads, several ranks have the same one."""
    if group.size <= heads:
        return rank_slice(heads, group)
    head = group.rank * heads // group.size
    return slice(head, head + 1)


class PipelineLink(Protocol):
    """The link to the stages before and after this one. It carries the hidden states [N, hidden] of each step, in the
    model's dtype, from a rank to the rank with its index in the next stage."""

    def receive(self, into: Tensor) -> None:
        """Wait for the states that the stage before sends for this step, and fill `into` with them."""

    def send(self, x: Tensor) -> None:
        """Send `x`, contiguous, to the next stage. It belongs to the link then: the caller must not write to it."""


class Shard(NamedTuple):
    """A rank's share of a model: its slice of every layer among `group`, and the layers of its `stage`. `link` is None
    for a single stage. The default is the whole model."""

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
        heads, kv_heads = slice(0, shape.heads), slice(0, shape.kv_heads)
        if any(shape.attention):
            heads = rank_slice(shape.heads, self.group)
            kv_heads = kv_head_slice(shape.kv_heads, self.group)
        states = shape.states
        if isinstance(shape, ModelSpec) and shape.recurrence is not None:
            own = shape.recurrence.share(self.group.rank, self.group.size).state
            states = tuple(state and own for state in states)
        layers = self.stage.layers(shape.layers)
        attention = shape.attention[layers.start : layers.stop]
        owners = shape.cache_owners[layers.start : layers.stop]
        return replace(
            shape,
            heads=heads.stop - heads.start,
            kv_heads=kv_heads.stop - kv_heads.start,
            attention=tuple(kind and self._local_attention(kind) for kind in attention),
            states=states[layers.start : layers.stop],
            cache_owners=tuple(owner - layers.start for owner in owners),
        )

    def _local_attention(self, kind: LayerAttention) -> LayerAttention:
        if kind.kept is None:
            return kind
        heads = kv_head_slice(kind.kept.heads, self.group)
        return kind._replace(kept=kind.kept._replace(heads=heads.stop - heads.start))


class Int4Plan(NamedTuple):
    """The result of a calibration, by the labels of matrices' slices."""

    squares: Mapping[str, Tensor]
    """The mean squares of the inputs of each, float32 [inputs]."""
    higher: frozenset[str]
    """Matrices that are too sensitive for four bits, and get eight."""


class ProductObserver(Protocol):
    """Watches the products of a model while it is calibrated."""

    def watch(
        self, label: str, product: Callable[[Tensor], Tensor], outputs: int, sample: Tensor
    ) -> Callable[[Tensor], Tensor]:
        """The `product`, observed. `sample`: some of its weights' `outputs` rows, float32 [n, inputs]."""


class BuildContext(NamedTuple):
    """The settings by which a rank's decoder is built."""

    dtype: torch.dtype
    device: torch.device
    max_positions: int
    """The most tokens of a sequence."""
    shard: Shard = Shard()
    progress: Callable[[float], None] = lambda _: None
    """Called with the fraction of the rank's bytes that is read."""
    quantization: str = "none"
    """What matrices become while they are loaded: "none", "int8", "fp8" or "int4"."""
    whole_experts: bool = False
    """The rank has some experts of a mixture whole, instead of a slice of each."""
    cache: PackingCache | None = None
    """Where packed weights are kept."""
    plan: Int4Plan = Int4Plan({}, frozenset())
    """The calibration for int4, if there was one."""
    observer: ProductObserver | None = None
    """Watches the products that could become int4."""
    max_lora_rank: int = 0
    """The largest rank of adapters that may be loaded; 0: none will be."""
    batch_invariance: bool = False
    """Products on a GPU take no row's sums in an order that other rows decide."""
    recurrence_chunks: bool = False
    """Prompts in bf16 go through a GPU's recurrences by chunks."""
    few_rows: "FewRowProducts | None" = None
    """Where products whose few rows a GPU's kernel may compute are kept; None: it computes none."""
