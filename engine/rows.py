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

from ..scheduler.plan import IntArray, NewSequence, StepPlan
from .attention.base import Batch
from .random import signed
from .sampling import CHOICE, Choices
from .scoring import Scored, Wish, Wishes, spread
from .shaping import Shapes

LongArray = NDArray[np.int64]


class Inputs(NamedTuple):
    """One step, packed: ids [N] on the device, what attention needs, and where the samples are taken.

    `last` [S] are the packed places whose hidden states give the next token, `rows` [S] the rows they belong to.
    `shaped`: the places in `rows` whose logits are to be changed; `logprobs`: those that want some, and how many.
    `scored`: tokens of prompts that want theirs, if there are any.
    """

    tokens: Tensor
    batch: Batch
    last: Tensor
    rows: LongArray
    choices: Choices
    shaped: LongArray
    logprobs: Mapping[int, int]
    scored: Scored | None


class Rows:
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
        self._sampling: Choices = np.zeros(0, dtype=CHOICE)
        self._shapes = Shapes(self._device)
        self._logprobs: dict[int, int] = {}
        self._scored = Wishes()

    def update(self, plan: StepPlan) -> None:
        """Apply what changed since the last plan; `plan.copies` is the cache's business."""
        self._blocks[plan.closed] = 0
        self._forget(plan.closed.tolist())
        for sequence in plan.new:
            self._enter(sequence)
        if len(plan.appended):
            self._append(plan.appended.astype(np.int64))

    def inputs(self, plan: StepPlan) -> Inputs:
        """Gather the step's tokens and numbers out of the rows."""
        rows, starts, counts = (column.astype(np.int64) for column in (plan.rows, plan.starts, plan.counts))
        ends = counts.cumsum()
        owners = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
        samples = np.flatnonzero(plan.samples)
        blocks = -(-int((starts + counts).max()) // self._block_size)
        return Inputs(
            self._picked(self._tokens, (rows[owners], positions)),
            Batch(
                starts, counts, self._picked(self._tables, (rows,))[:, :blocks], self._to(positions), self._to(owners)
            ),
            self._to(ends[samples] - 1),
            rows[samples],
            self._choices(rows[samples], (starts + counts)[samples]),
            self._shapes.places(rows[samples]),
            self._wanted(rows[samples]),
            self._to_score(plan),
        )

    def shape(self, inputs: Inputs, logits: Tensor) -> None:
        """Change the float32 `logits` of `inputs.shaped` in place, as their rows ask."""
        places = inputs.shaped
        self._shapes.apply(logits, inputs.rows[places], inputs.choices["position"][places], self._tokens)

    def write(self, inputs: Inputs, tokens: Tensor) -> None:
        """Store the sampled `tokens` [S] behind what their rows know."""
        self._keep(inputs.rows, inputs.choices["position"], tokens.to(torch.int32))

    def learn(self, rows: IntArray, positions: IntArray, tokens: IntArray) -> None:
        """Store `tokens` [S] that were sampled elsewhere, at `positions` [S] of `rows` [S]."""
        self._keep(rows.astype(np.int64), positions.astype(np.int64), self._to(tokens.astype(np.int32)))

    def _enter(self, sequence: NewSequence) -> None:
        row = sequence.row
        self._grow(row + 1)
        self._blocks[row] = 0
        self._forget([row])
        self._tokens[row, : len(sequence.tokens)] = self._to(sequence.tokens.astype(np.int32))
        asked = sequence.sampling
        top_k, seed = max(asked.top_k, 0), signed(asked.seed)
        self._sampling[row] = (asked.temperature, top_k, asked.top_p, asked.min_p, seed, asked.choice, 0)
        if asked.shaping is not None:
            self._shapes.enter(row, sequence.prompt, asked.shaping)
        if asked.logprobs is not None:
            self._logprobs[row] = asked.logprobs
        if asked.prompt_logprobs is not None:
            self._scored.enter(row, Wish(sequence.prompt, asked.prompt_logprobs))

    def _forget(self, rows: Iterable[int]) -> None:
        """What left asks for nothing more: a step without wishes looks for none."""
        for row in rows:
            self._logprobs.pop(row, None)
            self._shapes.leave(row)
            self._scored.leave(row)

    def _append(self, appended: LongArray) -> None:
        rows, blocks = appended[:, 0], appended[:, 1]
        places = self._blocks[rows] + _occurrence(rows)
        self._tables[self._to(rows), self._to(places)] = self._to(blocks)
        np.add.at(self._blocks, rows, 1)

    def _choices(self, rows: LongArray, positions: LongArray) -> Choices:
        choices = self._sampling[rows]
        choices["position"] = positions
        return choices

    def _wanted(self, rows: LongArray) -> Mapping[int, int]:
        if not self._logprobs:
            return {}
        return {place: self._logprobs[row] for place, row in enumerate(rows.tolist()) if row in self._logprobs}

    def _to_score(self, plan: StepPlan) -> Scored | None:
        stretches = self._scored.stretches(plan)
        if not stretches:
            return None
        rows, positions, places = spread(stretches)
        return Scored(stretches, self._to(places), self._picked(self._tokens, (rows, positions)).long())

    def _grow(self, rows: int) -> None:
        have = len(self._blocks)
        if rows <= have:
            return
        more = max(rows, 2 * have) - have
        self._blocks = np.concatenate([self._blocks, np.zeros(more, dtype=np.int64)])
        self._sampling = np.concatenate([self._sampling, np.zeros(more, dtype=CHOICE)])
        self._tokens = torch.cat([self._tokens, self._tokens.new_zeros((more, self._width[0]))])
        self._tables = torch.cat([self._tables, self._tables.new_zeros((more, self._width[1]))])

    def _picked(self, table: Tensor, at: tuple[LongArray, ...]) -> Tensor:
        """table[at]; on the CPU by numpy, which begins sooner than torch."""
        if self._device.type == "cpu":
            return torch.from_numpy(table.numpy()[at])
        return table[tuple(self._to(column) for column in at)]

    def _keep(self, rows: LongArray, positions: LongArray, tokens: Tensor) -> None:
        """int32 `tokens` [S] behind what their rows know."""
        if self._device.type == "cpu":
            self._tokens.numpy()[rows, positions] = tokens.numpy()
        else:
            self._tokens[self._to(rows), self._to(positions)] = tokens

    def _to(self, column: NDArray[np.signedinteger[Any]]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(column))
        return tensor if self._device.type == "cpu" else tensor.to(self._device)


def _occurrence(rows: LongArray) -> LongArray:
    """How many equal entries stand before each one."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    seen = np.empty_like(rows)
    seen[order] = np.arange(len(rows)) - np.searchsorted(ordered, ordered)
    return seen
