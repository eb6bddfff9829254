"""The model that drafts for a target by going through the same tokens."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from time import perf_counter
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.drafts.proposals import Proposals, proposals_of
from ...scheduler.plan import IntArray, LongArray, StepPlan, StepResult
from ..attention.backend import AttentionBackend
from ..cpu.sampling import forbid_tokens
from ..gpu.graphs import StaticStep
from ..layers.step_context import StepContext
from ..models.interfaces import Decoder
from ..step_batch import HostCopy, SampledTokens, SamplingArray, end_ranges, to_device, upload_columns
from .row_states import RowStates
from .step_drafter import DraftPass, StepDrafter
from .vocabulary_map import VocabularyMap

CATCH_UP_TOKENS = 256
"""Tokens that a step computes with the draft model, beside as many as the target: rows that were not drafted for a
while lack some."""


class DraftLimits(NamedTuple):
    """The longest sequence that a draft model can attend to, and the number of tokens that it knows, where it knows
    fewer than the target has: models of one family may differ in tokens that no text has. `vocabulary`: how its tokens
    become the target's, where they are others."""

    positions: int
    tokens: int | None = None
    vocabulary: VocabularyMap | None = None


class _DraftRow(NamedTuple):
    """A row of a step: `known` tokens, of which `first` to `last` are computed with the draft model; then it proposes
    `most`, if that is all."""

    row: int
    known: int
    first: int
    last: int
    most: int


_NewTokens: TypeAlias = tuple[int, Sequence[int]]
"""The tokens that a step sampled for a row: the position of the first, and all of them."""


def _tokens_by_row(result: StepResult) -> dict[int, _NewTokens]:
    tokens = iter(result.tokens.tolist())
    columns = (column.tolist() for column in (result.rows, result.offsets, result.counts))
    return {row: (offset, [*islice(tokens, count)]) for row, offset, count in zip(*columns, strict=True)}


