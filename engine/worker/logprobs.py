"""Log-probabilities of tokens: of sampled ones, and of a prompt's, for the rows that want them.

They are of the logits as the model made them: penalties, bans and temperature do not show. The logits at a place are
about the token that follows it, so a step scores the tokens that follow the prompt tokens it computes.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.logprobs import Logprobs, PromptLogprobs
from ...scheduler.plan import LongArray, StepPlan
from ..config import LOGITS_PIECE
from ..cpu import library
from ..cpu.sampling import rank_tokens
from ..gpu import runtime
from ..step_batch import StepBatch, end_ranges, gather_entries, to_device


class WantedLogprobs(NamedTuple):
    """What is reported beside a sample: its `top` likeliest tokens, and behind them those called `ids`."""

    top: int
    ids: tuple[int, ...] = ()
    processed: bool = False
    """Whether by the logits as `LogitsParams` changed them."""


def measure_logprobs(logits: Tensor, tokens: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [S] of int64 `tokens` [S] by float32 `logits` [S, vocabulary]; ids and log-probabilities of the
    likeliest tokens at their places, both [S, top_n], or as many as there are tokens."""
    total = _logsumexp(logits).unsqueeze(-1)
    chosen = logits.gather(-1, tokens.unsqueeze(-1)) - total
    values, ids = logits.topk(min(top_n, logits.shape[-1]))
    return chosen.squeeze(-1), ids, values - total


def _logsumexp(logits: Tensor) -> Tensor:
    """[S], of each row the same whatever rows are beside it."""
    if runtime.serves(logits.dtype, logits.device):
        from ..gpu.logsumexp import logsumexp

        return logsumexp(logits)
    # Torch shares the sum of a row that is alone among its threads, and rounds otherwise than in company.
    alone = len(logits) == 1
    return (logits.repeat(2, 1) if alone else logits).logsumexp(-1)[: len(logits)]


def sampled_logprobs(
    logits: Tensor, tokens: Tensor, wanted: Mapping[int, WantedLogprobs], size: int
) -> list[Logprobs | None]:
    """The log-probabilities of a step's `size` samples, None for a sample that is not in `wanted`. `logits`
    [W, vocabulary] and `tokens` int64 [W] are those of the wanted samples."""
    logits = logits.float()
    most = max(report.top for report in wanted.values())
    measured = _measure_samples(logits, tokens, most)
    logprobs: list[Logprobs | None] = [None] * size
    for line, ((place, report), own, ids, values, rank) in enumerate(
        zip(wanted.items(), *(column.tolist() for column in measured), strict=True)
    ):
        named: list[float] = []
        if report.ids:
            total = float(logits[line, tokens[line]]) - own
            named = [float(logits[line, token]) - total for token in report.ids]
        logprobs[place] = Logprobs(own, [*ids[: report.top], *report.ids], [*values[: report.top], *named], rank)
    return logprobs


def _measure_samples(logits: Tensor, tokens: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `measure_logprobs`, and the ranks of the tokens."""
    if not library.supports(logits.dtype, logits.device):
        return *measure_logprobs(logits, tokens, top_n), measure_ranks(logits, tokens)
    normalisers, ranks = rank_tokens(logits, tokens)
    values, ids = logits.topk(min(top_n, logits.shape[-1]))
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - normalisers
    return chosen, ids, values - normalisers.unsqueeze(-1), ranks


def measure_ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """How many tokens are likelier than each of int64 `tokens` [S] by float32 `logits` [S, vocabulary], and 1: int32
    [S]."""
    own = logits.gather(-1, tokens.unsqueeze(-1))
    if logits.device.type != "cpu":
        return (logits > own).sum(-1, dtype=torch.int32) + 1
    # numpy counts in a tenth of the time of torch
    likelier = [np.count_nonzero(row > bar) for row, bar in zip(logits.numpy(), own.numpy(), strict=True)]
    return torch.tensor(likelier, dtype=torch.int32) + 1


class PromptSpan(NamedTuple):
    """`length` tokens of the prompt in `row`, from position `first` on; `top_n` likeliest tokens are named at each."""

    row: int
    first: int
    length: int
    top_n: int


class ScoredTokens(NamedTuple):
    """The prompt tokens that a step scores, span by span: their ids, int64 [T], and the packed `places` [T] before
    them, ascending. `among` [T]: where those are among the step's logits; None: they are computed in pieces."""

    spans: Sequence[PromptSpan]
    tokens: Tensor
    places: Tensor
    among: LongArray | None

    @property
    def pieces(self) -> tuple[Tensor, ...]:
        """The places in pieces, for `read`."""
        return torch.split(self.places, LOGITS_PIECE)

    def read(self, logits: Iterator[Tensor]) -> list[tuple[int, PromptLogprobs]]:
        """(row, log-probabilities) of each span, from the logits [S, vocabulary] of each of `pieces`."""
        top_n = max(span.top_n for span in self.spans)
        pieces = zip(logits, torch.split(self.tokens, LOGITS_PIECE), strict=True)
        columns = zip(*(_columns(piece, tokens, top_n) for piece, tokens in pieces), strict=True)
        chosen, ranks, ids, values = (torch.cat(column).cpu().numpy() for column in columns)
        bounds = pairwise(accumulate((span.length for span in self.spans), initial=0))
        return [
            (row, PromptLogprobs.from_arrays(first, chosen[a:b], ranks[a:b], ids[a:b, :named], values[a:b, :named]))
            for (row, first, _, named), (a, b) in zip(self.spans, bounds, strict=True)
        ]


def _columns(logits: Tensor, tokens: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arrays of `PromptLogprobs.from_arrays`, on the device."""
    logits = logits.float()
    chosen, ids, values = measure_logprobs(logits, tokens, top_n)
    return chosen, measure_ranks(logits, tokens), ids.to(torch.int32), values


def scored_places(
    plan: StepPlan, batch: StepBatch, scoring: Mapping[int, tuple[int, int]], sampled: LongArray, token_ids: Tensor
) -> tuple[LongArray, LongArray | None, ScoredTokens | None]:
    """Packed places whose logits are computed together, which of them are `sampled` (None: all), and scored tokens.
    `scoring`: by row the tokens of a prompt that is scored, and how many likeliest ones to name at each; `token_ids`
    [rows, places] are all that rows have."""
    spans: list[PromptSpan] = []
    scored: list[LongArray] = []
    for at, row in enumerate(plan.rows.tolist()):
        if row not in scoring:
            continue
        prompt, top_n = scoring[row]
        start = int(plan.starts[at])
        count = int(plan.counts[at])
        first = int(batch.first_places[at])
        length = min(count, prompt - 1 - start)
        if length > 0 and plan.num_logits[at] == count:
            spans.append(PromptSpan(row, start + 1, length, top_n))
            scored.append(np.arange(first, first + length))
    if not spans:
        return sampled, None, None
    places = np.concatenate(scored)
    rows = np.repeat([span.row for span in spans], [span.length for span in spans])
    positions = np.concatenate([np.arange(span.first, span.first + span.length) for span in spans])
    tokens = gather_entries(token_ids, rows, positions).long()
    on_device = to_device(places, token_ids.device)
    if int(plan.num_logits.sum()) > LOGITS_PIECE:
        return sampled, None, ScoredTokens(spans, tokens, on_device, None)
    together = end_ranges(batch.first_places + plan.counts - 1, plan.num_logits)
    among = np.searchsorted(together, places)
    return together, np.searchsorted(together, sampled), ScoredTokens(spans, tokens, on_device, among)
