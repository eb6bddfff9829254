"""Queries that grow with their position, so that attention stays sharp over long texts, as Llama 4 has it (the idea is
that of arXiv 2501.19399)."""

import torch
from torch import Tensor

from ..checkpoint.model_spec import ModelSpec
from .step_context import StepContext


class QueryGrowth:
    """Multiplies queries by 1 + growth * ln(1 + floor(position / `period`))."""

    untraceable = "its queries grow with their position"

    def __init__(self, growth: float, period: int) -> None:
        self._growth = growth
        self._period = period

    def __call__(self, queries: Tensor, context: StepContext) -> None:
        """queries [N, heads, head_dim], in place."""
        periods = torch.floor(context.batch.positions / self._period)
        factors = 1 + self._growth * torch.log1p(periods)
        queries.mul_(factors.to(queries.dtype).view(-1, 1, 1))


def build_query_growth(spec: ModelSpec, positions: int) -> QueryGrowth | None:
    """The growth of queries; None where all of them, at positions below `positions`, are multiplied by 1."""
    period = spec.rope.original_max_position
    return QueryGrowth(spec.query_growth, period) if spec.query_growth and positions > period else None
