"""The prompts that hold a row and are not yet computed to their end, in the order in which they go on."""

from collections.abc import Sequence as Line
from itertools import chain, islice
from math import inf
from typing import NamedTuple

from .prefill_budget import LINE_LENGTH, WaitingPrompt
from .running_set import RunningSet
from .sequence import Sequence
from .waiting_queue import Fairness


class PendingPrefill(NamedTuple):
    """A half-computed prompt and the tokens it lacks; tuples compare in the order in which prompts go on."""

    urgency: int
    service: float
    rank: int
    arrival_number: int
    row: int
    missing_tokens: int
    sequence: Sequence


def half_computed(rows: RunningSet, fairness: Fairness, step: int) -> tuple[list[PendingPrefill], list[PendingPrefill]]:
    """The pending prompts, short ones and long ones, that may be in a plan now; the next one to go on is the last."""
    full = rows.full_rows()
    prefilling = [row for row in rows.prefilling if full is None or not full[row]]
    several = len({rows.sequences[row].tenant_slot for row in prefilling}) > 1  # else rank alone decides
    prefills: list[PendingPrefill] = []
    for row in prefilling:
        sequence, missing = rows.sequences[row], int(rows.known[row] - rows.scheduled[row])
        key = fairness.fair_share_key(sequence, step) if several else (0, 0.0)
        rank = sequence.seniority + missing // fairness.step_tokens
        prefills.append(PendingPrefill(*key, rank, sequence.arrival_number, row, missing, sequence))
    prefills.sort(reverse=True)
    lanes: tuple[list[PendingPrefill], list[PendingPrefill]] = [], []
    for pending in prefills:
        lanes[pending.sequence.long_prompt].append(pending)
    return lanes


def waiting_line(
    rows: RunningSet, prefills: Line[PendingPrefill], waiting: Line[Sequence], clock: float
) -> list[WaitingPrompt]:
    """The first prompts that wait for their first token: of the half-computed ones, then of those without a row."""
    line = list[WaitingPrompt]()
    pending = ((prefill.sequence, int(rows.scheduled[prefill.row])) for prefill in prefills)
    others = ((sequence, sequence.shared) for sequence in waiting)
    for sequence, computed in islice(chain(pending, others), LINE_LENGTH):
        target = sequence.target_ttft
        if target != inf and not sequence.outputs:
            waited = clock - sequence.arrived_at
            line.append(WaitingPrompt(sequence.known - computed, computed, waited, target))
    return line
