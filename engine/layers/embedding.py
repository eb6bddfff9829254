"""Token embedding, the vocabulary split over a group of ranks."""

import torch.nn.functional as F
from torch import Tensor

from ..weights import Loader, Piece
from .group import part


class Embedding:
    """Token ids [N] -> [N, hidden]. The table stays in the mapped file where it can: a step reads few rows of it."""

    def __init__(self, load: Loader, name: str, vocab: int, hidden: int) -> None:
        self._part = part(vocab, load.group)
        self._table = load.mapped(Piece(name, (vocab, hidden), self._part))
        self._group = load.group

    def __call__(self, tokens: Tensor) -> Tensor:
        if self._group.size == 1:
            return F.embedding(tokens, self._table)
        local = tokens - self._part.start
        elsewhere = (local < 0) | (local >= len(self._table))
        mine = F.embedding(local.masked_fill(elsewhere, 0), self._table)
        return self._group.sum(mine.masked_fill_(elsewhere.unsqueeze(-1), 0))
