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
    drafts = plan.drafts[plan.samples]
    ends = np.cumsum(drafts + 1)
    guessed = np.ones(len(tokens), np.bool_)
    guessed[ends - 1] = False  # the last sample of each row is held against nothing
    wrong = np.zeros(len(tokens), np.int64)
    wrong[guessed] = tokens[guessed] != plan.drafted
    before = np.cumsum(wrong) - wrong
    firsts = ends - drafts - 1
    kept = before == np.repeat(before[firsts], drafts + 1)
    counts = np.add.reduceat(kept, firsts, dtype=np.int32)
    return VerifiedSamples(
        plan.rows[plan.samples], (plan.starts + plan.counts - plan.drafts)[plan.samples], counts, kept
    )
