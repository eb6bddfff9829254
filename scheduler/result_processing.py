"""A step's result in the rows that ran: which tokens count, which sequences end, how far each row is computed."""

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from ..core.logprobs import Logprobs, PromptLogprobs
from .plan import IntArray, StepResult
from .running_set import InFlightStep, RunningSet


class ProcessedResult(NamedTuple):
    """`counts[i]` new tokens for `rows[i]`, `tokens` their concatenation; rows without one are left out.
    `finished`: (row, finish reason). `logprobs`: as in StepResult. `prompt_logprobs`: (row, those of the prompt's next
    tokens)."""

    rows: list[int]
    counts: list[int]
    tokens: list[int]
    finished: list[tuple[int, str]]
    logprobs: Sequence[Logprobs | None]
    prompt_logprobs: Sequence[tuple[int, PromptLogprobs]]


def process_result(rows: RunningSet, in_flight_step: InFlightStep, result: StepResult) -> ProcessedResult:
    """Take the tokens of `in_flight_step`'s result into the rows and settle their counters.

    Raises:
        RuntimeError: the result does not continue what is known.
    """
    places, kept = result.rows.astype(np.intp), result.counts
    known = rows.known[places]
    # Lists are compared in a third of the time that numpy takes for two arrays.
    if result.offsets.tolist() != known.tolist() and (result.offsets != known)[~rows.ended[places]].any():
        raise RuntimeError(f"step {in_flight_step.step}: a row's tokens do not begin where the known ones end")
    ran, counts, tokens, logprobs = (
        result.rows.tolist(),
        result.counts.tolist(),
        result.tokens.tolist(),
        result.logprobs,
    )
    one_each = len(tokens) == len(ran) and 0 not in counts
    owners = ran if one_each else result.rows.repeat(result.counts).tolist()  # the row of each token
    stops = rows.stops
    stop_tokens = [at for at, (row, token) in enumerate(zip(owners, tokens, strict=True)) if token in stops[row]]
    finished = list[tuple[int, str]]()
    rows.min_remaining -= max(counts, default=0)
    may_end = rows.min_remaining <= 0
    if may_end or stop_tokens or rows.releasing or 0 in counts:
        kept, finished = _truncate_at_ends(rows, result, known, stop_tokens)
        keeps = [at < limit for limit, count in zip(kept.tolist(), counts, strict=True) for at in range(count)]
        owners, tokens, logprobs = (list(compress(column, keeps)) for column in (owners, tokens, logprobs))
        ran, counts = list(compress(ran, kept)), [count for count in kept.tolist() if count]
    rows.known[places] = known + kept
    if may_end:
        rows.measure_min_remaining()
    outputs = rows.outputs
    for row, token in zip(owners, tokens, strict=True):
        outputs[row].append(token)
    if rows.awaiting_results or owners != in_flight_step.sampled_rows:
        _reconcile(rows, in_flight_step, result, kept)
    else:
        rows.computed[in_flight_step.rows] = in_flight_step.scheduled_ends
    scored = [
        (row, rows.sequences[row].take_prompt_logprobs(s)) for row, s in result.prompt_logprobs if not rows.ended[row]
    ]
    return ProcessedResult(ran, counts, tokens, finished, logprobs, [each for each in scored if each[1]])


def _truncate_at_ends(
    rows: RunningSet, result: StepResult, known: IntArray, stop_tokens: list[int]
) -> tuple[IntArray, list[tuple[int, str]]]:
    """How many tokens of each result row count; and the rows that end with them, with the reason, stopped ones first.
    `stop_tokens`: which tokens of the result are stop tokens of their rows."""
    room: IntArray = rows.token_limit[result.rows] - known
    room[rows.ended[result.rows]] = 0
    kept, ends = np.minimum(result.counts, room), np.cumsum(result.counts)
    stopped = set[int]()
    for index in stop_tokens:
        place = int(np.searchsorted(ends, index, "right"))
        length = index - int(ends[place] - result.counts[place]) + 1
        if length <= kept[place]:
            kept[place] = length
            stopped.add(place)
    full = [place for place in ((kept == room) & (kept > 0)).nonzero()[0].tolist() if place not in stopped]
    finished = [*((place, "stop") for place in sorted(stopped)), *((place, "length") for place in full)]
    return kept, [(int(result.rows[place]), reason) for place, reason in finished]


def _reconcile(rows: RunningSet, in_flight_step: InFlightStep, result: StepResult, kept: IntArray) -> None:
    """Move the counters of all rows that ran, where not all brought what later plans count on.

    Plans made ahead expect one token a sample. A row that got another number waits until all of them are back, and
    continues from what is computed: less than planned where tokens did not come (a rejected draft, say), and in any
    case without the newest known token, which has to run, again if it brought no successor.
    """
    ran, surplus = in_flight_step.rows, np.zeros(rows.size, np.int32)
    surplus[result.rows] = kept
    surplus[in_flight_step.sampled_rows] -= 1
    rows.expected[ran] += surplus[ran]
    rows.computed[ran] = np.minimum(in_flight_step.scheduled_ends, rows.known[ran] - 1)
    for row in ran[surplus[ran] != 0].tolist():
        rows.await_results(row)
    rows.resume_settled()
