"""Which of a step's samples count: those at drafts only while every draft before was what was sampled."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...scheduler.plan import IntArray, LongArray, StepPlan


def end_ranges(lasts: LongArray | IntArray, lengths: LongArray | IntArray) -> LongArray:
    """The numbers up to and with each of `lasts`, `lengths` of them, one range after the other."""
    ranges: LongArray = np.repeat(lasts + 1 - np.cumsum(lengths), lengths) + np.arange(int(lengths.sum()))
    return ranges


class VerifiedSamples(NamedTuple):
    """Rows that were sampled, the position of the first token of each, how many there are, and which of all S samples
    they are."""

    rows: IntArray
    offsets: IntArray
    counts: IntArray
    kept: NDArray[np.bool_]


def verify_samples(plan: StepPlan, tokens: IntArray) -> VerifiedSamples:
    """Hold the samples of a plan with drafts, int32 [S] row after row, against them."""
    # Of few numbers Python's lists are compared sooner than numpy's arrays, and of many hardly later.
    sampled, drafted = tokens.tolist(), plan.drafted.tolist()
    counts, kept = list[int](), list[bool]()
    first = draft = 0
    for length in plan.drafts[plan.samples].tolist():
        right = 0
        while right < length and sampled[first + right] == drafted[draft + right]:
            right += 1
        counts.append(right + 1)
        kept += [True] * (right + 1) + [False] * (length - right)
        first, draft = first + length + 1, draft + length
    offsets = (plan.starts + plan.counts - plan.drafts)[plan.samples]
    return VerifiedSamples(plan.rows[plan.samples], offsets, np.array(counts, np.int32), np.array(kept, np.bool_))
