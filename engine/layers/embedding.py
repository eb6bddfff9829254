"""Token embedding, the vocabulary split over a group of ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.tensor_group import rank_slice
from ..checkpoint.weights import TensorSlice, WeightLoader
from ..cpu.elementwise import trace_embedding
from ..cpu.op_trace import SymbolicTensor, SymbolicTokenIds


class Embedding:
    """Token ids [N] -> [N, hidden], multiplied by `scale` in the model's dtype. The table stays in the mapped file
    where it can: a step reads few rows of it."""

    def __init__(self, load: WeightLoader, name: str, vocab: int, hidden: int, scale: float = 1.0) -> None:
        self._part = rank_slice(vocab, load.group)
        self._table = load.mapped(TensorSlice(name, (vocab, hidden), self._part))
        self._group = load.group
        self._scale = None if scale == 1 else torch.tensor(scale, dtype=load.dtype, device=load.device)

    def __call__(self, tokens: Tensor) -> Tensor:
        x = self._rows(tokens)
        return x if self._scale is None else x * self._scale

    def trace(self, ids: SymbolicTokenIds) -> SymbolicTensor:
        """Raises TypeError: there is no kernel for it."""
        if self._group.size > 1:
            raise TypeError("a table that is split is read by all ranks together")
        return trace_embedding(ids, self._table, 1.0 if self._scale is None else float(self._scale))

    def _rows(self, tokens: Tensor) -> Tensor:
        if self._group.size == 1:
            return F.embedding(tokens, self._table)
        local = tokens - self._part.start
        elsewhere = (local < 0) | (local >= len(self._table))
        mine = F.embedding(local.masked_fill(elsewhere, 0), self._table)
        return self._group.all_reduce(mine.masked_fill_(elsewhere.unsqueeze(-1), 0))
