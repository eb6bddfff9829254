"""Linear layers split over the ranks of a tensor-parallel group (arXiv 1909.08053); one rank is the plain case."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..checkpoint.tensor_group import TensorGroup, rank_slice
from ..checkpoint.weights import TensorSlice, WeightLoader
from .matmul import LM_HEAD, build_matmul


class OutputShard(NamedTuple):
    """A matrix of the checkpoint with `size` output features, of which this rank computes `features`."""

    name: str
    size: int
    features: slice

    def shifted(self, by: int) -> "OutputShard":
        """The same number of features `by` further on, where one matrix holds several projections."""
        return self._replace(features=slice(self.features.start + by, self.features.stop + by))


class ColumnLinear:
    """x [N, in] -> this rank's output features [N, out], those of several matrices in one product."""

    def __init__(self, loader: WeightLoader, outputs: Sequence[OutputShard], inputs: int, *, bias: bool) -> None:
        biases = (TensorSlice(f"{o.name}.bias", (o.size,), o.features) for o in outputs)
        weights = [TensorSlice(f"{o.name}.weight", (o.size, inputs), o.features) for o in outputs]
        self._matmul = build_matmul(loader, weights, loader.concatenate(biases) if bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        return self._matmul(x)


class RowLinear:
    """This rank's input features [N, in / ranks] -> the whole output [N, out], summed over the group."""

    def __init__(
        self, loader: WeightLoader, name: str, inputs: int, columns: slice, outputs: int, *, bias: bool
    ) -> None:
        # The sum over ranks must contain the bias once.
        mine = loader.vector(f"{name}.bias", outputs) if bias and loader.group.rank == 0 else None
        self.partial = build_matmul(loader, [TensorSlice(f"{name}.weight", (outputs, inputs), columns=columns)], mine)
        """This rank's summand of the output."""
        self._group = loader.group
        self.untraceable = split_reason(loader.group)

    def __call__(self, x: Tensor) -> Tensor:
        partial = self.partial(x)
        return partial if self._group.size == 1 else self._group.all_reduce(partial)


class LMHead:
    """Hidden states [S, hidden] -> logits [S, vocabulary], the vocabulary split over the group."""

    def __init__(self, loader: WeightLoader, name: str, vocab: int, hidden: int) -> None:
        rows = rank_slice(vocab, loader.group)
        self._matmul = build_matmul(loader, [TensorSlice(name, (vocab, hidden), rows)], use=LM_HEAD)
        self._group, self._vocab = loader.group, vocab
        self.untraceable = split_reason(loader.group)

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._matmul(x)
        return logits if self._group.size == 1 else self._group.all_gather(logits, self._vocab)


def split_reason(group: TensorGroup) -> str | None:
    """Why a layer that is split over `group` can't be part of the C program; None: it is not split."""
    return None if group.size == 1 else f"its layers are split over {group.size} ranks"
