"""What the model itself gave the tokens that were chosen, for the rows that want to know.

Of the logits as the model made them: penalties, bans and temperature do not show. Knows nothing of rows.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ..core.request import Logprobs


def top_logprobs(logits: Tensor, tokens: Tensor, wanted: Mapping[int, int]) -> tuple[Logprobs | None, ...]:
    """For each of the S chosen `tokens` [S] from `logits` [S, vocabulary], None where the place is not in `wanted`:
    place -> how many of the likeliest tokens to name. Empty if nobody wants any."""
    if not wanted:
        return ()
    places = torch.from_numpy(np.fromiter(wanted, np.int64)).to(logits.device)
    rows = logits[places].float()
    total = rows.logsumexp(-1, keepdim=True)
    chosen = rows.gather(-1, tokens[places].unsqueeze(-1)) - total
    values, ids = rows.topk(min(max(wanted.values()), rows.shape[-1]))
    columns = (chosen.squeeze(-1).tolist(), ids.tolist(), (values - total).tolist())
    found: list[Logprobs | None] = [None] * len(tokens)
    for (place, most), own, top, theirs in zip(wanted.items(), *columns, strict=True):
        found[place] = Logprobs(own, top[:most], theirs[:most])
    return tuple(found)
