"""A mixture of experts (arXiv 1701.06538, 2101.03961): a router sends each token through a few of many MLPs."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.model_spec import ExpertsSpec
from ..checkpoint.tensor_group import SingleRank, rank_slice
from ..checkpoint.weights import TensorSlice, WeightLoader
from .matmul import ROUTER, build_matmul
from .mlp import GatedMLP, GatedMLPSpec


class Routed(NamedTuple):
    """Where each token goes: experts and their weights, both [N, chosen]."""

    experts: Tensor
    weights: Tensor


class Router:
    """x [N, hidden] -> the likeliest experts of each token by a softmax in float32, their weights in x's dtype.

    Every rank has all of it, and so decides the same."""

    def __init__(self, load: WeightLoader, name: str, hidden: int, experts: ExpertsSpec) -> None:
        self._scores = build_matmul(load, [TensorSlice(f"{name}.weight", (experts.count, hidden))], use=ROUTER)
        self._experts = experts

    def __call__(self, x: Tensor) -> Routed:
        likely = self._scores(x).softmax(-1, dtype=torch.float32)
        weights, chosen = likely.topk(self._experts.per_token, -1)
        if self._experts.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routed(chosen, weights.to(x.dtype))


class MixtureOfExperts:
    """x [N, hidden] -> the weighted sum of its experts' outputs [N, hidden].

    Every rank holds a slice of every expert, or some experts whole: the sum over ranks is the same. Experts go one by
    one, each over its tokens."""

    def __init__(self, load: WeightLoader, router: Router, experts: list[GatedMLPSpec]) -> None:
        self._router, self._group = router, load.group
        whole = load.context.whole_experts
        self._mine = rank_slice(len(experts), load.group) if whole else slice(0, len(experts))
        holding = load.for_group(SingleRank()) if whole else load
        self._experts = [GatedMLP(holding, expert) for expert in experts[self._mine]]
        self._count = len(experts)

    def __call__(self, x: Tensor) -> Tensor:
        routed = self._router(x)
        order = routed.experts.flatten().argsort(stable=True)
        tokens = torch.div(order, routed.experts.shape[1], rounding_mode="floor")
        weights = routed.weights.flatten()[order].unsqueeze(-1)
        counts = torch.bincount(routed.experts.flatten(), minlength=self._count).tolist()
        total = torch.zeros_like(x)
        shares = list(zip(torch.split(tokens, counts), torch.split(weights, counts), strict=True))
        for expert, (mine, weight) in zip(self._experts, shares[self._mine], strict=True):
            if len(mine):
                total.index_add_(0, mine, expert.partial(x[mine]).mul_(weight))
        return self._group.all_reduce(total)
