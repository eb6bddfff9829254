"""One rank's computation of steps: rows, model, attention, sampler. Knows nothing of processes."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, pairwise
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.logprobs import Logprobs, PromptLogprobs
from ...scheduler.plan import IntArray, LongArray, MaskArray, MaskSource, StepPlan, StepResult
from ..attention.backend import AttentionBackend
from ..attention.host_cache import HostCache
from ..config import LOGITS_PIECE
from ..cpu.program import StepRun
from ..gpu.graphs import DecodeGraphs, StaticStep
from ..layers.step_context import StepContext
from ..models.interfaces import Decoder
from ..models.native_decoder import NativeDecoder
from ..step_adapters import AdapterBlocks, RankAdapter, StepAdapters
from ..step_batch import SAMPLING_DTYPE, HostCopy, SampledTokens, to_device
from .logprobs import sampled_logprobs
from .row_states import RowStates, StepInputs
from .sampler import choose_sampler
from .step_drafters import StepDrafter

_NONE: IntArray = np.zeros(0, np.int32)


class _RunnerStep:
    """A plan and its progress.

    `inputs` are gathered as soon as rows may change, `begun` is set with the first kernel, `context` is there unless
    the step was recorded. A step that is computed
    beside the caller is `pending`, and chooses `samples` by itself; others are `computed` on the spot. `tokens` [S] are
    those that the host chose or completed, and `chosen` their copy; a stage that is not the last has none. `logits` are
    there of a step that was computed and waits for its masks. `sample_logits` [W, vocabulary] are kept for samples that
    want log-probabilities, and `scored_logits` for the prompt's tokens, until they are `prompt_logprobs`.
    """

    def __init__(self, plan: StepPlan, mask_source: MaskSource | None) -> None:
        self.plan = plan
        self._mask_source = mask_source
        self.masks: MaskArray | None = None
        self.logits: Tensor | None = None
        self.inputs: StepInputs | None = None
        self.begun = False
        self.context: StepContext | None = None
        self.pending: StepRun | None = None
        self.samples: SampledTokens | None = None
        self.computed = False
        self.tokens: Tensor | None = None
        self.chosen: HostCopy | None = None
        self.sample_logits: Tensor | None = None
        self.scored_logits: Iterator[Tensor] | None = None
        self.prompt_logprobs: list[tuple[int, PromptLogprobs]] = []
        self.error: Exception | None = None

    def make_masks(self) -> None:
        """Have the masks, if the step has some, and let kernels go on that wait for them."""
        source, self._mask_source = self._mask_source, None
        if source is None:
            return
        try:
            self.masks = source()
        finally:
            if self.pending is not None:
                self.pending.provide_masks(self.masks)

    def drop_masks(self) -> None:
        """Let kernels go on that wait for masks which will not come."""
        if self._mask_source is not None and self.pending is not None:
            self.pending.provide_masks(None)
        self._mask_source = None

    @property
    def tokens_follow(self) -> bool:
        """Whether its tokens are there, or will be without the host when the next step begins."""
        if self.error is not None or self.inputs is None:
            return False
        return self.tokens is not None or (self.pending is not None and not self.inputs.needs_host)


class ModelRunner:
    """Computes plans strictly in order; for one thread. A step that our kernels compute begins as soon as the step
    before it is computed and its tokens are chosen. Kernels choose those that are sampled from the logits as they are;
    the host chooses the others, and keeps logits that are to be reported, when the caller asks for the step's result.
    Everything else of the next step is prepared by then. `draft`: what proposes tokens where plans say so."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        rows: RowStates,
        device: torch.device,
        draft: StepDrafter | None = None,
    ) -> None:
        self.decoder, self.attention, self._rows, self._device = decoder, attention, rows, device
        self.draft = draft
        self.dictate: Callable[[StepPlan, IntArray], IntArray] | None = None
        """For measurements: the tokens [S] to go on with in place of those [S] that a plan sampled. No step may begin
        before the one before it has a result."""
        self.graphs: DecodeGraphs | None = None
        """Recorded decode steps, made around `compute_static`; the attention must be able to."""
        self._sample = choose_sampler(device)
        self._steps: deque[_RunnerStep] = deque()
        self._host_cache: HostCache | None = None

    def allocate(self, blocks: int, host_blocks: int = 0) -> None:
        """Make a cache of `blocks` blocks, with `host_blocks` in the host's memory, and begin anew: rows refer to the
        cache they were filled with."""
        self._forget_graphs()
        self._rows.clear()
        self.attention.allocate(blocks)
        if self.draft is not None:
            self.draft.attention.allocate(blocks)
            self.draft.forget(blocks)
        self._host_cache = None
        if host_blocks:
            caches = [self.attention] if self.draft is None else [self.attention, self.draft.attention]
            views = [view for cache in caches for view in cache.device_blocks]
            self._host_cache = HostCache(views, host_blocks)

    @property
    def all_graphs(self) -> list[DecodeGraphs]:
        """Its own, and those of the model that drafts."""
        found = self.graphs, None if self.draft is None else self.draft.graphs
        return [each for each in found if each is not None]

    def forget_adapter(self, adapter: RankAdapter) -> None:
        """See `RowStates.forget_adapter`."""
        self._rows.forget_adapter(adapter)

    def _forget_graphs(self) -> None:
        for each in self.all_graphs:
            each.forget()

    @torch.inference_mode()
    def compute_worst_step(self, tokens: int, sampled: int, adapted: bool) -> None:
        """Compute the step that takes the most memory, over a cache of one block that all rows share: `tokens` tokens,
        with room for adapters if they may be `adapted`, and `sampled` of the next ones drawn. Whoever measures it
        allocates the cache anew."""
        self.allocate(1)
        counts = self._rows.longest_rows(tokens)
        batch = self._rows.batch(np.arange(len(counts), dtype=np.int32), np.zeros_like(counts), counts)
        nobody = torch.zeros((4, batch.size), dtype=torch.int64, device=self._device)
        adapters = StepAdapters.on_device(AdapterBlocks(nobody, batch.size)) if adapted else None
        context = StepContext(batch, self.attention.begin_step(batch), adapters)
        places = to_device(np.arange(batch.size - min(sampled, batch.size), batch.size), self._device)
        logits = self.decoder.compute_logits(context, (places,))
        assert logits is not None  # only a whole model is measured
        drawn = np.zeros(len(places), SAMPLING_DTYPE)
        drawn["temperature"], drawn["top_p"] = 1.0, 0.9
        HostCopy(self._sample(next(logits), drawn)).read()

    @torch.inference_mode()
    def store_remote_tokens(self, rows: IntArray, positions: IntArray, tokens: IntArray) -> None:
        """Keep `tokens` [S], sampled by the last stage, at `positions` [S] of `rows` [S], before the next plan that
        needs them. On a stage that sampled them itself this changes nothing."""
        self._rows.store_tokens(rows, positions, torch.from_numpy(np.ascontiguousarray(tokens)))

    def run_step(self, plan: StepPlan, masks: MaskSource | None = None) -> StepResult:
        """Compute `plan`'s tokens; on the last stage, sample where it says so and keep the samples in their rows. The
        other stages' results are empty. `masks` makes those of `plan.masked`, and is called when all that can be
        computed without them has begun."""
        self.begin_step(plan, masks)
        return self.finish_step()

    @torch.inference_mode()
    def begin_step(self, plan: StepPlan, masks: MaskSource | None = None) -> None:
        if len(plan.masked) and masks is None:
            raise ValueError(f"step {plan.step} needs masks")
        self._steps.append(_RunnerStep(plan, masks if len(plan.masked) else None))
        self._advance()

    @torch.inference_mode()
    def finish_step(self) -> StepResult:
        """The result of the oldest plan that was begun; the error that computing it raised."""
        step = self._steps[0]
        try:
            if step.error is not None:
                raise step.error
            self._settle(step)
            if self.draft is not None and len(step.plan.proposals):
                result = self._result(step)
                return result._replace(proposals=self.draft.propose(step.plan, result))
        finally:
            step.drop_masks()
            self._steps.popleft()
            self._advance()
        return self._result(step)

    def close(self) -> None:
        """Forget steps that were begun, when none is computed any more."""
        for step in self._steps:
            step.drop_masks()
        self.decoder.close()
        if self.draft is not None:
            self.draft.model.close()
        self._steps.clear()

    def _advance(self) -> None:
        """Prepare and begin every step that can be: the oldest one, and one after the other while the host need not
        choose tokens, or move rows, in between."""
        for before, step in pairwise((None, *self._steps)):
            if step is None or step.begun or step.error is not None:
                continue
            try:
                if step.inputs is None:
                    room = self._rows.has_room_for(step.plan)
                    if before is not None and not (before.begun and room):
                        return
                    if not room:
                        self._forget_graphs()
                    self._rows.apply_plan(step.plan)
                    if self.draft is not None:
                        self.draft.apply_plan(step.plan)
                    step.inputs = self._rows.gather_inputs(step.plan)
                if before is not None and not (before.tokens_follow and self._can_follow(step.plan)):
                    return
                if before is not None:
                    before.make_masks()  # to begin a step may mean to wait for the one before
                self._begin(step, step.inputs)
            except Exception as error:
                step.error = error  # raised when the step's result is asked for

    def _can_follow(self, plan: StepPlan) -> bool:
        """Whether a step may begin before the result of the one before is there: kernels of a CPU go from one to the
        other by themselves, and no block is moved in between."""
        return self._device.type != "cpu" or not len(plan.block_copies)

    @torch.inference_mode()
    def compute_static(self, step: StaticStep) -> list[Tensor]:
        """The `compute` of `DecodeGraphs`: logits, and the states that a head goes on from."""
        batch = self._rows.static_batch(step)
        context = StepContext(batch, self.attention.begin_step(batch), step.adapters)
        logits = self.decoder.compute_logits(context, (torch.arange(batch.size, device=self._device),))
        assert logits is not None  # only a whole model's steps are recorded
        assert isinstance(self.decoder, NativeDecoder)
        return [next(logits), *self.decoder.kept]

    def _replay(self, inputs: StepInputs) -> Tensor | None:
        """The logits of a decode step that is recorded."""
        batch, wanted = inputs.batch, len(inputs.logits_indices)
        if self.graphs is None or inputs.scored is not None or not wanted:
            return None
        if wanted < batch.size and batch.counts.max() > self.graphs.buckets.most:
            return None  # a part of a prompt is computed
        if (found := self.graphs.replay(batch, inputs.adapters)) is None:
            return None
        logits, *kept = found
        if kept:
            cast(NativeDecoder, self.decoder).kept = kept
        return logits if wanted == batch.size else logits[inputs.logits_indices]

    def _begin(self, step: _RunnerStep, inputs: StepInputs) -> None:
        step.begun = True
        if self._host_cache is not None:
            self._host_cache.move(step.plan.block_copies)
        if (logits := self._replay(inputs)) is not None:
            step.computed = True
            self._choose_or_wait(step, inputs, logits)
            return
        step.context = StepContext(inputs.batch, self.attention.begin_step(inputs.batch), inputs.adapters)
        if self._device.type != "cpu":
            self._compute(step, inputs)  # which is queued on the device
        elif len(inputs.logits_indices):
            samples = inputs.samples()
            step.pending = self.decoder.begin_step(step.context, inputs.logits_indices, samples)
            step.samples = None if step.pending is None else samples

    def _settle(self, step: _RunnerStep) -> None:
        """Finish the step, and read everything that the next one will overwrite."""
        inputs, scored = step.inputs, None if step.inputs is None else step.inputs.scored
        if step.pending is None or inputs is None:
            if inputs is not None and not step.computed:
                self._compute(step, inputs)
            if inputs is not None and step.logits is not None:
                step.make_masks()
                self._choose(step, inputs, step.logits)
                step.logits = None
            return
        step.make_masks()
        step.pending.finish()
        if not inputs.needs_host:
            return
        self._choose(step, inputs, step.pending.logits)
        if scored is not None and scored.among is None:
            pieces = step.pending.more_logits(scored.pieces)
            step.prompt_logprobs = [] if pieces is None else scored.read(pieces)
            step.scored_logits = None

    def _compute(self, step: _RunnerStep, inputs: StepInputs) -> None:
        """Compute the step here and now, and choose its tokens; on a GPU all that is queued."""
        assert step.context is not None
        step.computed = True
        main = (inputs.logits_indices,) if len(inputs.logits_indices) else ()
        pieces = () if inputs.scored is None or inputs.scored.among is not None else inputs.scored.pieces
        logits = self.decoder.compute_logits(step.context, (*main, *pieces))
        if logits is not None:
            self._choose_or_wait(step, inputs, next(logits) if main else None)
            step.scored_logits = logits if pieces else step.scored_logits

    def _choose_or_wait(self, step: _RunnerStep, inputs: StepInputs, logits: Tensor | None) -> None:
        """Choose tokens now, or when the step has its masks."""
        if inputs.masked is None or logits is None:
            self._choose(step, inputs, logits)
        else:
            step.logits = logits

    def _choose(self, step: _RunnerStep, inputs: StepInputs, logits: Tensor | None) -> None:
        """Choose the tokens that kernels did not, from `logits` [L, vocabulary], and keep logits to be reported."""
        if step.samples is None:
            inputs = inputs.with_masks_on_host()
        if logits is None:
            step.tokens = torch.zeros(0, dtype=torch.int32, device=self._device)
            return
        own = logits if inputs.selected is None else logits[self._to(inputs.selected)]
        if step.samples is None and step.pending is None:
            tokens = self._sample(own, inputs.sampling).to(torch.int32)
        else:
            tokens = torch.empty(len(inputs.rows), dtype=torch.int32)
            if step.samples is not None:
                tokens[torch.from_numpy(inputs.unprocessed)] = torch.from_numpy(step.samples.tokens)
        if len(inputs.processed):
            # Changed in a copy: the rows without processors pay nothing for the others.
            at, processed = self._to(inputs.processed), inputs.processed
            changed = own[at].float()
            self._rows.process_logits(inputs, changed, step.masks)
            sampling = None if inputs.sampling is None else inputs.sampling[processed]
            tokens[at] = self._sample(changed, sampling).to(torch.int32)
        self._rows.store_tokens(inputs.rows, inputs.positions, tokens)
        step.tokens, step.chosen = tokens, HostCopy(tokens)
        if inputs.logprobs:
            step.sample_logits = own[self._to(np.fromiter(inputs.logprobs, np.int64))]
        if inputs.scored is not None and inputs.scored.among is not None:
            step.scored_logits = iter(torch.split(logits[self._to(inputs.scored.among)], LOGITS_PIECE))

    def _result(self, step: _RunnerStep) -> StepResult:
        inputs, tokens, chosen, scores = step.inputs, step.tokens, step.chosen, step.prompt_logprobs
        if inputs is None or (tokens is None and step.samples is None):
            return StepResult(step.plan.step, _NONE, _NONE, _NONE, _NONE)
        if tokens is None:
            assert step.samples is not None
            return _step_result(step.plan, inputs, self._dictated(step.plan, inputs, step.samples.tokens))
        if inputs.scored is not None and step.scored_logits is not None:
            scores = inputs.scored.read(step.scored_logits)
        logprobs = None
        if step.sample_logits is not None:
            wanted = tokens[self._to(np.fromiter(inputs.logprobs, np.int64))].long()
            logprobs = sampled_logprobs(step.sample_logits, wanted, inputs.logprobs, len(tokens))
        told = _NONE if chosen is None else self._dictated(step.plan, inputs, chosen.read())
        return _step_result(step.plan, inputs, told, logprobs or (), scores)

    def _dictated(self, plan: StepPlan, inputs: StepInputs, tokens: IntArray) -> IntArray:
        if self.dictate is None:
            return tokens
        tokens = self.dictate(plan, tokens)
        self._rows.store_tokens(inputs.rows, inputs.positions, torch.from_numpy(tokens))
        return tokens

    def _to(self, places: LongArray) -> Tensor:
        return to_device(places, self._device)


