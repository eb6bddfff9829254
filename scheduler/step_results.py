"""What a step's result makes of the rows that ran: new tokens, sequences that end, and counters that move."""

from collections.abc import Mapping
from itertools import compress

import numpy as np

from .plan import IntArray, StepResult, StepUpdates
from .running_set import UNLIMITED, InFlightStep, RunningSet


def process_result(
    rows: RunningSet, flight: InFlightStep, result: StepResult, rejected: Mapping[int, int]
) -> StepUpdates:
    """Take the tokens of `flight`'s result into the rows, settle their counters, and say what is new. `rejected`: how
    many of its drafts were not right, by row.

    Raises:
        RuntimeError: the result does not continue what is known.
    """
    places, kept = result.rows.astype(np.intp), result.counts
    known = rows.known[places]
    # Lists are compared in a third of the time that numpy takes for two arrays.
    if result.offsets.tolist() != known.tolist() and (result.offsets != known)[~rows.ended[places]].any():
        raise RuntimeError(f"step {flight.step}: a row's tokens do not begin where the known ones end")
    ran = result.rows.tolist()
    counts = result.counts.tolist()
    tokens = result.tokens.tolist()
    one_each = len(tokens) == len(ran) and 0 not in counts
    owners = ran if one_each else result.rows.repeat(result.counts).tolist()  # the row of each token
    logprobs = result.logprobs
    keys = rows.keys
    stops = rows.stops
    outputs = rows.outputs
    stop_tokens = [at for at, (row, token) in enumerate(zip(owners, tokens, strict=True)) if token in stops[row]]
    finished: list[tuple[int, str]] = []
    rows.min_remaining -= max(counts, default=0)
    may_end = rows.min_remaining <= 0
    if may_end or stop_tokens or result.ending or rows.releasing or 0 in counts:
        kept, finished = _truncate_at_ends(rows, result, known, stop_tokens)
        keeps = [at < limit for limit, count in zip(kept.tolist(), counts, strict=True) for at in range(count)]
        owners, tokens, logprobs = (list(compress(column, keeps)) for column in (owners, tokens, logprobs))
        ran, counts = list(compress(ran, kept)), [count for count in kept.tolist() if count]
    rows.known[places] = known + kept
    if may_end:  # the least that is still to come to a row, but to those whose last token came
        remaining = (rows.token_limit - rows.known)[rows.running]
        rows.min_remaining = int(remaining[remaining > 0].min(initial=UNLIMITED))
    for row, token in zip(owners, tokens, strict=True):
        outputs[row].append(token)
    if rows.awaiting_results or rejected or owners != flight.sampled_rows:
        _reconcile(rows, flight, result, kept, rejected)
    else:
        rows.computed[flight.rows] = flight.scheduled_ends
    started, rows.started = rows.started, []
    live = [(row, scores) for row, scores in result.prompt_logprobs if not rows.ended[row]]
    scored = [(keys[row], rows.sequences[row].take_prompt_logprobs(scores)) for row, scores in live]
    fresh = [(key, scores) for key, scores in scored if scores]
    return StepUpdates([keys[row] for row in ran], counts, tokens, started, finished, logprobs, fresh)


def _truncate_at_ends(
    rows: RunningSet, result: StepResult, known: IntArray, stop_tokens: list[int]
) -> tuple[IntArray, list[tuple[int, str]]]:
    """How many tokens of each result row count; and (key, reason) of sequences that end with them, stopped ones first.
    `stop_tokens`: which tokens of the result are stop tokens of their rows."""
    room: IntArray = rows.token_limit[result.rows] - known
    room[rows.ended[result.rows]] = 0
    kept, ends = np.minimum(result.counts, room), np.cumsum(result.counts)
    stopped: set[int] = set()
    for index in stop_tokens:
        place = int(np.searchsorted(ends, index, "right"))
        length = index - int(ends[place] - result.counts[place]) + 1
        if length <= kept[place]:
            kept[place] = length
            stopped.add(place)
    for place, row in enumerate(result.rows.tolist() if result.ending else ()):
        if row in result.ending and kept[place] == result.counts[place]:
            stopped.add(place)
    full = [place for place in ((kept == room) & (kept > 0)).nonzero()[0].tolist() if place not in stopped]
    finished = [*((place, "stop") for place in sorted(stopped)), *((place, "length") for place in full)]
    return kept, [(rows.keys[result.rows[place]], reason) for place, reason in finished]


def _reconcile(
    rows: RunningSet, flight: InFlightStep, result: StepResult, kept: IntArray, rejected: Mapping[int, int]
) -> None:
    """Move the counters of all rows that ran, where not all brought the one token a sample that later plans count on.

    Such a row waits for those plans, and continues from what is computed: less than planned where drafts were rejected,
    or tokens did not come; always without the newest known token, which has to run (again).
    """
    ran = flight.rows
    surplus = np.zeros(rows.size, np.int32)
    ends = flight.scheduled_ends
    surplus[result.rows] = kept
    np.subtract.at(surplus, flight.sampled_rows, 1)
    rows.expected[ran] += surplus[ran]
    if rejected:
        ends = ends - np.array([rejected.get(row, 0) for row in ran.tolist()], np.int32)
    rows.computed[ran] = np.minimum(ends, rows.known[ran] - 1)
    rows.await_results([*ran[surplus[ran] != 0].tolist(), *rejected])
