"""Models that draft beside the target: a draft model, which goes through the same tokens, and a head, which goes on
from the target's hidden states. Both have a cache of the target's blocks, and say ahead of the next step how its rows
may go on."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, islice
from time import perf_counter
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.plan import IntArray, LongArray, Proposals, StepPlan, StepResult, proposals_of
from ..attention.backend import AttentionBackend
from ..cpu.program import StepRun
from ..cpu.sampling import forbid_tokens
from ..gpu.graphs import DecodeGraphs, StaticStep
from ..layers.step_context import StepContext
from ..models.draft_head import DraftHead, HeadStep
from ..models.interfaces import Decoder
from ..models.native_decoder import NativeDecoder
from ..step_batch import HostCopy, SampledTokens, SamplingArray, to_device, upload_columns
from .row_states import RowStates, end_ranges
from .sampler import choose_sampler
from .vocabulary_map import VocabularyMap

CATCH_UP_TOKENS = 256
"""Tokens that a step computes with the draft model, beside as many as the target: rows that were not drafted for a
while lack some."""


class StepDrafter(ABC):
    """A model that proposes tokens beside the target's steps, on the target's thread. Tokens and block tables are the
    target's `rows`, and `attention` has a cache of the target's blocks. With `draws` it chooses tokens as the rows'
    samplers would, with the same random numbers, else the likeliest ones."""

    def __init__(self, model: Decoder | DraftHead, attention: AttentionBackend, rows: RowStates, draws: bool) -> None:
        self.model, self.attention, self._rows, self._draws = model, attention, rows, draws
        self.graphs: DecodeGraphs | None = None
        """Recorded passes, where there are some."""
        self._sample = choose_sampler(rows.device)

    @abstractmethod
    def forget(self, blocks: int) -> None:
        """Begin anew: `attention` has a cache of `blocks` blocks, all empty."""

    @abstractmethod
    def apply_plan(self, plan: StepPlan) -> None:
        """Called for every plan when its rows are entered."""

    @abstractmethod
    def propose(self, plan: StepPlan, result: StepResult) -> Proposals:
        """Propose as `plan` says, before the next step begins: the target's has `result`."""

    def _sampling(self, rows: IntArray, positions: IntArray) -> SamplingArray | None:
        return self._rows.sampling_at(rows, positions) if self._draws else None


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
"""The position of the first token that came of a row, and all of them."""


def _tokens_by_row(result: StepResult) -> dict[int, _NewTokens]:
    tokens = iter(result.tokens.tolist())
    columns = (each.tolist() for each in (result.rows, result.offsets, result.counts))
    return {row: (offset, [*islice(tokens, count)]) for row, offset, count in zip(*columns, strict=True)}


class _DraftPass(NamedTuple):
    """A pass of a drafter, which may be computed already, and the tokens that it chooses, on their way."""

    run: StepRun | None
    tokens: IntArray | HostCopy

    def finish(self) -> None:
        """Return when it is computed, or queued on a device."""
        if self.run is not None:
            self.run.finish()

    def read(self) -> IntArray:
        """The tokens int32 [S], when it is computed."""
        self.finish()
        return self.tokens.read() if isinstance(self.tokens, HostCopy) else self.tokens


