"""A mixture of experts (arXiv 1701.06538, 2101.03961): a router sends each token through a few of many MLPs."""

import torch
from torch import Tensor

from ..checkpoint.model_spec import ExpertsSpec
from ..checkpoint.tensor_group import SingleRank, rank_slice
from ..checkpoint.weights import TensorSlice, WeightLoader
from .matmul import ROUTER, build_matmul
from .mlp import GatedMLP, GatedMLPSpec


class MixtureOfExperts:
    """x [N, hidden] -> the weighted sum of its experts' outputs [N, hidden].

    The router takes the likeliest experts of each token by a softmax in float32. Every rank holds all of the router, so
    all ranks decide the same, and a slice of every expert, or some experts whole: the sum over ranks is the same.
    Experts are computed one after the other, each for its tokens."""

    untraceable: str | None = "it has a mixture of experts"

    def __init__(self, loader: WeightLoader, router: str, spec: ExpertsSpec, experts: list[GatedMLPSpec]) -> None:
        """`router` is the name of the router's matrix."""
        weight = TensorSlice(f"{router}.weight", (spec.count, experts[0].hidden))
        self._scores, self._spec = build_matmul(loader, [weight], use=ROUTER), spec
        self._group, self._mine = loader.group, slice(0, spec.count)
        if loader.context.whole_experts:
            self._mine, loader = rank_slice(spec.count, loader.group), loader.for_group(SingleRank())
        self._experts = [GatedMLP(loader, expert) for expert in experts[self._mine]]

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self._scores(x).softmax(-1, dtype=torch.float32).topk(self._spec.per_token, -1)
        if self._spec.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        tokens = torch.div(order, chosen.shape[1], rounding_mode="floor")
        sorted_weights = weights.to(x.dtype).flatten()[order].unsqueeze(-1)
        counts = torch.bincount(chosen.flatten(), minlength=self._spec.count).tolist()
        total = torch.zeros_like(x)
        shares = list(zip(torch.split(tokens, counts), torch.split(sorted_weights, counts), strict=True))
        for expert, (mine, weight) in zip(self._experts, shares[self._mine], strict=True):
            if len(mine):
                total.index_add_(0, mine, expert.partial(x[mine]).mul_(weight))
        return self._group.all_reduce(total)
