"""What the model gives the tokens of prompts, for the rows that want to know.

The logits at a place tell of the token that follows it, so a step scores what follows the prompt tokens it computes.
They come in pieces: those of a whole chunk would take more memory than all else in a step. Knows nothing of caches.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.logprobs import PromptLogprobs
from ...scheduler.plan import LongArray, StepPlan
from .logprobs import measure_logprobs

LOGITS_PIECE = 64
"""Places whose logits are computed at once: with more of them a head is no faster."""


class PromptSpan(NamedTuple):
    """`length` tokens of the prompt in `row`, from position `first` on. Packed place `place` is the one before the
    first of them. `most`: how many of the likeliest tokens to name beside each."""

    row: int
    first: int
    length: int
    place: int
    top_n: int


class PromptLogprobRequest(NamedTuple):
    """A row whose first `prompt` tokens are to be scored, `most` of the likeliest beside each."""

    prompt: int
    top_n: int


class PromptLogprobRequests:
    """What the rows ask for that ask for something."""

    def __init__(self) -> None:
        self._wishes: dict[int, PromptLogprobRequest] = {}

    def add_row(self, row: int, wish: PromptLogprobRequest) -> None:
        self._wishes[row] = wish

    def remove_row(self, row: int) -> None:
        """Its sequence is gone, if it had one that asked for something."""
        self._wishes.pop(row, None)

    def spans_in(self, plan: StepPlan) -> list[PromptSpan]:
        """What the step scores; nothing of rows that are past their prompt."""
        if not self._wishes:
            return []
        begins = plan.counts.cumsum() - plan.counts
        columns = zip(*(column.tolist() for column in (plan.rows, plan.starts, plan.counts, begins)), strict=True)
        found = (self._stretch(*numbers) for numbers in columns if numbers[0] in self._wishes)
        return [stretch for stretch in found if stretch.length > 0]

    def _stretch(self, row: int, start: int, count: int, place: int) -> PromptSpan:
        wish = self._wishes[row]
        return PromptSpan(row, start + 1, min(count, wish.prompt - 1 - start), place, wish.top_n)


class StepPromptLogprobs(NamedTuple):
    """What a step scores: the packed `places` [T] and the `tokens` [T] that follow them, stretch by stretch."""

    spans: Sequence[PromptSpan]
    places: Tensor
    tokens: Tensor

    @property
    def place_pieces(self) -> tuple[Tensor, ...]:
        """The places whose logits `read` takes, one piece after the other."""
        return torch.split(self.places, LOGITS_PIECE)

    def read_logits(self, logits: Iterator[Tensor]) -> list[tuple[int, PromptLogprobs]]:
        """(row, scores) of each stretch, for the logits [<= PIECE, vocabulary] of each piece."""
        most = max(stretch.top_n for stretch in self.spans)
        pieces = zip(logits, torch.split(self.tokens, LOGITS_PIECE), strict=True)
        columns = zip(*(_columns(each, tokens, most) for each, tokens in pieces), strict=True)
        chosen, ranks, ids, values = (torch.cat(column).cpu().numpy() for column in columns)
        bounds = pairwise(accumulate((stretch.length for stretch in self.spans), initial=0))
        return [
            (row, PromptLogprobs.from_arrays(first, chosen[a:b], ranks[a:b], ids[a:b, :named], values[a:b, :named]))
            for (row, first, _, _, named), (a, b) in zip(self.spans, bounds, strict=True)
        ]


def expand_spans(stretches: Sequence[PromptSpan]) -> tuple[LongArray, LongArray, LongArray]:
    """Of all their tokens: the rows, the positions, and the packed places before them; each [T]."""
    counts = [stretch.length for stretch in stretches]
    begins = np.array([(stretch.row, stretch.first, stretch.place) for stretch in stretches])
    rows, firsts, places = begins.repeat(counts, axis=0).T
    within = np.concatenate([np.arange(count) for count in counts])
    return rows, firsts + within, places + within


def _columns(logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `PromptLogprobs.of` takes them, on the device."""
    logits = logits.float()
    chosen, ids, values = measure_logprobs(logits, tokens, most)
    return chosen, _ranks(logits, tokens), ids.to(torch.int32), values


def _ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """int32 [S]; on the CPU numpy counts in a tenth of the time of torch."""
    own = logits.gather(-1, tokens.unsqueeze(-1))
    if logits.device.type != "cpu":
        return (logits > own).sum(-1, dtype=torch.int32) + 1
    likelier = [np.count_nonzero(row > bar) for row, bar in zip(logits.numpy(), own.numpy(), strict=True)]
    return torch.tensor(likelier, dtype=torch.int32) + 1
