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
    """The experts of each token and their weights, both [N, per token]."""

    experts: Tensor
    weights: Tensor


class Router:
    """x [N, hidden] -> the likeliest experts of each token by a softmax in float32, their weights in x's dtype.

    Every rank holds all of the router's weights, so all ranks decide the same."""

    def __init__(self, loader: WeightLoader, name: str, hidden: int, experts: ExpertsSpec) -> None:
        self._scores = build_matmul(loader, [TensorSlice(f"{name}.weight", (experts.count, hidden))], use=ROUTER)
        self._experts = experts

    def __call__(self, x: Tensor) -> Routed:
        probabilities = self._scores(x).softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self._experts.per_token, -1)
        if self._experts.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routed(chosen, weights.to(x.dtype))


class MixtureOfExperts:
    """x [N, hidden] -> the weighted sum of its experts' outputs [N, hidden].

    Every rank holds a slice of every expert, or some experts whole: the sum over ranks is the same. Experts are
    computed one after the other, each for its tokens."""

    untraceable: str | None = "it has a mixture of experts"

    def __init__(self, loader: WeightLoader, router: Router, experts: list[GatedMLPSpec]) -> None:
        self._router, self._group = router, loader.group
        self._mine = slice(0, len(experts))
        if loader.context.whole_experts:
            self._mine, loader = rank_slice(len(experts), loader.group), loader.for_group(SingleRank())
        self._experts = [GatedMLP(loader, expert) for expert in experts[self._mine]]
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
