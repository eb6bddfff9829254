"""What the model itself gave tokens: those that were chosen, for the rows that want to know.

Of the logits as the model made them: penalties, bans and temperature do not show. Knows nothing of rows.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.logprobs import Logprobs


class MeasuredLogprobs(NamedTuple):
    """Logprobs of S tokens, `chosen` [S]; of the likeliest ones in their places, `ids` and `values`, both [S, most], or
    as many as there are."""

    chosen: Tensor
    ids: Tensor
    values: Tensor


def measure_logprobs(logits: Tensor, tokens: Tensor, most: int) -> MeasuredLogprobs:
    """Of int64 `tokens` [S] by float32 `logits` [S, vocabulary]."""
    total = _total(logits)
    chosen = logits.gather(-1, tokens.unsqueeze(-1)) - total
    values, ids = logits.topk(min(most, logits.shape[-1]))
    return MeasuredLogprobs(chosen.squeeze(-1), ids, values - total)


def _total(logits: Tensor) -> Tensor:
    """The logarithm of the sum of each row's exponentials, [S, 1]."""
    if len(logits) == 1:
        # Torch shares the sum of a row that is alone among its threads, and rounds otherwise than in company.
        return logits.repeat(2, 1).logsumexp(-1, keepdim=True)[:1]
    return logits.logsumexp(-1, keepdim=True)


def top_logprobs(logits: Tensor, tokens: Tensor, wanted: Mapping[int, int]) -> tuple[Logprobs | None, ...]:
    """For each of the S chosen `tokens` [S] from `logits` [S, vocabulary], None where the place is not in `wanted`:
    place -> how many of the likeliest tokens to name. Empty if nobody wants any."""
    if not wanted:
        return ()
    places = torch.from_numpy(np.fromiter(wanted, np.int64)).to(logits.device)
    measured = measure_logprobs(logits[places].float(), tokens[places], max(wanted.values()))
    columns = (column.tolist() for column in measured)
    found: list[Logprobs | None] = [None] * len(tokens)
    for (place, most), own, top, theirs in zip(wanted.items(), *columns, strict=True):
        found[place] = Logprobs(own, top[:most], theirs[:most])
    return tuple(found)
