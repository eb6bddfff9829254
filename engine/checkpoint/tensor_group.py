"""The tensor-parallel group: the ranks that share every layer's weights, as layers see them."""

from typing import Protocol

from torch import Tensor


class TensorGroup(Protocol):
    """Ranks that each hold a slice of every split layer."""

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
    """The shares of all ranks, in their order."""
    return [slice(total * rank // size, total * (rank + 1) // size) for rank in range(size)]


def kv_head_slice(heads: int, group: TensorGroup) -> slice:
    """This rank's share of `heads` key/value heads: with more ranks than heads, several ranks hold the same one."""
    if group.size <= heads:
        return rank_slice(heads, group)
    head = group.rank * heads // group.size
    return slice(head, head + 1)


def head_features(heads: slice, head_dim: int) -> slice:
    """The range of features that a range of heads has."""
    return slice(heads.start * head_dim, heads.stop * head_dim)
