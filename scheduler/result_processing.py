"""What a step's result means for the rows that ran: which tokens count, who ends, how far each row is computed."""

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from ..core.logprobs import Logprobs, PromptLogprobs
from .in_flight import InFlightStep
from .plan import IntArray, StepResult
from .rows import RowTable


class ProcessedResult(NamedTuple):
    """`counts[i]` new tokens for `rows[i]`, `tokens` their concatenation; rows without one are left out.
    `finished`: (row, finish reason). `logprobs`: as in StepResult. `scores`: (row, of the prompt's next tokens)."""

    rows: list[int]
    counts: list[int]
    tokens: list[int]
    finished: list[tuple[int, str]]
    logprobs: Sequence[Logprobs | None]
    prompt_logprobs: Sequence[tuple[int, PromptLogprobs]]


class _RaggedTokens(NamedTuple):
    """`counts[i]` tokens for `rows[i]`; and, token by token, the row of each. `logprobs`: as in StepResult."""

    rows: list[int]
    counts: list[int]
    owners: list[int]
    tokens: list[int]
    logprobs: Sequence[Logprobs | None]

    @classmethod
    def of(cls, result: StepResult) -> "_RaggedTokens":
        rows, counts, tokens = result.rows.tolist(), result.counts.tolist(), result.tokens.tolist()
        one_each = len(tokens) == len(rows) and 0 not in counts
        owners = rows if one_each else result.rows.repeat(result.counts).tolist()
        return cls(rows, counts, owners, tokens, result.logprobs)

    def cut(self, kept: list[int]) -> "_RaggedTokens":
        """Only the first `kept[i]` of each row's; rows without one are left out."""
        keeps = [at < kept[place] for place, count in enumerate(self.counts) for at in range(count)]
        rows, counts = list(compress(self.rows, kept)), [count for count in kept if count]
        owners, tokens = list(compress(self.owners, keeps)), list(compress(self.tokens, keeps))
        return _RaggedTokens(rows, counts, owners, tokens, list(compress(self.logprobs, keeps)))


def process_result(rows: RowTable, flight: InFlightStep, result: StepResult) -> ProcessedResult:
    """Take the tokens of `flight`'s result into the rows and settle their counters.

    Raises:
        RuntimeError: the result does not continue what is known.
    """
    places, kept = result.rows.astype(np.intp), result.counts
    known = rows.known[places]
    _check_offsets(rows, flight, result, known)
    brought, finished = _RaggedTokens.of(result), list[tuple[int, str]]()
    stopping = _find_stop_tokens(rows, brought)
    may_end = rows.consume_remaining(max(brought.counts, default=0))
    if may_end or stopping or rows.releasing or 0 in brought.counts:
        kept, finished = _truncate_at_ends(rows, result, known, stopping)
        brought = brought.cut(kept.tolist())
    rows.known[places] = known + kept
    if may_end:
        rows.measure_min_remaining()
    outputs = rows.outputs
    for row, token in zip(brought.owners, brought.tokens, strict=True):
        outputs[row].append(token)
    if rows.awaiting_results or brought.owners != flight.sampled_rows:
        _reconcile(rows, flight, result, kept)
    else:
        rows.computed[flight.rows] = flight.scheduled_ends
    scores = _new_prompt_logprobs(rows, result) if result.prompt_logprobs else ()
    return ProcessedResult(brought.rows, brought.counts, brought.tokens, finished, brought.logprobs, scores)


def _check_offsets(rows: RowTable, flight: InFlightStep, result: StepResult, known: IntArray) -> None:
    """Lists are compared in a third of the time that numpy takes to say that all of two arrays is equal."""
    if result.offsets.tolist() != known.tolist() and (result.offsets != known)[~rows.ended[result.rows]].any():
        raise RuntimeError(f"step {flight.step}: a row's tokens do not begin where the known ones end")


def _find_stop_tokens(rows: RowTable, brought: _RaggedTokens) -> list[int]:
    """Which tokens are stop tokens."""
    stops, ran = rows.stops, enumerate(zip(brought.owners, brought.tokens, strict=True))
    return [index for index, (row, token) in ran if token in stops[row]]


def _truncate_at_ends(
    rows: RowTable, result: StepResult, known: IntArray, stopping: list[int]
) -> tuple[IntArray, list[tuple[int, str]]]:
    """How many tokens of each result row count; and rows that end with them, and why, stop tokens first. `stopping`:
    which tokens are some."""
    room: IntArray = rows.token_limit[result.rows] - known
    room[rows.ended[result.rows]] = 0
    kept, ends = np.minimum(result.counts, room), np.cumsum(result.counts)
    stopped = set[int]()
    for index in stopping:
        place = int(np.searchsorted(ends, index, "right"))
        length = index - int(ends[place] - result.counts[place]) + 1
        if length <= kept[place]:
            kept[place] = length
            stopped.add(place)
    full = [place for place in ((kept == room) & (kept > 0)).nonzero()[0].tolist() if place not in stopped]
    finished = [*((place, "stop") for place in sorted(stopped)), *((place, "length") for place in full)]
    return kept, [(int(result.rows[place]), reason) for place, reason in finished]


def _new_prompt_logprobs(rows: RowTable, result: StepResult) -> list[tuple[int, PromptLogprobs]]:
    """What is new of the result's, of rows that still want it."""
    taken = [
        (row, rows.sequences[row].take_prompt_logprobs(scores))
        for row, scores in result.prompt_logprobs
        if not rows.ended[row]
    ]
    return [(row, fresh) for row, fresh in taken if fresh]


def _reconcile(rows: RowTable, flight: InFlightStep, result: StepResult, kept: IntArray) -> None:
    """Move the counters of all rows that ran, where not all brought what later plans count on.

    Plans made ahead expect one token a sample. A row that got another number is held until all of them are back, and
    continues from what is computed: less than planned where tokens did not come (a rejected draft, say), and in any
    case without the newest known token, which has to run, again if it brought no successor.
    """
    ran, surplus = flight.rows, np.zeros(rows.size, np.int32)
    surplus[result.rows] = kept
    surplus[flight.sampled_rows] -= 1
    rows.expected[ran] += surplus[ran]
    rows.computed[ran] = np.minimum(flight.scheduled_ends, rows.known[ran] - 1)
    for row in ran[surplus[ran] != 0].tolist():
        rows.await_results(row)
    rows.resume_settled()
