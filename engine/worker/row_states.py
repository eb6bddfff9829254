"""What an executor remembers of each row between steps: token ids, block table, what it asked of the sampler.

Plans are differences; this is what they are differences to. Token ids and tables live on the device, so that a
token sampled there can be computed on in the next step before the host has heard of it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.plan import IntArray, LongArray, NewSequence, StepPlan
from ..step_batch import (
    SAMPLING_COLUMNS,
    SAMPLING_DTYPE,
    SampledTokens,
    SamplingArray,
    StepBatch,
    gather_entries,
    to_device,
)
from .counter_random import as_signed64
from .logits_processors import LogitsProcessors
from .prompt_logprobs import PromptLogprobRequest, PromptLogprobRequests, StepPromptLogprobs, expand_spans
from .sampler import is_greedy


class StepInputs(NamedTuple):
    """One step: its tokens, and where samples are taken.

    `last` [S] are the packed places whose hidden states give the next token, `rows` [S] the rows they belong to,
    `positions` [S] those of the next tokens. `choices` [S]: None, all are greedy. `shaped`: the places in `rows` whose
    logits are to be changed; `logprobs`: those that want some, and how many. `scored`: tokens of prompts that want
    theirs, if there are any.
    """

    batch: StepBatch
    sample_places: Tensor
    rows: IntArray
    positions: IntArray
    sampling: SamplingArray | None
    processed: LongArray
    logprobs: Mapping[int, int]
    prompt_logprobs: StepPromptLogprobs | None

    def sampled_tokens(self) -> SampledTokens | None:
        """Where tokens go that are chosen from the logits as they are; None: somebody wants these changed, or told."""
        if self.prompt_logprobs is not None or len(self.processed) or self.logprobs:
            return None
        return SampledTokens(np.empty(len(self.rows), np.int32), self.sampling)


class RowStates:
    """Persistent rows, as many as the scheduler uses."""

    def __init__(self, max_tokens: int, block_size: int, device: torch.device) -> None:
        """`max_tokens`: the longest sequence; one more fits, sampled at the very end and never computed."""
        self._device, self._block_size = device, block_size
        self._width = (max_tokens + 1, -(-max_tokens // block_size))
        self.clear()

    def clear(self) -> None:
        """Forget every row."""
        self._tokens = torch.empty((0, self._width[0]), dtype=torch.int32, device=self._device)
        self._tables = torch.empty((0, self._width[1]), dtype=torch.int64, device=self._device)
        self._blocks: LongArray = np.zeros(0, dtype=np.int64)
        self._sampling: SamplingArray = np.zeros(0, dtype=SAMPLING_DTYPE)
        self._shapes = LogitsProcessors(self._device)
        self._drawing: set[int] = set()
        self._logprobs: dict[int, int] = {}
        self._scored = PromptLogprobRequests()

    def apply_plan(self, plan: StepPlan) -> None:
        """Apply what changed since the last plan."""
        if len(plan.closed):
            self._blocks[plan.closed] = 0
            self._forget(plan.closed.tolist())
        for sequence in plan.new:
            self._enter(sequence)
        if len(plan.appended):
            self._append(plan.appended.astype(np.int64))

    def has_room_for(self, plan: StepPlan) -> bool:
        """Whether `update` leaves the tables of token and block ids where they are."""
        return all(sequence.row < len(self._blocks) for sequence in plan.new)

    def gather_inputs(self, plan: StepPlan) -> StepInputs:
        """Gather the step's numbers out of the rows.

        Raises:
            IndexError: a row of the plan was never entered.
        """
        if (last := max(plan.rows.tolist())) >= len(self._blocks):
            raise IndexError(f"the plan names row {last}, of {len(self._blocks)}")
        batch = StepBatch(plan.rows, plan.starts, plan.counts, self._tokens, self._tables, self._block_size)
        ends = plan.starts + plan.counts
        rows, positions = plan.rows[plan.samples], ends[plan.samples]
        return StepInputs(
            batch,
            to_device((batch.first_places + plan.counts - 1)[plan.samples], self._device),
            rows,
            positions,
            self._choices(rows, positions),
            self._shapes.processed_places(rows),
            self._wanted(rows),
            self._to_score(plan),
        )

    def process_logits(self, inputs: StepInputs, logits: Tensor) -> None:
        """Change the float32 `logits` of `inputs.shaped` in place, as their rows ask."""
        rows, positions = (each[inputs.processed].astype(np.int64) for each in (inputs.rows, inputs.positions))
        self._shapes.apply(logits, rows, positions, self._tokens)

    def store_sampled(self, inputs: StepInputs, tokens: Tensor) -> None:
        """Store the sampled `tokens` [S] behind what their rows know."""
        self._keep(inputs.rows, inputs.positions, tokens)

    def store_remote_tokens(self, rows: IntArray, positions: IntArray, tokens: IntArray) -> None:
        """Store `tokens` [S] that were sampled elsewhere, at `positions` [S] of `rows` [S]."""
        self._keep(rows, positions, to_device(tokens, self._device))

    def _enter(self, sequence: NewSequence) -> None:
        row = sequence.row
        self._grow(row + 1)
        self._blocks[row] = 0
        self._forget([row])
        self._tokens[row, : len(sequence.tokens)] = self._to(sequence.tokens.astype(np.int32))
        asked = sequence.sampling
        numbers = asked._replace(top_k=max(asked.top_k, 0), seed=as_signed64(asked.seed))
        self._sampling[row] = (*(getattr(numbers, name) for name in SAMPLING_COLUMNS), 0)
        if not is_greedy(asked):
            self._drawing.add(row)
        if asked.logits is not None:
            self._shapes.add_row(row, sequence.prompt, asked.logits)
        if asked.logprobs is not None:
            self._logprobs[row] = asked.logprobs
        if asked.prompt_logprobs is not None:
            self._scored.add_row(row, PromptLogprobRequest(sequence.prompt, asked.prompt_logprobs))

    def _forget(self, rows: Iterable[int]) -> None:
        """What left asks for nothing more: a step without wishes looks for none."""
        for row in rows:
            self._drawing.discard(row)
            self._logprobs.pop(row, None)
            self._shapes.remove_row(row)
            self._scored.remove_row(row)

    def _append(self, appended: LongArray) -> None:
        rows, blocks = appended[:, 0], appended[:, 1]
        places = self._blocks[rows] + _occurrence(rows)
        self._tables[self._to(rows), self._to(places)] = self._to(blocks)
        np.add.at(self._blocks, rows, 1)

    def _choices(self, rows: IntArray, positions: IntArray) -> SamplingArray | None:
        if not self._drawing:
            return None
        choices = self._sampling[rows]
        choices["position"] = positions
        return choices

    def _wanted(self, rows: IntArray) -> Mapping[int, int]:
        if not self._logprobs:
            return {}
        return {place: self._logprobs[row] for place, row in enumerate(rows.tolist()) if row in self._logprobs}

    def _to_score(self, plan: StepPlan) -> StepPromptLogprobs | None:
        stretches = self._scored.spans_in(plan)
        if not stretches:
            return None
        rows, positions, places = expand_spans(stretches)
        return StepPromptLogprobs(stretches, self._to(places), gather_entries(self._tokens, rows, positions).long())

    def _grow(self, rows: int) -> None:
        have = len(self._blocks)
        if rows <= have:
            return
        more = max(rows, 2 * have) - have
        self._blocks = np.concatenate([self._blocks, np.zeros(more, dtype=np.int64)])
        self._sampling = np.concatenate([self._sampling, np.zeros(more, dtype=SAMPLING_DTYPE)])
        self._tokens = torch.cat([self._tokens, self._tokens.new_zeros((more, self._width[0]))])
        self._tables = torch.cat([self._tables, self._tables.new_zeros((more, self._width[1]))])

    def _keep(self, rows: IntArray, positions: IntArray, tokens: Tensor) -> None:
        """`tokens` [S] behind what their rows know."""
        if self._device.type == "cpu":
            self._tokens.numpy()[rows, positions] = tokens.numpy()
        else:
            at = (to_device(column.astype(np.int64), self._device) for column in (rows, positions))
            self._tokens[tuple(at)] = tokens.to(torch.int32)

    def _to(self, column: NDArray[np.signedinteger[Any]]) -> Tensor:
        return to_device(column, self._device)


def _occurrence(rows: LongArray) -> LongArray:
    """How many equal entries stand before each one."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    seen = np.empty_like(rows)
    seen[order] = np.arange(len(rows)) - np.searchsorted(ordered, ordered)
    return seen
