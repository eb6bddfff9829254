"""Steps on a device that works off a queue, as a GPU does: a step is queued as a whole behind the one before, launch by
launch or as a recorded graph, and nothing is waited for until its tokens are read."""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ...core.eager_reason import EagerReason
from ...scheduler.plan import IntArray, MaskSource, StepPlan
from ..attention.backend import AttentionBackend
from ..gpu.graphs import StaticStep, StepGraphs
from ..layers.step_context import StepContext
from ..models.interfaces import Decoder
from ..models.native_decoder import NativeDecoder
from ..step_adapters import AdapterBlocks, StepAdapters
from ..step_batch import SAMPLING_DTYPE, HostCopy, to_device
from ..step_states import StepStates
from .row_states import RowStates, StepInputs
from .sampler import choose_sampler
from .stage_link import StageLink
from .step_computer import NO_STORES, BegunStep, RowStores
from .step_samples import ChosenTokens, StepLogits, StepSamples, TokenChooser, compute_step_logits


class DeviceStepComputer:
    """The `StepComputer` of a device with a queue."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        rows: RowStates,
        device: torch.device,
        stores: RowStores = NO_STORES,
        link: StageLink | None = None,
    ) -> None:
        """`link`: to the stages beside this one, where the model has several."""
        self.decoder = decoder
        self.attention = attention
        self.stores = stores
        self.link = link
        self.graphs: StepGraphs | None = None
        """Recorded steps, made around `compute_static`; the attention must be able to."""
        self.eager_steps: Counter[EagerReason] = Counter()
        self._rows = rows
        self._device = device
        self._chooser = TokenChooser(rows, device)

    def follows_unread(self, plan: StepPlan) -> bool:
        """All that a step does is queued, copies of blocks included."""
        return True

    def begin(self, plan: StepPlan, inputs: StepInputs, masks: MaskSource | None) -> BegunStep:
        """See `StepComputer.begin`."""
        batch = inputs.batch
        stores = self.stores.begin_step(batch, plan)
        states, _ = stores
        outputs = self._replay(inputs, None if states is None else states.states)
        if outputs is not None:
            logits = self._read_outputs(inputs, outputs)
        else:
            context = StepContext(batch, self.attention.begin_step(batch), inputs.adapters, *stores)
            logits = compute_step_logits(self.decoder, context, inputs)
        return _QueuedStep(inputs, logits, masks, self._chooser)

    @torch.inference_mode()
    def compute_static(self, step: StaticStep) -> list[Tensor]:
        """The `compute` of `StepGraphs`: logits, and the states that a head goes on from; of a stage that is not the
        last one no logits, and the states for the next."""
        batch = self._rows.static_batch(step)
        states = self.stores.states
        recorded = None
        if states is not None and step.moves is not None:
            recorded = states.recorded_step(batch, step.moves)
        context = StepContext(batch, self.attention.begin_step(batch), step.adapters, recorded)
        places = torch.arange(batch.size, device=self._device) if step.logits_at is None else step.logits_at
        with nullcontext() if self.link is None else self.link.recording():
            logits = self.decoder.compute_logits(context, (places,))
        assert isinstance(self.decoder, NativeDecoder)
        if logits is None:
            sent = None if self.link is None else self.link.take_sent()
            assert sent is not None, "a stage without logits sends states"
            return [sent.new_empty(len(places), 0), sent]
        return [next(logits), *self.decoder.kept]

    @torch.inference_mode()
    def compute_worst_step(self, tokens: int, rows: int, sampled: int, adapted: bool) -> None:
        """Compute the step that takes the most memory, over a cache of one block that all rows share, which the caller
        allocates before and anew afterwards: `tokens` tokens, with room for adapters if they may be `adapted`, and
        `sampled` of the next ones drawn; where layers keep states also one token of each of `rows` rows, whose states
        it copies."""
        self._compute_unread(self._rows.longest_rows(tokens), sampled, adapted)
        if self.stores.states is not None:
            self._compute_unread(np.ones(rows, np.int32), sampled, adapted)

    def _compute_unread(self, counts: IntArray, sampled: int, adapted: bool) -> None:
        """Compute the first `counts` tokens of so many rows, and draw the next of the last `sampled`."""
        batch = self._rows.batch(np.arange(len(counts), dtype=np.int32), np.zeros_like(counts), counts)
        nobody = torch.zeros((4, batch.size), dtype=torch.int64, device=self._device)
        adapters = StepAdapters.on_device(AdapterBlocks(nobody, batch.size)) if adapted else None
        context = StepContext(batch, self.attention.begin_step(batch), adapters, *self.stores.begin_step(batch))
        places = to_device(np.arange(batch.size - min(sampled, batch.size), batch.size), self._device)
        logits = self.decoder.compute_logits(context, (places,))
        assert logits is not None  # only what is not in stages is measured
        drawn = np.zeros(len(places), SAMPLING_DTYPE)
        drawn["temperature"], drawn["top_p"] = 1.0, 0.9
        HostCopy(choose_sampler(self._device)(next(logits), drawn)).read()

    def _replay(self, inputs: StepInputs, states: StepStates | None) -> Sequence[Tensor] | None:
        """The outputs of a step that is recorded, see `compute_static`; None: it is to be launched."""
        batch = inputs.batch
        if self.graphs is None:
            self.eager_steps[EagerReason.NOT_RECORDED] += 1
            return None
        moved = batch.moved
        by_grid = moved is not None and (moved.grid is not None or moved.ends is not None)
        prompts = self._has_prompts(inputs)
        if inputs.scored is not None or batch.embedded is not None or (prompts and by_grid):
            self.eager_steps[EagerReason.PROMPT] += 1
            return None
        if self.link is not None:
            self.link.places = batch.size
        return self.graphs.replay(batch, inputs.adapters, states, inputs.logits_indices if prompts else None)

    def _has_prompts(self, inputs: StepInputs) -> bool:
        """Whether some row computes more places than one with drafts may have in a graph, or none has logits."""
        wanted, batch = len(inputs.logits_indices), inputs.batch
        assert self.graphs is not None
        return not wanted or (wanted < batch.size and int(batch.counts.max()) > self.graphs.buckets.most)

    def _read_outputs(self, inputs: StepInputs, outputs: Sequence[Tensor]) -> StepLogits | None:
        """The logits of a replayed step; None: its states were sent to the next stage."""
        logits, *kept = outputs
        if self.link is not None and not logits.shape[1]:
            self.link.send(kept[0].clone())  # the next replay writes to it
            return None
        if kept:
            cast(NativeDecoder, self.decoder).kept = kept
        wanted = len(inputs.logits_indices)
        if self._has_prompts(inputs) or wanted == inputs.batch.size:
            return StepLogits(logits if wanted else None)
        return StepLogits(logits[inputs.logits_indices])


class _QueuedStep:
    """A step that is queued. Its tokens are chosen behind it at once, or, where the host has to mask its logits, when
    it is settled. `logits` None: this rank has none."""

    def __init__(
        self, inputs: StepInputs, logits: StepLogits | None, mask_source: MaskSource | None, chooser: TokenChooser
    ) -> None:
        self._inputs = inputs.with_masks_on_host()
        self._mask_source = mask_source
        self._chooser = chooser
        self._unmasked: StepLogits | None = None
        self._chosen: ChosenTokens | None = None
        if logits is not None and mask_source is None:
            self._chosen = chooser.choose(self._inputs, logits, None)
        else:
            self._unmasked = logits

    @property
    def tokens_follow(self) -> bool:
        return self._chosen is not None

    def make_masks(self) -> None:
        """Nothing that is queued waits for them."""

    def settle(self) -> None:
        if self._unmasked is None or self._mask_source is None:
            return
        self._chosen = self._chooser.choose(self._inputs, self._unmasked, self._mask_source())
        self._unmasked = None

    def read(self) -> StepSamples | None:
        return None if self._chosen is None else self._chosen.read()

    def abandon(self) -> None:
        """Nothing that is queued waits for masks."""
