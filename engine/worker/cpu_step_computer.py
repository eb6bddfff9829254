"""Steps on a CPU. A decoder that was recorded as a program (`cpu/program.py`) computes them on threads beside the
caller, one after the other; any other decoder computes in the caller's thread when a step's result is asked for."""

from collections.abc import Mapping, Sequence

from ...core.eager_reason import EagerReason
from ...core.logprobs import PromptLogprobs
from ...scheduler.plan import MaskArray, MaskSource, StepPlan
from ..attention.backend import AttentionBackend
from ..cpu.program import StepRun
from ..layers.step_context import StepContext
from ..models.interfaces import Decoder
from ..step_batch import SampledTokens
from .row_states import RowStates, StepInputs
from .step_computer import NO_STORES, BegunStep, RowStores
from .step_samples import NO_TOKENS, ChosenTokens, StepLogits, StepSamples, TokenChooser, compute_step_logits


class CpuStepComputer:
    """The `StepComputer` of a CPU."""

    graphs = None
    """A CPU replays programs: see `NativeDecoder`."""
    eager_steps: Mapping[EagerReason, int] = {}

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        rows: RowStates,
        stores: RowStores = NO_STORES,
    ) -> None:
        self.decoder = decoder
        self.attention = attention
        self.stores = stores
        self._chooser = TokenChooser(rows, rows.device)

    def follows_unread(self, plan: StepPlan) -> bool:
        """Kernels go from one step to the next by themselves, unless something has to be copied or made in between."""
        made = any(sequence.encoded is not None for sequence in plan.new)
        return not made and not len(plan.block_copies) and not len(plan.state_copies)

    def begin(self, plan: StepPlan, inputs: StepInputs, masks: MaskSource | None) -> BegunStep:
        """See `StepComputer.begin`. A step without logits is not begun beside the caller."""
        batch = inputs.batch
        stores = () if self.stores == NO_STORES else self.stores.begin_step(batch, plan)
        context = StepContext(batch, self.attention.begin_step(batch), inputs.adapters, *stores)
        if len(inputs.logits_indices):
            samples = inputs.samples()
            run = self.decoder.begin_step(context, inputs.logits_indices, samples)
            if run is not None:
                return _ProgramStep(run, inputs, samples, masks, self._chooser)
        return _DeferredStep(self.decoder, context, inputs, masks, self._chooser)


class _ProgramStep:
    """A step that kernels compute beside the caller. They choose `samples`, those tokens that are sampled from the
    logits as they are; None: the host chooses all."""

    def __init__(
        self,
        run: StepRun,
        inputs: StepInputs,
        samples: SampledTokens | None,
        mask_source: MaskSource | None,
        chooser: TokenChooser,
    ) -> None:
        self._run = run
        self._inputs = inputs
        self._samples = samples
        self._mask_source = mask_source
        self._chooser = chooser
        self._masks: MaskArray | None = None
        self._chosen: ChosenTokens | None = None
        self._prompt_logprobs: Sequence[tuple[int, PromptLogprobs]] = ()

    @property
    def tokens_follow(self) -> bool:
        return not self._inputs.needs_host

    def make_masks(self) -> None:
        source = self._mask_source
        self._mask_source = None
        if source is None:
            return
        try:
            self._masks = source()
        finally:
            self._run.provide_masks(self._masks)

    def settle(self) -> None:
        self.make_masks()
        self._run.finish()
        inputs = self._inputs
        if not inputs.needs_host:
            return
        sampled = NO_TOKENS if self._samples is None else self._samples.tokens
        self._chosen = self._chooser.choose(inputs, StepLogits(self._run.logits), self._masks, sampled)
        if inputs.scored is not None and inputs.scored.among is None:
            pieces = self._run.more_logits(inputs.scored.pieces)
            self._prompt_logprobs = () if pieces is None else inputs.scored.read(pieces)

    def read(self) -> StepSamples:
        if self._chosen is not None:
            samples = self._chosen.read()
            return samples._replace(prompt_logprobs=self._prompt_logprobs) if self._prompt_logprobs else samples
        return StepSamples(NO_TOKENS if self._samples is None else self._samples.tokens)

    def abandon(self) -> None:
        if self._mask_source is not None:
            self._run.provide_masks(None)
        self._mask_source = None


class _DeferredStep:
    """A step that is computed in the caller's thread when it is settled."""

    tokens_follow = False

    def __init__(
        self,
        decoder: Decoder,
        context: StepContext,
        inputs: StepInputs,
        mask_source: MaskSource | None,
        chooser: TokenChooser,
    ) -> None:
        self._decoder = decoder
        self._context = context
        self._inputs = inputs
        self._mask_source = mask_source
        self._chooser = chooser
        self._chosen: ChosenTokens | None = None

    def make_masks(self) -> None:
        """No kernel waits for them."""

    def settle(self) -> None:
        logits = compute_step_logits(self._decoder, self._context, self._inputs)
        if logits is None:
            return
        masks = None if self._mask_source is None else self._mask_source()
        self._chosen = self._chooser.choose(self._inputs.with_masks_on_host(), logits, masks)

    def read(self) -> StepSamples | None:
        return None if self._chosen is None else self._chosen.read()

    def abandon(self) -> None:
        """No kernel waits for masks."""
