"""Norms of all queries of a token together, and of all keys, in place of norms head by head, as in OLMo and
MiniMax-M2."""

from typing import Protocol

import torch
from torch import Tensor

from ..checkpoint.build_context import TensorGroup
from ..checkpoint.weights import TensorSlice, WeightLoader
from .norm import NormFactory


class QueryKeyNorms(Protocol):
    """Normalises queries and keys of packed [N, heads of queries, keys and values, head_dim], contiguous, in place."""

    def __call__(self, packed: Tensor) -> None: ...


def build_whole_norms(
    loader: WeightLoader, factory: NormFactory, eps: float, queries: TensorSlice, keys: TensorSlice
) -> QueryKeyNorms:
    """`queries` and `keys`: this rank's share of both weights."""
    weights = loader.concatenate([queries]), loader.concatenate([keys])
    if loader.group.size > 1:
        return SplitNorms(weights, (queries.shape[0], keys.shape[0]), eps, loader.group)
    return WholeNorms(weights, factory, eps)


class WholeNorms:
    """The norms of one rank, which has all heads."""

    def __init__(self, weights: tuple[Tensor, Tensor], factory: NormFactory, eps: float) -> None:
        self._queries, self._keys = (factory(weight, eps) for weight in weights)
        self._first_key = len(weights[0])

    def __call__(self, packed: Tensor) -> None:
        self._queries.norm_part(packed, 0)
        self._keys.norm_part(packed, self._first_key)


class SplitNorms:
    """The norms of heads that ranks share: they exchange sums of squares. `totals`: numbers of queries and of keys of
    all ranks. With more ranks than key heads several have the same ones."""

    def __init__(self, weights: tuple[Tensor, Tensor], totals: tuple[int, int], eps: float, group: TensorGroup) -> None:
        self._weight = torch.cat(weights)
        self._sizes = [len(weight) for weight in weights]
        copies = (group.size * size / total for size, total in zip(self._sizes, totals, strict=True))
        counted = [total * copy for total, copy in zip(totals, copies, strict=True)]
        self._counted = torch.tensor(counted, device=self._weight.device)
        self._eps = eps
        self._group = group

    def __call__(self, packed: Tensor) -> None:
        part = packed.flatten(1)[:, : sum(self._sizes)]
        wide = part.float()
        squares = torch.stack([numbers.square().sum(-1) for numbers in torch.split(wide, self._sizes, -1)], -1)
        scales = (self._group.all_reduce(squares) / self._counted + self._eps).rsqrt()
        for numbers, scale in zip(torch.split(wide, self._sizes, -1), torch.split(scales, 1, -1), strict=True):
            numbers.mul_(scale)
        part.copy_(wide.to(self._weight.dtype).mul_(self._weight))