class DraftModel(StepDrafter):
    """A model of the target's vocabulary, or of one that is mapped to it: then it has tokens of its own, and chooses
    among those that the target has, too. A block that it has computed is found by other rows as the target's is."""

    def __init__(
        self, decoder: Decoder, attention: AttentionBackend, rows: RowStates, limits: DraftLimits, draws: bool = False
    ) -> None:
        super().__init__(decoder, attention, rows, draws)
        self.decoder, self._limits, self._own_tokens = decoder, limits, rows.tokens[:0]
        self.longest = limits.positions
        self.forget(0)

    def forget(self, blocks: int) -> None:
        """See `StepDrafter.forget`."""
        self._full: NDArray[np.bool_] = np.zeros(blocks, np.bool_)  # by block: whether all of it is computed
        self._full_slots: dict[int, bool] = {}  # the same of what is in the host's memory
        self._computed: dict[int, int] = {}  # tokens by row
        self._guessed: dict[int, tuple[int, list[int]]] = {}  # by row: known tokens, and computed proposals after them
        self._strange: set[int] = set()  # rows with a token that it does not know

    def apply_plan(self, plan: StepPlan) -> None:
        """See `StepDrafter.apply_plan`: blocks that a row does not share are to be computed, and of what comes back
        from the host's memory that which was not when it left."""
        for block, slot, back in plan.block_copies.tolist():
            if back:
                self._full[block] = self._full_slots.get(slot, False)
            else:
                self._full_slots[slot] = bool(self._full[block])
        size = self._rows.block_size
        shared = {new.row: new.computed // size for new in plan.new}
        taken = Counter[int]()
        for row, block in plan.appended.tolist():
            if taken[row] >= shared.get(row, 0):
                self._full[block] = False
            taken[row] += 1
        for row, blocks in shared.items():
            full = self._full[self._rows.blocks_of(row, 0, blocks)]
            self._computed[row] = size * int(blocks if full.all() else full.argmin())
            self._guessed.pop(row, None)
            self._strange.discard(row)

    def propose(self, plan: StepPlan, result: StepResult) -> Proposals:
        """Compute what the plan's rows with proposals lack; propose for those that lack nothing then, and were sampled,
        as `result` says."""
        began = perf_counter()
        came = _tokens_by_row(result)
        rows = self._without_strange([*self._rows_to_compute(plan, came)], came)
        if not rows:
            return Proposals()
        sampled = set(result.rows.tolist())
        if self._limits.vocabulary is not None:
            self._translate(rows, self._limits.vocabulary)
        ready = [each for each in rows if each.last == each.known and each.row in sampled]
        going = np.array([(each.row, each.first, each.last - each.first) for each in rows], np.int32)
        passes = [self._begin(going, np.array([each in ready for each in rows]))]
        for place in range(1, max((each.most for each in ready), default=0)):
            going = np.array([(each.row, each.known + place - 1, 1) for each in ready if each.most > place], np.int32)
            passes.append(self._begin(going, np.ones(len(going), np.bool_)))
        found: dict[int, list[int]] = {each.row: [] for each in ready}
        for place, each_pass in enumerate(passes):
            tokens = each_pass.read()
            theirs = tokens if self._limits.vocabulary is None else self._limits.vocabulary.theirs[tokens]
            for each, token in zip((each for each in ready if each.most > place), theirs.tolist(), strict=True):
                found[each.row].append(token)
        for each in rows:
            self._note_computed(each)
        for each in ready:
            self._guessed[each.row] = each.known, found[each.row][:-1]
        proposed = [(each.row, each.known, found[each.row]) for each in ready]
        return proposals_of(proposed, perf_counter() - began, len(passes), sum(each.last - each.first for each in rows))

    def _translate(self, rows: Sequence[_DraftRow], vocabulary: VocabularyMap) -> None:
        """Write its own tokens where they are to be computed."""
        theirs, own = self._rows.tokens, self._table
        counts = np.array([each.last - each.first for each in rows])
        positions = end_ranges(np.array([each.last - 1 for each in rows]), counts)
        lines = np.repeat([each.row for each in rows], counts)
        at = upload_columns((lines, positions), theirs.device)
        own[at] = vocabulary.own[theirs[at].long()]

    def _rows_to_compute(self, plan: StepPlan, came: Mapping[int, _NewTokens]) -> Iterable[_DraftRow]:
        left = CATCH_UP_TOKENS + plan.tokens
        columns = plan.rows, plan.starts + plan.counts, plan.proposals
        for row, planned, most in zip(*(each.tolist() for each in columns), strict=True):
            offset, new = came.get(row, (planned, []))
            known = offset + len(new)
            if not most or row in self._strange or known + most > self._limits.positions:
                continue
            first = self._first_missing(row, known, new)
            last = min(known, first + left)
            if first < last:
                left -= last - first
                yield _DraftRow(row, known, first, last, most)

    def _without_strange(self, rows: Sequence[_DraftRow], came: Mapping[int, _NewTokens]) -> Sequence[_DraftRow]:
        """Those that have no token beyond what it knows. The newest tokens are on the host; for others, of rows that
        catch up, the device is asked once."""
        limit = self._limits.tokens
        if limit is None:
            return rows
        older = [(each, min(came.get(each.row, (each.last, ()))[0], each.last)) for each in rows]
        asked = [(each.row, each.first, end) for each, end in older if each.first < end]
        tokens = iter(self._rows.tokens_between(asked).tolist())
        for each, end in older:
            offset, new = came.get(each.row, (end, ()))
            mine = *islice(tokens, max(end - each.first, 0)), *new[max(each.first - offset, 0) : each.last - offset]
            if max(mine) >= limit:
                self._strange.add(each.row)
        return [each for each in rows if each.row not in self._strange]

    def _first_missing(self, row: int, known: int, new: Sequence[int]) -> int:
        """The first of the row's `known` tokens, the last of which are `new`, to compute: those that it proposed itself
        and that came are there. Had others come in between, they would be on the device alone: to ask it costs more
        than to compute a few tokens again."""
        computed = self._computed[row]
        since, guessed = self._guessed.get(row, (0, []))
        if since == computed == known - len(new):
            came = new[: min(len(guessed), len(new) - 1)]
            computed += int((np.append(came, -1) != [*guessed[: len(came)], 0]).argmax())
        return computed

    def _note_computed(self, row: _DraftRow) -> None:
        size = self._rows.block_size
        blocks = self._rows.blocks_of(row.row, self._computed[row.row] // size, row.last // size)
        self._full[blocks] = True
        self._computed[row.row] = row.last
        self._guessed.pop(row.row, None)

    @torch.inference_mode()
    def compute_static(self, step: StaticStep) -> list[Tensor]:
        """The `compute` of `DecodeGraphs`."""
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

    def _begin(self, going: IntArray, chooses: NDArray[np.bool_]) -> _DraftPass:
        """Begin a pass of (row, start, count), which chooses tokens for some of them."""
        rows, starts, counts = going.T
        vocabulary, table = self._limits.vocabulary, self._table
        batch = self._rows.batch(rows, starts, counts, table)
        own, positions = rows[chooses], (starts + counts)[chooses]
        places: LongArray = (batch.first_places + counts - 1)[chooses]
        sampling, at = self._sampling(own, positions), to_device(places, self._rows.device)
        graphs = self.graphs
        if graphs is not None and counts.max() <= graphs.buckets.most and (found := graphs.replay(batch)) is not None:
            return self._choose(found[0][at], own, positions, sampling)
        context = StepContext(batch, self.attention.begin_step(batch))
        if not len(places):
            self.decoder.compute_logits(context, ())
            return _DraftPass(None, own)
        samples = SampledTokens(np.empty(len(own), np.int32), sampling)
        if vocabulary is not None:
            samples = samples._replace(mask_of=np.zeros(len(own), np.int64))
        pending = self.decoder.begin_step(context, at, samples) if at.device.type == "cpu" else None
        if pending is not None:
            if vocabulary is not None:
                pending.provide_masks(vocabulary.mask)
            return _DraftPass(pending, samples.tokens)
        logits = self.decoder.compute_logits(context, (at,))
        assert logits is not None, "a draft model is whole"
        return self._choose(next(logits), own, positions, sampling)

    def _choose(
        self, logits: Tensor, rows: IntArray, positions: IntArray, sampling: SamplingArray | None
    ) -> _DraftPass:
        """Choose a token of each of `rows` from `logits`, which are changed."""
        if self._limits.vocabulary is not None:
            forbid_tokens(logits, self._limits.vocabulary.mask.repeat(len(rows), 0))
        tokens = self._sample(logits, sampling).to(torch.int32)
        self._rows.store_tokens(rows, positions, tokens, self._table)
        return _DraftPass(None, HostCopy(tokens))


class _HeadRow(NamedTuple):
    """A row of a step: places `first` to `end` are computed with the head, from the target's states that begin at the
    packed place `states`; a row that was `sampled` gets `most` proposals then."""

    row: int
    first: int
    end: int
    states: int
    sampled: bool
    most: int


class _HeadPass(NamedTuple):
    """A head's pass, and its own states [S, hidden] where it chooses tokens."""

    drafted: _DraftPass
    states: Tensor


class HeadDrafter(StepDrafter):
    """A head. Its cache lacks the places of steps for which nothing was to be proposed: their hidden states are gone,
    and it attends to whatever is there. So it does at the last place of a prefix that another row computed, which was
    followed by that row's token. `positions`: the longest sequence."""

    def __init__(
        self,
        head: DraftHead,
        attention: AttentionBackend,
        target: NativeDecoder,
        rows: RowStates,
        positions: int,
        draws: bool = False,
    ) -> None:
        super().__init__(head, attention, rows, draws)
        self._head, self._target, self._positions = head, target, positions

    def forget(self, blocks: int) -> None:
        """It remembers nothing of rows."""

    def apply_plan(self, plan: StepPlan) -> None:
        """It remembers nothing of rows."""

    def propose(self, plan: StepPlan, result: StepResult) -> Proposals:
        began = perf_counter()
        rows = self._rows_to_compute(plan, result)
        if not rows:
            return Proposals()
        wanted = np.concatenate([np.arange(each.states, each.states + each.end - each.first) for each in rows])
        going = np.array([(each.row, each.first, each.end - each.first) for each in rows], np.int32)
        states = torch.cat([*self._target.kept], -1)[self._to(wanted)]
        passes = [self._begin(going, np.array([each.sampled for each in rows]), states, True)]
        ready = going_on = [each for each in rows if each.sampled]
        proposed: dict[int, list[int]] = {each.row: [] for each in ready}
        for place in range(1, max((each.most for each in ready), default=0)):
            states, still = passes[-1].states, [each.most > place for each in going_on]
            if not all(still):
                passes[-1].drafted.finish()
                states, going_on = states[self._to(np.flatnonzero(still))], [*compress(going_on, still)]
            going = np.array([(each.row, each.end + place - 1, 1) for each in going_on], np.int32)
            passes.append(self._begin(going, np.ones(len(going), np.bool_), states))
        for place, each_pass in enumerate(passes):
            of_pass = (each for each in ready if each.most > place)
            for each, token in zip(of_pass, each_pass.drafted.read().tolist(), strict=True):
                proposed[each.row].append(token)
        found = [(each.row, each.end + 1, proposed[each.row]) for each in ready]
        return proposals_of(found, perf_counter() - began, len(passes), len(wanted))

    def _rows_to_compute(self, plan: StepPlan, result: StepResult) -> list[_HeadRow]:
        known = dict(zip(result.rows.tolist(), (result.offsets + result.counts).tolist(), strict=True))
        columns = plan.rows, plan.starts, plan.counts, np.cumsum(plan.counts) - plan.counts, plan.proposals
        found = []
        for row, start, count, states, most in zip(*(each.tolist() for each in columns), strict=True):
            end = known[row] - 1 if row in known else start + count
            if most and end + most < self._positions:
                found.append(_HeadRow(row, start, end, states, row in known, most))
        return found

    def _begin(self, going: IntArray, chooses: NDArray[np.bool_], states: Tensor, fuses: bool = False) -> _HeadPass:
        """Begin a pass of (row, start, count) from `states`, the target's if they are to be fused; tokens are chosen
        for some rows."""
        rows, starts, counts = going.T
        batch = self._rows.batch(rows, starts, counts, self._rows.tokens[:, 1:])
        context = StepContext(batch, self.attention.begin_step(batch))
        own, positions = rows[chooses], (starts + counts)[chooses] + 1
        places = self._to((batch.first_places + counts - 1)[chooses])
        samples = SampledTokens(np.empty(len(own), np.int32), self._sampling(own, positions))
        step = HeadStep(context, states, fuses, places, samples)
        program = self._target.program
        run = None if program is None else self._head.begin_step(step, program.threads)
        if run is not None:
            return _HeadPass(_DraftPass(run, samples.tokens), run.kept[0])
        ours, logits = self._head.compute(step)
        tokens = self._head.target_ids[self._sample(logits, samples.sampling)].to(torch.int32)
        self._rows.store_tokens(own, positions, tokens)
        return _HeadPass(_DraftPass(None, HostCopy(tokens)), ours)

    def _to(self, places: LongArray) -> Tensor:
        return to_device(places, self._rows.device)
