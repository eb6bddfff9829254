"""How ranks that compute a step together capture it: each may fail where no other waits for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..checkpoint.build_context import TensorGroup


class RankGroup:
    """A `TensorGroup`, and the `CapturingRanks` of its steps."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._is_alone = False
        self.rank = group.rank
        self.size = group.size

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial if self._is_alone else self._group.all_reduce(partial)

    def all_gather(self, part: Tensor, total: int) -> Tensor:
        if self._is_alone:
            return part.new_zeros(*part.shape[:-1], total)
        return self._group.all_gather(part, total)

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def agree(self, own: bool, device: torch.device) -> bool:
        votes = self._group.all_reduce(torch.tensor([float(own)], device=device))
        return int(votes.item()) == self.size
