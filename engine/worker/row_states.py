"""A worker's memory of each row between steps: token ids, block table, and how its tokens are chosen.

Plans are differences; this is what they are differences to. Token ids and tables live on the device, so that a
token sampled there can be computed on in the next step before the host has heard of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.plan import IntArray, LongArray, MaskArray, NewSequence, StepPlan
from ..cpu.sampling import forbid_tokens
from ..gpu.graphs import StaticStep
from ..step_adapters import RankAdapter, StepAdapters
from ..step_batch import (
    SAMPLING_COLUMNS,
    SAMPLING_DTYPE,
    DeviceBatch,
    SampledTokens,
    SamplingArray,
    StepBatch,
    as_signed64,
    end_ranges,
    gather_entries,
    to_device,
    upload_columns,
)
from .embedded_rows import PLAIN_PLACES, EmbeddedRows, ImagePlaces
from .logits_processors import PreparedLogitsParams, prepare_logits_params, process_logits
from .logprobs import ScoredTokens, WantedLogprobs, scored_places
from .sampler import GREEDY_BELOW


class StepInputs(NamedTuple):
    """One step: its tokens, where logits are wanted, and how S tokens are chosen."""

    batch: StepBatch
    logits_indices: Tensor
    """[L] packed places with logits, ascending."""
    rows: IntArray
    """[S] the rows that are sampled, one with drafts several times."""
    positions: IntArray
    """[S] those of the tokens to be chosen."""
    selected: LongArray | None
    """[S] which of the L places each token is chosen at; None: all, in their order."""
    sampling: SamplingArray | None
    """[S]; None: all are greedy."""
    processed: LongArray
    """Which of the S have their logits changed on the host."""
    logprobs: Mapping[int, WantedLogprobs]
    """Which of the S want which tokens reported."""
    masked: LongArray | None
    """[S] which of the step's masks each has, -1 for none; None: none has one."""
    scored: ScoredTokens | None
    """The prompts' tokens whose log-probability is wanted, if any is."""
    adapters: StepAdapters | None = None
    """The adapters of rows that have one."""

    @property
    def needs_host(self) -> bool:
        """Whether the host has to see logits before the next step: to choose a token, or to report them."""
        return len(self.processed) > 0 or bool(self.logprobs) or self.scored is not None

    @property
    def unprocessed(self) -> LongArray:
        """Which of the S tokens are chosen from the logits as they are."""
        return np.delete(np.arange(len(self.rows)), self.processed)

    def samples(self) -> SampledTokens | None:
        """The tokens that a decoder can choose by itself, if there are any."""
        sampling = self.sampling
        selected = self.selected
        mask_of = self.masked
        if len(self.processed):
            plain = self.unprocessed
            sampling = None if sampling is None else sampling[plain]
            selected = plain if selected is None else selected[plain]
            mask_of = None if mask_of is None or (mask_of[plain] < 0).all() else mask_of[plain]
        tokens = np.empty(len(self.rows) - len(self.processed), np.int32)
        return SampledTokens(tokens, sampling, selected, mask_of) if len(tokens) else None

    def with_masks_on_host(self) -> "StepInputs":
        """The same where no decoder chooses tokens by itself."""
        if self.masked is None:
            return self
        return self._replace(processed=np.union1d(self.processed, np.flatnonzero(self.masked >= 0)))


