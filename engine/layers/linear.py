"""Linear layers split over the ranks of a tensor-parallel group (arXiv 1909.08053), and what adapters add to them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.adapter_targets import matrix_runs
from ..checkpoint.build_context import TensorGroup, rank_slice
from ..checkpoint.weights import TensorSlice, WeightLoader
from ..cpu import library
from ..cpu.lora import NativeLora
from ..cpu.op_trace import SymbolicTensor
from ..gpu import runtime
from ..step_adapters import StepAdapters
from .product_matrix import LM_HEAD, build_matmul
from .step_context import StepContext

if TYPE_CHECKING:
    from ..gpu.lora import TritonLora


class OutputShard(NamedTuple):
    """A matrix of the checkpoint with `size` output features, of which this rank computes `features`."""

    name: str
    size: int
    features: slice
    factor: float = 1.0
    """What they are multiplied by."""
    biased: bool = True
    """Whether they have a bias where others beside them have one."""

    def shifted(self, by: int) -> "OutputShard":
        """The same number of features `by` further on, where one matrix holds several projections."""
        return self._replace(features=slice(self.features.start + by, self.features.stop + by))


def join_shards(shards: Iterable[OutputShard]) -> list[OutputShard]:
    """The same features in as few shards as can be: those next to each other in one matrix, with one factor,
    together."""
    joined: list[OutputShard] = []
    for shard in shards:
        if joined and shard == joined[-1]._replace(features=shard.features):
            before = joined[-1].features
            if before.stop == shard.features.start:
                joined.pop()
                shard = shard._replace(features=slice(before.start, shard.features.stop))
        joined.append(shard)
    return joined


class LayerMatmul:
    """The product of a linear layer with the matrices `slices`, one below the other, and what the adapters of a step's
    rows (LoRA, arXiv 2106.09685) add to it."""

    def __init__(self, loader: WeightLoader, slices: list[TensorSlice], bias: Tensor | None) -> None:
        self.product = build_matmul(loader, slices, bias)
        self._number = 0 if loader.adaptable is None else len(loader.adaptable)
        self._lora: NativeLora | TritonLora | TorchLora | None = None
        if loader.adaptable is not None:
            loader.adaptable.append(slices)
            self._lora = _fastest_lora(self._number, slices, loader)

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        recorded: object = x  # declared for tensors
        if isinstance(self._lora, NativeLora) and isinstance(recorded, SymbolicTensor):
            shrunk = self._lora.trace_shrink(recorded)
            traced: SymbolicTensor = cast(Any, self.product)(recorded)
            self._lora.trace_expand(shrunk, traced)
            return cast(Tensor, traced)
        out = self.product(x)
        if self._lora is not None and context.adapters is not None and context.adapters.change(self._number):
            self._lora.add(x, out, context.adapters)
        return out


class TorchLora:
    """What adapters add to product `number` by torch, and the reference of the kernels."""

    def __init__(self, number: int) -> None:
        self._number = number

    def add(self, x: Tensor, out: Tensor, step: StepAdapters) -> None:
        """Adds to the product's result `out` [N, outputs] what the step's adapters make of x [N, inputs]."""
        for adapter, places in step.segments(x.device):
            for part in adapter.parts[self._number]:
                added = F.linear(x[places], part.a).mul_(part.scale) @ part.b
                out[:, part.first : part.first + part.outputs].index_add_(0, places, added)


def _fastest_lora(
    number: int, slices: list[TensorSlice], loader: WeightLoader
) -> "NativeLora | TritonLora | TorchLora":
    most = loader.context.max_lora_rank
    outputs = [sum(len(part.row_range) for part in run) for run in matrix_runs(slices)]
    if runtime.serves(loader.dtype, loader.device):
        from ..gpu.lora import TritonLora

        return TritonLora(number, outputs, most)
    if library.supports(loader.dtype, loader.device):
        return NativeLora(number, len(outputs) * most)
    return TorchLora(number)


def column_slices(outputs: Iterable[OutputShard], inputs: int) -> list[TensorSlice]:
    """The parts of matrices [size, inputs] that compute these output features."""
    return [TensorSlice(f"{o.name}.weight", (o.size, inputs), o.features, factor=o.factor) for o in outputs]


def column_linear(loader: WeightLoader, outputs: Sequence[OutputShard], inputs: int, *, bias: bool) -> LayerMatmul:
    """The product x [N, in] -> this rank's output features [N, out], those of several matrices in one."""
    return LayerMatmul(loader, column_slices(outputs, inputs), joined_bias(loader, outputs) if bias else None)


def joined_bias(loader: WeightLoader, outputs: Iterable[OutputShard]) -> Tensor:
    """The biases of these output features, zeros for those that have none."""
    parts: list[Tensor] = []
    for o in outputs:
        part = TensorSlice(f"{o.name}.bias", (o.size,), o.features, factor=o.factor)
        if o.biased:
            parts.append(loader.concatenate([part]))
        else:
            parts.append(torch.zeros(len(part.row_range), dtype=loader.dtype, device=loader.device))
    return torch.cat(parts)


class RowLinear:
    """This rank's input features [N, in / ranks] -> the whole output [N, out], summed over the group."""

    def __init__(
        self, loader: WeightLoader, name: str, inputs: int, columns: slice, outputs: int, *, bias: bool
    ) -> None:
        # The sum over ranks must contain the bias once.
        mine = loader.vector(f"{name}.bias", outputs) if bias and loader.group.rank == 0 else None
        self.partial = LayerMatmul(loader, [TensorSlice(f"{name}.weight", (outputs, inputs), columns=columns)], mine)
        """This rank's summand of the output."""
        self._group = loader.group
        self.untraceable = split_reason(loader.group)

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        partial = self.partial(x, context)
        return partial if self._group.size == 1 else self._group.all_reduce(partial)


class LMHead:
    """Hidden states [S, hidden] -> logits [S, vocabulary], the vocabulary split over the group."""

    def __init__(self, loader: WeightLoader, name: str, vocab: int, hidden: int, bias: Tensor | None = None) -> None:
        rows = rank_slice(vocab, loader.group)
        own_bias = None if bias is None else bias[rows]
        self._matmul = build_matmul(loader, [TensorSlice(name, (vocab, hidden), rows)], own_bias, LM_HEAD)
        self._group = loader.group
        self._vocab = vocab
        self.untraceable = split_reason(loader.group)

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._matmul(x)
        return logits if self._group.size == 1 else self._group.all_gather(logits, self._vocab)


def split_reason(group: TensorGroup) -> str | None:
    """Why a layer that is split over `group` can't be part of the C program; None: it is not split."""
    return None if group.size == 1 else f"its layers are split over {group.size} ranks"