def _step_result(
    plan: StepPlan,
    inputs: StepInputs,
    tokens: IntArray,
    logprobs: Sequence[Logprobs | None] = (),
    scores: Sequence[tuple[int, PromptLogprobs]] = (),
) -> StepResult:
    """The result of a step that chose `tokens` [S]; of those at drafts, the ones that count."""
    if not len(plan.drafts):
        ones = np.ones_like(inputs.rows)
        return StepResult(plan.step, inputs.rows, inputs.positions, ones, tokens, logprobs, scores)
    rows, offsets, counts, kept = verify_samples(plan, tokens)
    told = [*compress(logprobs, kept.tolist())]
    return StepResult(plan.step, rows, offsets, counts, tokens[kept], told, scores)


class VerifiedSamples(NamedTuple):
    """Rows that were sampled, the position of the first token of each, how many there are, and which of all S samples
    they are."""

    rows: IntArray
    offsets: IntArray
    counts: IntArray
    kept: NDArray[np.bool_]


def verify_samples(plan: StepPlan, tokens: IntArray) -> VerifiedSamples:
    """Hold the samples of a plan with drafts, int32 [S] row after row, against them."""
    # Of few numbers Python's lists are compared sooner than numpy's arrays, and of many hardly later.
    sampled, drafted = tokens.tolist(), plan.drafted.tolist()
    counts, kept = list[int](), list[bool]()
    first = draft = 0
    for length in plan.drafts[plan.samples].tolist():
        right = 0
        while right < length and sampled[first + right] == drafted[draft + right]:
            right += 1
        counts.append(right + 1)
        kept += [True] * (right + 1) + [False] * (length - right)
        first, draft = first + length + 1, draft + length
    offsets = (plan.starts + plan.counts - plan.drafts)[plan.samples]
    return VerifiedSamples(plan.rows[plan.samples], offsets, np.array(counts, np.int32), np.array(kept, np.bool_))
