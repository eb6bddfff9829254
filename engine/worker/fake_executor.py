"""An executor that computes nothing: the next token is the last one plus one, or the next that a mask allows.

It believes no plan: rows, positions, block tables and the contents of every block are checked, and a plan that breaks
the contract fails its future. Tests, benches and a server without weights run on it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import itemgetter
from random import Random
from typing import TypeVar

import numpy as np

from ...core.adapter import Adapter
from ...core.eager_reason import EagerReason
from ...core.errors import CharoniaError
from ...core.logprobs import Logprobs, PromptLogprobs
from ...core.resolved_sampling import ResolvedSampling
from ...kvcache.block_table import NO_BLOCK
from ...scheduler.drafts.proposals import NO_PROPOSALS, Proposals, proposals_of
from ...scheduler.plan import MaskArray, MaskSource, NewSequence, StepPlan, StepResult
from ..checkpoint.adapter_files import read_adapter
from ..config import LoraConfig
from .executor import NO_COPIES, CacheCopies, CachePlaces, Capacity, ImageLayout, ProgressCallback, StepFuture
from .fake_memory import FakeMemory
from .image_files import ImageDirectorySettings, RankImages
from .rank_places import RankPlaces

R = TypeVar("R")
_ANY_ADAPTER = LoraConfig()
SMALL_CAPACITY = Capacity(vocab_size=32_000, max_model_len=2048, block_bytes=1 << 16, free_bytes=1 << 28)


@dataclass(frozen=True, slots=True)
class FakeBehaviour:
    """How long a `FakeExecutor` takes, and how many of its drafts are right."""

    step_seconds: float = 0.0
    token_seconds: float = 0.0
    """For each token of a step, beside `step_seconds`."""
    burst: tuple[int, int] = (1, 1)
    """(least, most) tokens that a sampled row gets: more than 1 is like a draft that was right, 0 like one that was
    wrong."""
    seed: int = 0
    """What the bursts are drawn from."""
    right: int = 2
    """How many of the tokens that the draft model proposes at once are right: the first ones."""
    pass_seconds: float = 0.0
    """The time of a pass of the draft model."""


@dataclass(slots=True)
class FakeRow:
    """A row: token ids, the first `prompt` of them its prompt, how many are computed, its sampling, block table, span
    by span, and the tokens that its state has seen, where it has one."""

    tokens: list[int]
    computed: int
    prompt: int
    sampling: ResolvedSampling
    blocks: list[int] = field(default_factory=list)
    adapter: str = ""
    state: list[int] = field(default_factory=list)


class FakeExecutor:
    """Reports `capacity`, in cache blocks of `block_size` tokens. Sequences have states if it gives them bytes: then
    each row and each snapshot knows which tokens its state has seen, and a row goes on from no other."""

    def __init__(
        self,
        capacity: Capacity = SMALL_CAPACITY,
        *,
        block_size: int = 16,
        behaviour: FakeBehaviour = FakeBehaviour(),
        threaded: bool = True,
        check_contents: bool = True,
        lora: LoraConfig = _ANY_ADAPTER,
    ) -> None:
        """`threaded`: results come from one worker thread, otherwise before `execute` returns. `check_contents`: also
        keep which token sits in which slot, and verify everything a row attends to."""
        self._capacity = capacity
        self._block_size = block_size
        self._check_contents = check_contents
        self._behaviour = behaviour
        self._random = Random(behaviour.seed)
        self._worker = ThreadPoolExecutor(1, "fake-executor") if threaded else None
        self._rows: dict[int, FakeRow] = {}
        self._lora = lora
        self.adapters = set[str]()
        """Digests of those that plans may have."""
        self.memory = FakeMemory(block_size, capacity.max_model_len, check_contents)
        states = self.memory.state_images if capacity.state_bytes else None
        self._places = RankPlaces(self.memory.block_images, states)
        self._holders: list[int] = []
        self._images: RankImages | None = None
        self._next_step: int | None = None

    def load(self, progress: ProgressCallback) -> Capacity:
        progress("weights", 1.0)
        return self._capacity

    def allocate(self, blocks: int, host_blocks: int = 0, snapshots: int = 0, host_snapshots: int = 0) -> None:
        self.memory.allocate(blocks, host_blocks, snapshots, host_snapshots)
        self._holders = [0] * blocks

    def execute(self, plan: StepPlan, masks: MaskSource | None = None) -> StepFuture:
        step_masks = masks() if masks is not None and len(plan.masked) else None
        return self._call(partial(self._step, plan, step_masks))

    def _call(self, compute: Callable[[], R]) -> Future[R]:
        """In the order of the calls."""
        if self._worker is not None:
            return self._worker.submit(compute)
        done: Future[R] = Future()
        try:
            done.set_result(compute())
        except AssertionError as broken:
            done.set_exception(broken)
        return done

    def load_adapter(self, path: str) -> Future[Adapter]:
        """Files are read and checked, and counted as they are stored; no token depends on them."""
        loaded: Future[Adapter] = Future()
        try:
            files = read_adapter(path, self._lora)
            loaded.set_result(Adapter("", path, files.digest, files.rank, 2 * files.numbers))
            self.adapters.add(files.digest)
        except CharoniaError as error:
            loaded.set_exception(error)
        return loaded

    def unload_adapter(self, digest: str) -> None:
        self.adapters.discard(digest)

    def open_directory(self, settings: ImageDirectorySettings) -> RankImages:
        self._images = RankImages(settings.share(0, 1), *self._places)
        return self._images

    @property
    def image_layouts(self) -> list[ImageLayout]:
        return [self._places.layout]

    def take_places(self, places: CachePlaces) -> Callable[[], list[bytes]]:
        taken = self._call(partial(self._places.take, places))
        return lambda: [taken.result()()]

    def put_places(self, places: CachePlaces, content: Sequence[memoryview], copies: CacheCopies = NO_COPIES) -> None:
        def put() -> None:
            self.memory.make_copies(*copies)
            self._places.put(places, content[0])

        self._call(put).result()

    eager_steps: Mapping[EagerReason, int] = {}
    failed_captures = 0

    def capture_usual_steps(self, progress: ProgressCallback) -> None:
        """See `Executor.capture_usual_steps`: it records none."""

    def use_idle_time(self) -> None:
        """See `Executor.use_idle_time`: there is nothing to prepare."""

    def watch(self, tell: Callable[[CharoniaError], None]) -> None:
        """See `Executor.watch`: there is nothing to watch."""

    def close(self) -> None:
        if self._images is not None:
            self._images.close()
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)

    def _step(self, plan: StepPlan, masks: MaskArray | None) -> StepResult:
        assert self._next_step in (None, plan.step), f"step {plan.step} came instead of {self._next_step}"
        self._next_step = plan.step + 1
        for row in plan.closed.tolist():
            self._let_go(self._rows.pop(row).blocks)
        for block in plan.block_copies[:, 0].tolist():
            assert not self._holders[block], f"block {block} is moved and has {self._holders[block]} holders"
        self.memory.make_copies(plan.block_copies, plan.state_copies)
        for new in plan.new:
            assert new.row not in self._rows, f"row {new.row} is occupied"
            assert 0 <= new.computed < len(new.tokens), "nothing to compute for a new row"
            self._rows[new.row] = FakeRow(
                new.tokens.tolist(),
                new.computed,
                new.prompt,
                new.sampling,
                adapter=new.adapter,
                state=self._first_state(new),
            )
        for row, block in plan.appended.tolist():
            blocks = self._rows[row].blocks
            if block == NO_BLOCK:
                assert len(blocks) % self._capacity.groups.total >= self._capacity.groups.full, "a group lacks a block"
            else:
                assert block not in blocks, f"row {row} has block {block} already"
                self._holders[block] += 1
            blocks.append(block)
        for row, snapshot in plan.state_restores.tolist():
            assert self._capacity.state_bytes, f"row {row} goes on from a state, and there are none"
            state = self.memory.snapshots[snapshot].copy()
            assert state == self._rows[row].tokens[: len(state)], f"row {row} goes on from another sequence's state"
            self._rows[row].state = state
        for row, position, token in plan.forced.tolist():
            assert len(self._rows[row].tokens) == position, f"row {row} is given a token that does not follow"
            self._rows[row].tokens.append(token)
        result = self._run_rows(plan, masks)
        pause = self._behaviour.step_seconds + self._behaviour.token_seconds * plan.tokens
        if pause:
            time.sleep(pause)
        return result

    def _run_rows(self, plan: StepPlan, masks: MaskArray | None) -> StepResult:
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row twice in one step"
        assert (plan.samples <= plan.num_logits).all(), "a sample without logits"
        assert (plan.num_logits <= plan.counts).all(), "logits of tokens that are not computed"
        ran = list(zip(*(array.tolist() for array in (plan.rows, plan.starts, plan.counts, plan.samples)), strict=True))
        guesses = self._guesses(plan)
        for row, start, count, _ in ran:
            self._compute(self._rows[row], start, count, guesses.get(row, []))
        for row, position, snapshot in plan.state_saves.tolist():
            start = int(plan.starts[plan.rows.tolist().index(row)])
            assert start < position <= self._rows[row].computed, f"row {row} has no state at {position} in this step"
            self.memory.snapshots[snapshot] = self._rows[row].state[:position]
        ends = {row: len(self._rows[row].tokens) for row, *_ in ran}  # before tokens are drawn
        drafts = {row: len(guessed) for row, guessed in guesses.items()}
        sampled = [
            row
            for row, start, count, _ in filter(itemgetter(3), ran)
            if start + count == ends[row] + drafts.get(row, 0)
        ]
        drawn: list[list[int]] = []
        logprobs: list[Logprobs | None] = []
        assert set(plan.masked.tolist()) <= set(sampled), "a mask for a row that is not sampled"
        masks_of: dict[int, list[MaskArray]] = {}
        for row, mask in zip(plan.masked.tolist(), () if masks is None else masks, strict=masks is not None):
            masks_of.setdefault(row, []).append(mask)
        for row in sampled:
            state = self._rows[row]
            allowed = masks_of.get(row)
            if allowed or row in guesses:
                drawn.append(self._verified(state.tokens[-1], guesses.get(row, []), allowed))
                state.computed = min(state.computed, len(state.tokens) + len(drawn[-1]) - 1)
            else:
                drawn.append(list(self._successors(state.tokens[-1], self._random.randint(*self._behaviour.burst))))
            state.tokens.extend(drawn[-1])
            logprobs += [self._logprobs(token, state.sampling.logprobs) for token in drawn[-1]]
        for row, *_ in ran if self._capacity.groups.sliding else ():
            self._slide(self._rows[row])
        scores = [
            (row, self._scores(self._rows[row], start, count))
            for (row, start, count, _), logits in zip(ran, plan.num_logits.tolist(), strict=True)
            if logits == count
        ]
        prompt_logprobs = [(row, score) for row, score in scores if score is not None]
        columns = sampled, [ends[row] for row in sampled], list(map(len, drawn)), list(chain(*drawn))
        rows, offsets, counts, tokens = (np.array(column, np.int32) for column in columns)
        reported = logprobs if any(logprobs) else ()
        proposals = self._propose(plan, set(sampled)) if len(plan.proposals) else NO_PROPOSALS
        return StepResult(plan.step, rows, offsets, counts, tokens, reported, prompt_logprobs, proposals)

    def _propose(self, plan: StepPlan, sampled: set[int]) -> Proposals:
        """Where the drafts of the plan were wrong, the row's tokens end before those that it has blocks for."""
        right = self._behaviour.right
        proposals: list[tuple[int, int, list[int]]] = []
        columns = plan.rows, plan.starts + plan.counts, plan.proposals
        for row, end, most in zip(*(column.tolist() for column in columns), strict=True):
            if not most or row not in sampled:
                continue
            state = self._rows[row]
            assert end + most <= self._room(state), "no block for the last proposal but one"
            tokens = self._successors(state.tokens[-1], most)
            proposals.append((row, len(state.tokens), [t if at < right else 7 for at, t in enumerate(tokens)]))
        passes = max((len(tokens) for _, _, tokens in proposals), default=1)
        return proposals_of(proposals, passes * self._behaviour.pass_seconds, passes, len(proposals))

    def _guesses(self, plan: StepPlan) -> dict[int, list[int]]:
        """The drafts of each row that has some."""
        if not len(plan.drafts):
            return {}
        assert plan.drafts.sum() == len(plan.drafted), "drafts without a row"
        for drafts, count, samples in zip(plan.drafts.tolist(), plan.counts.tolist(), plan.samples, strict=True):
            assert samples or not drafts, "drafts that do not follow the newest token"
            assert drafts < count, "the token before the drafts is not computed"
        return plan.drafts_by_row()

    def _compute(self, row: FakeRow, start: int, count: int, guessed: list[int]) -> None:
        """Compute up to `count` tokens: a plan made ahead may count on tokens that an earlier step did not bring."""
        assert count >= 1, "a row without work"
        assert not row.adapter or row.adapter in self.adapters, f"adapter {row.adapter} is not loaded"
        known = [*row.tokens, *guessed]
        end = min(start + count, len(known))
        if end <= start:
            return
        assert start <= row.computed, "a gap between what is computed and what is to be"
        if self._capacity.state_bytes:
            assert start == len(row.state), f"a state after {len(row.state)} tokens goes on at {start}"
            row.state += known[start:end]
        assert end <= self._room(row), "no block for the last token"
        groups = self._capacity.groups
        for group in range(groups.total):
            first = 0 if group < groups.full else max(start + 1 - groups.window, 0)
            self._attend(row.blocks[group :: groups.total], known[:end], start, first)
        row.computed = end

    def _attend(self, blocks: list[int], tokens: list[int], start: int, first: int) -> None:
        """Write the tokens from `start` on into a group's blocks, then read all from `first` on."""
        size, end = self._block_size, len(tokens)
        for block in set(blocks[start // size : (end - 1) // size + 1]):
            assert block != NO_BLOCK, "tokens are written where there is no block"
            assert self._holders[block] == 1, f"block {block} is written and has {self._holders[block]} holders"
        if self._check_contents:
            assert NO_BLOCK not in blocks[first // size :], "a token attends to what slid"
            slots = (np.array(blocks)[:, None] * size + np.arange(size)).ravel()[:end]
            content = np.array(tokens)
            self.memory.slots[slots[start:]] = content[start:]
            assert (self.memory.slots[slots] == content)[first:].all(), "a block holds another sequence's tokens"

    def _slide(self, row: FakeRow) -> None:
        """Let go of blocks behind the window: a plan that is made from now on may give them to another row."""
        groups = self._capacity.groups
        next_token = min(row.computed, len(row.tokens) - 1)
        spans = max(next_token + 1 - groups.window, 0) // self._block_size
        for group in range(groups.full, groups.total):
            behind = slice(group, spans * groups.total, groups.total)
            self._let_go(row.blocks[behind])
            row.blocks[behind] = [NO_BLOCK] * len(row.blocks[behind])

    def _let_go(self, blocks: list[int]) -> None:
        for block in blocks:
            if block != NO_BLOCK:
                self._holders[block] -= 1

    def _room(self, row: FakeRow) -> int:
        """Tokens that the row has blocks for."""
        return len(row.blocks) // self._capacity.groups.total * self._block_size

    def _first_state(self, new: NewSequence) -> list[int]:
        """A copy of the snapshot that a row begins with."""
        if not self._capacity.state_bytes or not new.computed:
            assert new.state < 0, f"row {new.row} begins with a state that it has no use for"
            return []
        assert new.state >= 0, f"row {new.row} begins after {new.computed} tokens without a state"
        state = self.memory.snapshots[new.state]
        assert state == new.tokens[: new.computed].tolist(), f"snapshot {new.state} is another sequence's state"
        return state.copy()

    def _scores(self, row: FakeRow, start: int, count: int) -> PromptLogprobs | None:
        """Log-probabilities of the prompt's tokens after the computed ones: -1 for the likeliest, and so on."""
        most = row.sampling.prompt_logprobs
        ends = range(start + 1, min(start + count + 1, row.prompt))
        if most is None or not ends:
            return None
        befores = [row.tokens[end - 1] for end in ends]
        pairs = zip(befores, row.tokens[start + 1 :], strict=False)
        ranks = np.array([(token - before - 1) % self._capacity.vocab_size + 1 for before, token in pairs], np.int32)
        ids = np.array([list(self._successors(before, most)) for before in befores], np.int32)
        values = np.tile(-np.arange(1, most + 1, dtype=np.float32), (len(ends), 1))
        return PromptLogprobs.from_arrays(start + 1, -ranks.astype(np.float32), ranks, ids, values)

    def _logprobs(self, token: int, top: int | None) -> Logprobs | None:
        """The chosen token is the likeliest, its successors follow: -1, -2, ..."""
        if top is None:
            return None
        return Logprobs(-1.0, [token, *self._successors(token, top - 1)][:top], [-1.0 - rank for rank in range(top)], 1)

    def _allowed_successor(self, token: int, mask: MaskArray) -> int:
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert len(allowed), "a mask that allows nothing"
        return int(allowed[np.searchsorted(allowed, token + 1) % len(allowed)])

    def _verified(self, token: int, guessed: list[int], masks: list[MaskArray] | None) -> list[int]:
        """The tokens that follow `token` as far as the guess had them, and the one after. `masks`: at each place."""
        sampled: list[int] = []
        for place, guess in enumerate([*guessed, None]):
            token = next(self._successors(token, 1)) if masks is None else self._allowed_successor(token, masks[place])
            sampled.append(token)
            if token != guess:
                break
        return sampled

    def _successors(self, token: int, count: int) -> Iterator[int]:
        for _ in range(count):
            token = (token + 1) % self._capacity.vocab_size
            yield token