class DraftModel(StepDrafter):
    """A model of the target's vocabulary, or of one that is mapped to it: then it has tokens of its own, and chooses
    among those that the target has, too. A block that it has computed is found by other rows as the target's is."""

    def __init__(
        self, decoder: Decoder, attention: AttentionBackend, rows: RowStates, limits: DraftLimits, draws: bool = False
    ) -> None:
        super().__init__(decoder, attention, rows, draws)
        self.decoder = decoder
        self._limits = limits
        self._own_tokens = rows.tokens[:0]
        self.longest = limits.positions
        self.forget(0)

    def forget(self, blocks: int) -> None:
        self._full: NDArray[np.bool_] = np.zeros(blocks, np.bool_)  # by block: whether all of it is computed
        self._full_slots: dict[int, bool] = {}  # the same of what is in the host's memory
        self._computed: dict[int, int] = {}  # tokens by row
        self._guessed: dict[int, tuple[int, list[int]]] = {}  # by row: known tokens, and computed proposals after them
        self._unknown: set[int] = set()  # rows with a token that it does not know

    def apply_plan(self, plan: StepPlan) -> None:
        """See `StepDrafter.apply_plan`: blocks that a row does not share are to be computed, and of what comes back
        from the host's memory that which was not when it left."""
        self.follow_copies(plan.block_copies)
        size = self._rows.block_size
        shared = {new.row: new.computed // size for new in plan.new}
        taken = Counter[int]()
        for row, block in plan.appended.tolist():
            number, group = divmod(taken[row], self._rows.groups)
            if not group and number >= shared.get(row, 0):
                self._full[block] = False
            taken[row] += 1
        for row, blocks in shared.items():
            full = self._full[self._rows.blocks_of(row, 0, blocks)]
            self._computed[row] = size * int(blocks if full.all() else full.argmin())
            self._guessed.pop(row, None)
            self._unknown.discard(row)

    def follow_copies(self, copies: IntArray) -> None:
        """See `StepDrafter.follow_copies`."""
        for block, slot, back in copies.tolist():
            if back:
                self._full[block] = self._full_slots.get(slot, False)
            else:
                self._full_slots[slot] = bool(self._full[block])

    def propose(self, plan: StepPlan, result: StepResult) -> Proposals:
        """Compute what the plan's rows with proposals lack; propose for those that lack nothing then, and were sampled,
        as `result` says."""
        began = perf_counter()
        new_tokens = _tokens_by_row(result)
        rows = self._without_unknown([*self._rows_to_compute(plan, new_tokens)], new_tokens)
        if not rows:
            return Proposals()
        sampled = set(result.rows.tolist())
        if self._limits.vocabulary is not None:
            self._translate(rows, self._limits.vocabulary)
        ready = [row for row in rows if row.last == row.known and row.row in sampled]
        spans = np.array([(row.row, row.first, row.last - row.first) for row in rows], np.int32)
        passes = [self._begin(spans, np.array([row in ready for row in rows]))]
        for place in range(1, max((row.most for row in ready), default=0)):
            spans = np.array([(row.row, row.known + place - 1, 1) for row in ready if row.most > place], np.int32)
            passes.append(self._begin(spans, np.ones(len(spans), np.bool_)))
        proposed: dict[int, list[int]] = {row.row: [] for row in ready}
        for place, draft_pass in enumerate(passes):
            tokens = draft_pass.read()
            theirs = tokens if self._limits.vocabulary is None else self._limits.vocabulary.theirs[tokens]
            for row, token in zip((row for row in ready if row.most > place), theirs.tolist(), strict=True):
                proposed[row.row].append(token)
        for row in rows:
            self._note_computed(row)
        for row in ready:
            self._guessed[row.row] = row.known, proposed[row.row][:-1]
        proposals = [(row.row, row.known, proposed[row.row]) for row in ready]
        computed = sum(row.last - row.first for row in rows)
        return proposals_of(proposals, perf_counter() - began, len(passes), computed)

    def _translate(self, rows: Sequence[_DraftRow], vocabulary: VocabularyMap) -> None:
        """Write the draft model's own tokens where they are to be computed."""
        theirs = self._rows.tokens
        counts = np.array([row.last - row.first for row in rows])
        positions = end_ranges(np.array([row.last - 1 for row in rows]), counts)
        lines = np.repeat([row.row for row in rows], counts)
        at = upload_columns((lines, positions), theirs.device)
        self._table[at] = vocabulary.own[theirs[at].long()]

    def _rows_to_compute(self, plan: StepPlan, new_tokens: Mapping[int, _NewTokens]) -> Iterable[_DraftRow]:
        left = CATCH_UP_TOKENS + plan.tokens
        columns = plan.rows, plan.starts + plan.counts, plan.proposals
        for row, planned, most in zip(*(column.tolist() for column in columns), strict=True):
            offset, new = new_tokens.get(row, (planned, []))
            known = offset + len(new)
            if not most or row in self._unknown or known + most > self._limits.positions:
                continue
            first = self._first_missing(row, known, new)
            last = min(known, first + left)
            if first < last:
                left -= last - first
                yield _DraftRow(row, known, first, last, most)

    def _without_unknown(self, rows: Sequence[_DraftRow], new_tokens: Mapping[int, _NewTokens]) -> Sequence[_DraftRow]:
        """The rows that have no token which the draft model does not know. The newest tokens are on the host; for
        others, of rows that catch up, the device is asked once."""
        limit = self._limits.tokens
        if limit is None:
            return rows
        older = [(row, min(new_tokens.get(row.row, (row.last, ()))[0], row.last)) for row in rows]
        spans = [(row.row, row.first, end) for row, end in older if row.first < end]
        device_tokens = iter(self._rows.tokens_between(spans).tolist())
        for row, end in older:
            offset, new = new_tokens.get(row.row, (end, ()))
            host_tokens = new[max(row.first - offset, 0) : row.last - offset]
            if max((*islice(device_tokens, max(end - row.first, 0)), *host_tokens)) >= limit:
                self._unknown.add(row.row)
        return [row for row in rows if row.row not in self._unknown]

    def _first_missing(self, row: int, known: int, new: Sequence[int]) -> int:
        """The first of the row's `known` tokens, the last of which are `new`, that has to be computed: proposals of the
        draft model that were sampled are computed already. Had other tokens been sampled in between, they would be on
        the device alone: to ask it costs more than to compute a few tokens again."""
        computed = self._computed[row]
        since, guessed = self._guessed.get(row, (0, []))
        if since == computed == known - len(new):
            sampled = new[: min(len(guessed), len(new) - 1)]
            computed += int((np.append(sampled, -1) != [*guessed[: len(sampled)], 0]).argmax())
        return computed

    def _note_computed(self, row: _DraftRow) -> None:
        size = self._rows.block_size
        blocks = self._rows.blocks_of(row.row, self._computed[row.row] // size, row.last // size)
        self._full[blocks] = True
        self._computed[row.row] = row.last
        self._guessed.pop(row.row, None)

    @torch.inference_mode()
    def compute_static(self, step: StaticStep) -> list[Tensor]:
        """The `compute` of `StepGraphs`."""
        batch = self._rows.static_batch(step, self._table)
        if self._limits.tokens is not None:  # padded places have any row's first token, though it may not know it
            batch.tokens = batch.tokens.clamp(max=self._limits.tokens - 1)
        context = StepContext(batch, self.attention.begin_step(batch))
        logits = self.decoder.compute_logits(context, (torch.arange(batch.size, device=self._rows.device),))
        assert logits is not None, "a draft model is whole"
        return [next(logits)]

    @property
    def _table(self) -> Tensor:
        """Its own tokens, by row."""
        theirs = self._rows.tokens
        if self._limits.vocabulary is None:
            return theirs
        if self._own_tokens.shape != theirs.shape:
            self._own_tokens = torch.zeros_like(theirs)
        return self._own_tokens

    def _begin(self, spans: IntArray, chooses: NDArray[np.bool_]) -> DraftPass:
        """Begin a pass over `spans` of (row, start, count), which chooses a token for those that `chooses` names."""
        rows, starts, counts = spans.T
        vocabulary = self._limits.vocabulary
        batch = self._rows.batch(rows, starts, counts, self._table)
        own = rows[chooses]
        positions = (starts + counts)[chooses]
        places: LongArray = (batch.first_places + counts - 1)[chooses]
        sampling = self._sampling(own, positions)
        at = to_device(places, self._rows.device)
        if self.graphs is not None and counts.max() <= self.graphs.buckets.most:
            outputs = self.graphs.replay(batch)
            if outputs is not None:
                return self._choose(outputs[0][at], own, positions, sampling)
        context = StepContext(batch, self.attention.begin_step(batch))
        if not len(places):
            self.decoder.compute_logits(context, ())
            return DraftPass(None, own)
        samples = SampledTokens(np.empty(len(own), np.int32), sampling)
        if vocabulary is not None:
            samples = samples._replace(mask_of=np.zeros(len(own), np.int64))
        pending = self.decoder.begin_step(context, at, samples) if at.device.type == "cpu" else None
        if pending is not None:
            if vocabulary is not None:
                pending.provide_masks(vocabulary.mask)
            return DraftPass(pending, samples.tokens)
        logits = self.decoder.compute_logits(context, (at,))
        assert logits is not None, "a draft model is whole"
        return self._choose(next(logits), own, positions, sampling)

    def _choose(self, logits: Tensor, rows: IntArray, positions: IntArray, sampling: SamplingArray | None) -> DraftPass:
        """Choose a token of each of `rows` from `logits`, which are changed."""
        if self._limits.vocabulary is not None:
            forbid_tokens(logits, self._limits.vocabulary.mask.repeat(len(rows), 0))
        tokens = self._sample(logits, sampling).to(torch.int32)
        self._rows.store_tokens(rows, positions, tokens, self._table)
        return DraftPass(None, HostCopy(tokens))