class RowStates:
    """The rows that the scheduler uses, each from its sequence's first plan to its last."""

    def __init__(
        self,
        max_tokens: int,
        block_size: int,
        device: torch.device,
        adapters: Mapping[str, RankAdapter] = {},
        lines: int = 0,
        groups: int = 1,
        images: ImagePlaces = PLAIN_PLACES,
    ) -> None:
        """`max_tokens`: the longest sequence; one more fits, sampled at the very end and never computed. `adapters`: by
        digest, those that plans may name. `lines`: the tables' first rows; they grow. `groups`: of layers' blocks."""
        self.device = device
        self.block_size = block_size
        self._known_adapters = adapters
        self._lines = lines
        self.groups = groups
        self._images = images
        blocks = -(-max_tokens // block_size)
        if groups > 1:  # an even number: kernels are compiled anew for tables that are not aligned
            blocks += blocks % 2
        self._group_width = blocks
        self._width = (max_tokens + 1, groups * blocks)
        self.clear()

    def clear(self) -> None:
        width, table_width = self._width
        self._tokens = torch.zeros((self._lines, width), dtype=torch.int32, device=self.device)
        self._tables = torch.zeros((self._lines, table_width), dtype=torch.int64, device=self.device)
        self._host_tables = self._tables_on_host()
        self._blocks: LongArray = np.zeros(self._lines, dtype=np.int64)
        self._sampling: SamplingArray = np.zeros(self._lines, dtype=SAMPLING_DTYPE)
        self._processed: dict[int, PreparedLogitsParams] = {}
        # The rows that ask for more than the likeliest token: a step without such rows looks for none.
        self._drawing: set[int] = set()
        self._logprobs: dict[int, WantedLogprobs] = {}
        self._adapters: dict[int, RankAdapter] = {}
        self._embedded: EmbeddedRows | None = None  # from the first sequence with images on
        self._scoring: dict[int, tuple[int, int]] = {}  # tokens of the prompt, likeliest tokens to name at each

    def apply_plan(self, plan: StepPlan) -> None:
        if len(plan.closed):
            self._blocks[plan.closed] = 0
            for row in plan.closed.tolist():
                self._forget(row)
        for sequence in plan.new:
            self._enter(sequence)
        if len(plan.appended):
            rows, blocks = plan.appended.astype(np.int64).T
            places = self._blocks[rows] + _occurrence(rows)
            if self.groups > 1:
                places = places % self.groups * self._group_width + places // self.groups
                blocks = np.maximum(blocks, 0)  # nobody reads where there is none
            self._host_tables[rows, places] = blocks
            if self.device.type != "cpu":
                self._scatter(self._tables, rows, places, blocks)
            np.add.at(self._blocks, rows, 1)
        if len(plan.forced):
            self._scatter(self._tokens, *plan.forced.T)
        if len(plan.drafted):
            positions = end_ranges(plan.starts + plan.counts - 1, plan.drafts)
            self._scatter(self._tokens, plan.rows.repeat(plan.drafts), positions, plan.drafted)

    def forget_adapter(self, adapter: RankAdapter) -> None:
        """Let go of an adapter that no sequence has. Rows of sequences that ended are closed by the next plan only."""
        self._adapters = {row: held for row, held in self._adapters.items() if held is not adapter}

    def has_room_for(self, plan: StepPlan) -> bool:
        """Whether `apply_plan` leaves the tables of token and block ids where they are."""
        return all(sequence.row < len(self._blocks) for sequence in plan.new)

    def gather_inputs(self, plan: StepPlan) -> StepInputs:
        """Gather a step's numbers out of the rows.

        Raises:
            IndexError: a row of the plan was never entered.
        """
        if (last := max(plan.rows.tolist(), default=-1)) >= len(self._blocks):
            raise IndexError(f"the plan names row {last}, of {len(self._blocks)}")
        batch = self.batch(plan.rows, plan.starts, plan.counts)
        if self._embedded is not None:
            self._embedded.fill(batch)
        ends = plan.starts + plan.counts
        rows = plan.rows[plan.samples]
        positions = ends[plan.samples]
        places: LongArray = (batch.first_places + plan.counts - 1)[plan.samples]
        if len(plan.drafts):
            times = (plan.drafts + 1)[plan.samples]
            rows, positions = rows.repeat(times), end_ranges(positions, times).astype(np.int32)
            places = end_ranges(places, times)
        selected = scored = None
        if self._scoring:
            places, selected, scored = scored_places(plan, batch, self._scoring, places, self._tokens)
        sampling = self.sampling_at(rows, positions)
        logprobs = {}
        if self._logprobs:
            logprobs = {at: self._logprobs[row] for at, row in enumerate(rows.tolist()) if row in self._logprobs}
        processed = self._processed_places(rows)
        masked: LongArray | None = None
        if len(plan.masked):
            masked = np.full(len(rows), -1, np.int64)
            masked[np.isin(rows, plan.masked)] = np.arange(len(plan.masked))
            # What a mask changes in place cannot be reported.
            processed = np.union1d(processed, [at for at in logprobs if masked[at] >= 0]).astype(np.int64)
        adapters = self._step_adapters(batch) if self._adapters else None
        choice = selected, sampling, processed, logprobs, masked, scored
        return StepInputs(batch, self._to(places), rows, positions, *choice, adapters)

    @property
    def tokens(self) -> Tensor:
        """Token ids int32 [lines, places]: a line for each row, with anything after its tokens."""
        return self._tokens

    def batch(self, rows: IntArray, starts: IntArray, counts: IntArray, tokens: Tensor | None = None) -> StepBatch:
        """`counts` places of `rows` from `starts` on, with their tokens, or those of another table."""
        tables = self._tokens if tokens is None else tokens, self._tables
        batch = StepBatch(rows, starts, counts, *tables, self.block_size, groups=self.groups)
        return batch if self._embedded is None else self._embedded.placed(batch)

    def static_batch(self, step: StaticStep, tokens: Tensor | None = None) -> StepBatch:
        """The rows that a recorded step will have, with their tokens, or those of another table."""
        table = self._tokens if tokens is None else tokens
        key, lines = step.key, step.numbers.shape[1]
        rows, starts, counts, places, shifts = step.numbers.unbind()
        shifted = shifts if self._images.shifted else None
        on_device = DeviceBatch(
            rows, starts, counts, places, self._tables, key.places, shifted, prompts=step.logits_at is not None
        )
        bounds = np.zeros(lines), np.full(lines, key.context - key.most), np.full(lines, key.most)
        return StepBatch(*bounds, table, self._tables, self.block_size, on_device, self.groups)

    def longest_rows(self, tokens: int) -> IntArray:
        """The counts of so many tokens in as few rows as can hold them, of rows that there are."""
        longest = self._width[0] - 1
        tokens = min(tokens, longest * len(self._blocks))
        counts: IntArray = np.full(-(-tokens // longest), longest, np.int32)
        counts[-1] -= counts.sum() - tokens
        return counts

    def sampling_at(self, rows: IntArray, positions: IntArray) -> SamplingArray | None:
        """How `rows` choose their tokens at `positions`; None: all are greedy."""
        if not self._drawing:
            return None
        sampling: SamplingArray = self._sampling[rows]
        sampling["position"] = positions
        return sampling

    def tokens_between(self, spans: Sequence[tuple[int, int, int]]) -> IntArray:
        """The tokens of each (row, first, end), one behind the other; for any at all the device is waited for, once."""
        if not spans:
            return np.zeros(0, np.int32)
        rows, firsts, ends = np.array(spans).T
        positions = end_ranges(ends - 1, ends - firsts)
        tokens: IntArray = gather_entries(self._tokens, rows.repeat(ends - firsts), positions).cpu().numpy()
        return tokens

    def blocks_of(self, row: int, first: int, end: int) -> LongArray:
        """The ids of the row's blocks from number `first` on, of the first group of layers."""
        return self._host_tables[row, first:end]

    def _processed_places(self, rows: IntArray | LongArray) -> LongArray:
        """The places in `rows` of those whose logits are changed on the host."""
        if not self._processed:
            return np.zeros(0, np.int64)
        return np.array([place for place, row in enumerate(rows.tolist()) if row in self._processed], np.int64)

    def _step_adapters(self, batch: StepBatch) -> StepAdapters | None:
        """The packed places of each adapter's rows."""
        spans: dict[RankAdapter, list[LongArray]] = {}
        for row, first, count in zip(
            *(column.tolist() for column in (batch.rows, batch.first_places, batch.counts)), strict=True
        ):
            if row in self._adapters:
                spans.setdefault(self._adapters[row], []).append(np.arange(first, first + count))
        if not spans:
            return None
        places = [np.concatenate(own) for own in spans.values()]
        begins = np.cumsum([0, *map(len, places)], dtype=np.int64)
        return StepAdapters(list(spans), begins, np.concatenate(places))

    def process_logits(self, inputs: StepInputs, logits: Tensor, masks: MaskArray | None) -> None:
        """Change the float32 `logits` of `inputs.processed` in place, as their rows ask, and then their masks."""
        rows = inputs.rows[inputs.processed].astype(np.int64)
        positions = inputs.positions[inputs.processed].astype(np.int64)
        places = self._processed_places(rows)  # others are processed for their mask alone
        if len(places):
            at = self._to(places)
            params = [self._processed[row] for row in rows[places].tolist()]
            changed = logits if len(places) == len(rows) else logits[at]
            process_logits(changed, params, rows[places], positions[places], self._tokens)
            if changed is not logits:
                logits[at] = changed
        if inputs.masked is None or masks is None:
            return
        mask_of = inputs.masked[inputs.processed]
        under = self._to(np.flatnonzero(mask_of >= 0))
        if len(under):
            changed = logits[under]
            forbid_tokens(changed, masks[mask_of[mask_of >= 0]])
            logits[under] = changed

    def store_tokens(
        self, rows: IntArray, positions: IntArray | LongArray, tokens: Tensor, table: Tensor | None = None
    ) -> None:
        """Store `tokens` [S], chosen here or by another rank, at `positions` [S] of `rows` [S], or in another table."""
        table = self._tokens if table is None else table
        if tokens.device.type == "cpu":
            self._scatter(table, rows, positions, tokens.numpy())
        else:
            table[upload_columns((rows, positions), self.device)] = tokens.to(torch.int32)

    def _scatter(self, table: Tensor, *columns: NDArray[np.signedinteger[Any]]) -> None:
        """table[row, place] = value for each of the rows, places and values: one copy to the device for all."""
        if self.device.type == "cpu":
            rows, places, values = columns
            table.numpy()[rows, places] = values
        else:
            *at, entries = upload_columns(columns, self.device)
            table[tuple(at)] = entries.to(table.dtype)

    def _enter(self, sequence: NewSequence) -> None:
        row = sequence.row
        sampling = sequence.sampling
        lines = len(self._blocks)
        if row >= lines:
            more = max(row + 1, 2 * lines) - lines
            self._blocks = np.concatenate([self._blocks, np.zeros(more, dtype=np.int64)])
            self._sampling = np.concatenate([self._sampling, np.zeros(more, dtype=SAMPLING_DTYPE)])
            self._tokens = torch.cat([self._tokens, self._tokens.new_zeros((more, self._width[0]))])
            self._tables = torch.cat([self._tables, self._tables.new_zeros((more, self._width[1]))])
            self._host_tables = self._tables_on_host()
        self._blocks[row] = 0
        self._forget(row)
        tokens = sequence.tokens
        if sequence.embedded or sequence.shift:
            if self._embedded is None:
                self._embedded = EmbeddedRows(self.device, self._images.token)
            tokens = self._embedded.enter(sequence)
        self._tokens[row, : len(tokens)] = self._to(tokens.astype(np.int32))
        numbers = sampling._replace(top_k=max(sampling.top_k, 0), seed=as_signed64(sampling.seed))
        self._sampling[row] = (*(getattr(numbers, name) for name in SAMPLING_COLUMNS), 0)  # the position, for now
        if sampling.temperature >= GREEDY_BELOW and sampling.top_k != 1:
            self._drawing.add(row)
        if sequence.adapter:
            self._adapters[row] = self._known_adapters[sequence.adapter]
        if sampling.logits is not None:
            self._processed[row] = prepare_logits_params(sequence.prompt, sampling.logits)
        if sampling.logprobs is not None:
            processed = sampling.logits is not None and sampling.logits.reported
            self._logprobs[row] = WantedLogprobs(sampling.logprobs, sampling.logprob_token_ids, processed)
        if sampling.prompt_logprobs is not None:
            self._scoring[row] = sequence.prompt, sampling.prompt_logprobs

    def _tables_on_host(self) -> LongArray:
        """The block tables for whoever must not wait for a device: on a CPU the same memory."""
        tables: LongArray = self._tables.cpu().numpy()
        return tables

    def _forget(self, row: int) -> None:
        self._drawing.discard(row)
        self._logprobs.pop(row, None)
        self._adapters.pop(row, None)
        self._processed.pop(row, None)
        self._scoring.pop(row, None)
        if self._embedded is not None:
            self._embedded.forget(row)

    def _to(self, column: NDArray[np.signedinteger[Any]]) -> Tensor:
        return to_device(column, self.device)


def _occurrence(rows: LongArray) -> LongArray:
    """[A] the number of equal entries before each one."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    seen = np.empty_like(rows)
    seen[order] = np.arange(len(rows)) - np.searchsorted(ordered, ordered)
    return seen
