"""A draft model beside the target: it goes through the same tokens, with a cache of the same blocks, and says ahead of
the next step how the rows may go on."""

from collections import Counter
from collections.abc import Iterable
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...scheduler.plan import IntArray, LongArray, Proposals, StepPlan, StepResult, proposals_of
from ..attention.backend import AttentionBackend
from ..layers.step_context import StepContext
from ..models.interfaces import Decoder, PendingStep
from ..step_batch import SampledTokens
from .row_states import RowStates
from .sampler import sample

CATCH_UP_TOKENS = 256
"""Tokens that a step computes with the draft model, beside as many as the target: rows that were not drafted for a
while lack some."""


class StepDrafter(Protocol):
    """A model that proposes tokens beside the target's steps, on the target's thread."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a cache block."""

    def allocate(self, blocks: int) -> None:
        """Make a cache of `blocks` blocks and begin anew."""

    def apply_plan(self, plan: StepPlan) -> None:
        """Called for every plan when its rows are entered."""

    def propose(self, plan: StepPlan, result: StepResult) -> Proposals:
        """Propose as `plan` says, before the next step begins: the target's has `result`."""

    def close(self) -> None:
        """End its threads; no step may follow."""


class DraftLimits(NamedTuple):
    """The longest sequence that a draft model can attend to, and the number of tokens that it knows, where it knows
    fewer than the target has: models of one family may differ in tokens that no text has."""

    positions: int
    tokens: int | None = None


class _DraftRow(NamedTuple):
    """A row of a step: `known` tokens, of which `first` to `last` are computed with the draft model; then it proposes
    `most`, if that is all."""

    row: int
    known: int
    first: int
    last: int
    most: int


class DraftModel:
    """A model of the target's vocabulary, for one thread: its tokens and block tables are the target's `rows`. A block
    that it has computed is found by other rows as the target's is. With `draws` it chooses tokens as the rows' samplers
    would, with the same random numbers, else the likeliest ones."""

    def __init__(
        self, decoder: Decoder, attention: AttentionBackend, rows: RowStates, limits: DraftLimits, draws: bool = False
    ) -> None:
        self._decoder, self._attention, self._rows, self._draws = decoder, attention, rows, draws
        self._limits = limits
        self._forget()

    def _forget(self, blocks: int = 0) -> None:
        self._full: NDArray[np.bool_] = np.zeros(blocks, np.bool_)  # by block: whether all of it is computed
        self._computed: dict[int, int] = {}  # tokens by row
        self._guessed: dict[int, tuple[int, list[int]]] = {}  # by row: known tokens, and computed proposals after them

    @property
    def block_bytes(self) -> int:
        return self._attention.block_bytes

    def allocate(self, blocks: int) -> None:
        """Make a cache of `blocks` blocks and begin anew."""
        self._forget(blocks)
        self._attention.allocate(blocks)

    def close(self) -> None:
        self._decoder.close()

    def apply_plan(self, plan: StepPlan) -> None:
        """See `StepDrafter.apply_plan`: blocks that a row does not share are to be computed."""
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

    def propose(self, plan: StepPlan, result: StepResult) -> Proposals:
        """Compute what the plan's rows with proposals lack; propose for those that lack nothing then, and were sampled,
        as `result` says."""
        began = perf_counter()
        rows = [*self._rows_to_compute(plan, result)]
        if not rows:
            return Proposals()
        sampled = set(result.rows.tolist())
        ready = [each for each in rows if each.last == each.known and each.row in sampled]
        going = np.array([(each.row, each.first, each.last - each.first) for each in rows], np.int32)
        passes = [self._begin(going, np.array([each in ready for each in rows]))]
        for place in range(1, max((each.most for each in ready), default=0)):
            going = np.array([(each.row, each.known + place - 1, 1) for each in ready if each.most > place], np.int32)
            passes.append(self._begin(going, np.ones(len(going), np.bool_)))
        found: dict[int, list[int]] = {each.row: [] for each in ready}
        for place, (pending, tokens) in enumerate(passes):
            if pending is not None:
                pending.finish()
            for each, token in zip((each for each in ready if each.most > place), tokens.tolist(), strict=True):
                found[each.row].append(token)
        for each in rows:
            self._note_computed(each)
        for each in ready:
            self._guessed[each.row] = each.known, found[each.row][:-1]
        proposed = [(each.row, each.known, found[each.row]) for each in ready]
        return proposals_of(proposed, perf_counter() - began, len(passes), sum(each.last - each.first for each in rows))

    def _rows_to_compute(self, plan: StepPlan, result: StepResult) -> Iterable[_DraftRow]:
        ends = dict(zip(result.rows.tolist(), (result.offsets + result.counts).tolist(), strict=True))
        left = CATCH_UP_TOKENS + plan.tokens
        columns = plan.rows, plan.starts + plan.counts, plan.proposals
        for row, planned, most in zip(*(each.tolist() for each in columns), strict=True):
            known = ends.get(row, planned)
            if not most or known + most > self._limits.positions:
                continue
            first = self._first_missing(row, known)
            last = min(known, first + left)
            if first < last and self._knows(row, first, last):
                left -= last - first
                yield _DraftRow(row, known, first, last, most)

    def _knows(self, row: int, first: int, last: int) -> bool:
        known = self._limits.tokens
        return known is None or bool((self._rows.tokens_of(row, first, last) < known).all())

    def _first_missing(self, row: int, known: int) -> int:
        """The first of the row's tokens to compute: those that it proposed itself and that came are there."""
        computed = self._computed[row]
        since, guessed = self._guessed.get(row, (0, []))
        if since == computed:
            came = self._rows.tokens_of(row, since, min(since + len(guessed), known - 1))
            computed += int((np.append(came, -1) != [*guessed[: len(came)], 0]).argmax())
        return computed

    def _note_computed(self, row: _DraftRow) -> None:
        size = self._rows.block_size
        blocks = self._rows.blocks_of(row.row, self._computed[row.row] // size, row.last // size)
        self._full[blocks] = True
        self._computed[row.row] = row.last
        self._guessed.pop(row.row, None)

    def _begin(self, going: IntArray, chooses: NDArray[np.bool_]) -> tuple[PendingStep | None, IntArray]:
        """Begin a pass of (row, start, count); the tokens that it chooses for some of them, unless it is pending."""
        rows, starts, counts = going.T
        batch = self._rows.batch(rows, starts, counts)
        context = StepContext(batch, self._attention.begin_step(batch))
        own, positions = rows[chooses], (starts + counts)[chooses]
        places: LongArray = (batch.first_places + counts - 1)[chooses]
        if not len(places):
            self._decoder.compute_logits(context, ())
            return None, own
        sampling = self._rows.sampling_at(own, positions) if self._draws else None
        at = torch.from_numpy(places).to(self._rows.device)
        samples = SampledTokens(np.empty(len(own), np.int32), sampling)
        pending = self._decoder.begin_step(context, at, samples) if at.device.type == "cpu" else None
        if pending is not None:
            return pending, samples.tokens
        logits = self._decoder.compute_logits(context, (at,))
        assert logits is not None, "a draft model is whole"
        tokens = sample(next(logits), sampling).to(torch.int32)
        self._rows.store_tokens(own, positions, tokens)
        return None, tokens.cpu().numpy()
