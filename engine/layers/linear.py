"""Linear layers split over a group of ranks; one rank is the plain case."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..checkpoint.tensor_group import rank_slice
from ..checkpoint.weights import TensorSlice, WeightLoader
from .matmul import LM_HEAD, build_matmul


class OutputShard(NamedTuple):
    """One of the checkpoint's matrices, of which this rank computes the output features `part` of `size`."""

    name: str
    size: int
    features: slice

    def shifted(self, features: int) -> "OutputShard":
        """As many of the same matrix, so many `features` further on: where a checkpoint has several matrices in one."""
        return self._replace(features=slice(self.features.start + features, self.features.stop + features))


class ColumnLinear:
    """x [N, in] -> this rank's output features [N, sum of parts]; several matrices computed as one."""

    def __init__(self, load: WeightLoader, outputs: Sequence[OutputShard], inputs: int, *, bias: bool) -> None:
        biases = (
            load.concatenate(TensorSlice(f"{o.name}.bias", (o.size,), o.features) for o in outputs) if bias else None
        )
        self._matmul = build_matmul(
            load, (TensorSlice(f"{o.name}.weight", (o.size, inputs), o.features) for o in outputs), biases
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._matmul(x)


class RowLinear:
    """This rank's input features [N, in / ranks] -> the whole output [N, out], summed over the group."""

    def __init__(self, load: WeightLoader, name: str, inputs: int, columns: slice, outputs: int, *, bias: bool) -> None:
        # The sum over ranks must contain the bias once.
        mine = load.vector(f"{name}.bias", outputs) if bias and load.group.rank == 0 else None
        self.partial = build_matmul(load, [TensorSlice(f"{name}.weight", (outputs, inputs), columns=columns)], mine)
        """This rank's share of the sum."""
        self._group = load.group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self.partial(x))


class LMHead:
    """Hidden states [S, hidden] -> logits [S, vocabulary], the vocabulary split over the group."""

    def __init__(self, load: WeightLoader, name: str, vocab: int, hidden: int) -> None:
        rows = rank_slice(vocab, load.group)
        self._matmul = build_matmul(load, [TensorSlice(name, (vocab, hidden), rows)], use=LM_HEAD)
        self._group, self._vocab = load.group, vocab

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_gather(self._matmul(x), self._vocab)
