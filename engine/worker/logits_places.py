"""Where in a step logits are wanted: for rows that sample, for their drafts, and within prompts that are scored."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from ...scheduler.plan import LongArray, StepPlan
from ..config import LOGITS_PIECE
from ..step_batch import StepBatch, end_ranges, gather_entries, to_device
from .logprobs import PromptSpan, ScoredTokens


def logits_places(
    plan: StepPlan, batch: StepBatch, scoring: Mapping[int, tuple[int, int]], token_ids: Tensor
) -> tuple[LongArray, LongArray | None, ScoredTokens | None]:
    """Packed places whose logits are computed together, those that are sampled (None: all), and scored tokens.
    `scoring`: by row the tokens of a prompt that is scored, and how many likeliest ones to name at each; `token_ids`
    [rows, places] are all that rows have."""
    last: LongArray = batch.first_places + plan.counts - 1
    sampled: LongArray = last[plan.samples]
    if len(plan.drafts):
        sampled = end_ranges(sampled, (plan.drafts + 1)[plan.samples])
    spans: list[PromptSpan] = []
    scored_places: list[LongArray] = []
    for at, row in enumerate(plan.rows.tolist() if scoring else ()):
        if row not in scoring:
            continue
        prompt, top_n = scoring[row]
        start = int(plan.starts[at])
        count = int(plan.counts[at])
        first = int(batch.first_places[at])
        length = min(count, prompt - 1 - start)
        if length > 0 and plan.num_logits[at] == count:
            spans.append(PromptSpan(row, start + 1, length, top_n))
            scored_places.append(np.arange(first, first + length))
    if not spans:
        return sampled, None, None
    places = np.concatenate(scored_places)
    rows = np.repeat([span.row for span in spans], [span.length for span in spans])
    positions = np.concatenate([np.arange(span.first, span.first + span.length) for span in spans])
    tokens = gather_entries(token_ids, rows, positions).long()
    on_device = to_device(places, token_ids.device)
    logits = int(plan.num_logits.sum())
    if logits > LOGITS_PIECE:
        return sampled, None, ScoredTokens(spans, tokens, on_device, None)
    together = end_ranges(last, plan.num_logits)
    scored = ScoredTokens(spans, tokens, on_device, np.searchsorted(together, places))
    return together, np.searchsorted(together, sampled), scored
