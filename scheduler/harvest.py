"""What a step's result means for the rows that ran: which tokens count, who ends, how far each row is computed."""

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from ..core.logprobs import Logprobs, Scores
from .draft import Flight
from .plan import IntArray, StepResult
from .rows import BoolArray, Rows


class Harvest(NamedTuple):
    """`counts[i]` new tokens for `rows[i]`, `tokens` their concatenation; rows without one are left out.
    `finished`: (row, finish reason). `logprobs`: as in StepResult. `scores`: (row, of the prompt's next tokens)."""

    rows: list[int]
    counts: list[int]
    tokens: list[int]
    finished: list[tuple[int, str]]
    logprobs: Sequence[Logprobs | None]
    scores: list[tuple[int, Scores]]


def harvest(rows: Rows, flight: Flight, result: StepResult) -> Harvest:
    """Take the tokens of `flight`'s result into the rows and settle their counters.

    Raises:
        RuntimeError: the result does not continue what is known.
    """
    heard = ~rows.ended[result.rows]
    if (result.offsets != rows.known[result.rows])[heard].any():
        raise RuntimeError(f"step {flight.step}: a row's tokens do not begin where the known ones end")
    kept, stopped = _cut(rows, result)
    gathered = _gather(rows, result, kept, stopped)
    _settle(rows, flight, result)
    return gathered


def _cut(rows: Rows, result: StepResult) -> tuple[IntArray, set[int]]:
    """Tokens of each result row that count, and the places of those that end with a stop token."""
    kept = np.minimum(result.counts, rows.limit[result.rows] - rows.known[result.rows])
    kept[rows.ended[result.rows]] = 0
    places = np.repeat(np.arange(len(result.rows)), result.counts)
    begins = np.cumsum(result.counts) - result.counts
    stops, stopped = rows.stops, set[int]()
    ran = enumerate(zip(result.rows[places].tolist(), result.tokens.tolist(), strict=True))
    for index in [index for index, (row, token) in ran if token in stops[row]]:
        place = int(places[index])
        length = index - int(begins[place]) + 1
        if length <= kept[place]:
            kept[place] = length
            stopped.add(place)
    return kept, stopped


def _gather(rows: Rows, result: StepResult, kept: IntArray, stopped: set[int]) -> Harvest:
    """Append the kept tokens to their sequences."""
    keeps = _keeps(result, kept)
    outputs, tokens = rows.outputs, result.tokens[keeps].tolist()
    for row, token in zip(np.repeat(result.rows, kept).tolist(), tokens, strict=True):
        outputs[row].append(token)
    rows.known[result.rows] += kept
    full = (rows.known[result.rows] == rows.limit[result.rows]) & (kept > 0)
    finished = [(int(result.rows[place]), "stop") for place in sorted(stopped)]
    finished += [(int(result.rows[place]), "length") for place in np.flatnonzero(full) if place not in stopped]
    got = kept > 0
    logprobs = list(compress(result.logprobs, keeps))
    return Harvest(result.rows[got].tolist(), kept[got].tolist(), tokens, finished, logprobs, _scores(rows, result))


def _scores(rows: Rows, result: StepResult) -> list[tuple[int, Scores]]:
    """What is new of the result's, of rows that still want it."""
    taken = [(row, rows.sequences[row].take(scores)) for row, scores in result.scores if not rows.ended[row]]
    return [(row, fresh) for row, fresh in taken if fresh]


def _keeps(result: StepResult, kept: IntArray) -> BoolArray:
    """Which tokens are among the first `kept[i]` of their row's."""
    within = np.arange(len(result.tokens)) - np.repeat(np.cumsum(result.counts) - result.counts, result.counts)
    keeps: BoolArray = within < np.repeat(kept, result.counts)
    return keeps


def _settle(rows: Rows, flight: Flight, result: StepResult) -> None:
    """Move the counters of all rows that ran.

    Plans made ahead expect one token a sample. A row that got another number is held until all of them are back, and
    continues from what is computed: less than planned where tokens did not come (a rejected draft, say), and in any
    case without the newest known token, which has to run, again if it brought no successor.
    """
    ran = flight.rows
    got = np.zeros(rows.size, np.int32)
    got[result.rows] = result.counts
    rows.in_flight[ran] -= 1
    rows.pending[ran] -= flight.samples
    rows.computed[ran] = np.minimum(flight.ends, rows.known[ran] - 1)
    landed = rows.in_flight[ran] == 0
    rows.held[ran] = (rows.held[ran] | (got[ran] != flight.samples)) & ~landed
    rows.scheduled[ran[landed]] = rows.computed[ran[landed]]
