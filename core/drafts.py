"""Speculation, as requests ask for it and answers report it."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

MAX_DRAFTS = 32
"""The most tokens that one step may draft for a sequence."""


class DraftLimit(NamedTuple):
    """The most tokens that a step may draft for a sequence; 0 drafts none. `parameter`: the request's, for errors."""

    most: int
    parameter: str = "speculative_k"


DraftReport: TypeAlias = Literal["none", "summary", "detailed"]
"""What the last chunk of a text reports of its drafts: nothing, sums, or every step too."""


class DraftSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The drafts of one text, in the form of vLLM's `metrics.speculative_decoding`. Histograms count steps by accepted
    drafts; steps without drafts are left out.

    Source: https://docs.vllm.ai/en/stable/features/speculative_decoding/acceptance_metrics/
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    """The most drafts that a step may have."""
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


def summarize_drafts(steps: Sequence[tuple[int, int]], most: int, detailed: bool = False) -> DraftSummary:
    """Summarize steps, each a pair of its drafted and its accepted tokens; a step may draft `most`."""
    by_length = {drafted: [0] * (drafted + 1) for drafted in sorted({drafted for drafted, _ in steps})}
    histogram = [0] * (most + 1)
    for drafted, right in steps:
        by_length[drafted][right] += 1
        histogram[right] += 1
    total = sum(drafted for drafted, _ in steps)
    accepted = sum(right for _, right in steps)
    return DraftSummary(
        mean_acceptance_length=1 + accepted / max(len(steps), 1),
        draft_acceptance_rate=accepted / max(total, 1),
        acceptance_histogram=histogram,
        acceptance_histogram_by_draft_length={str(length): counts for length, counts in by_length.items()},
        num_spec_steps=len(steps),
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=total,
        num_spec_tokens=most,
        per_step_accepted=[right for _, right in steps] if detailed else None,
        per_step_drafted=[drafted for drafted, _ in steps] if detailed else None,
    )
