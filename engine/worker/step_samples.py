"""The tokens that a step samples, wherever it is computed: chosen by the host from logits, or completed by it, and read
with the log-probabilities that rows want beside them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.logprobs import Logprobs, PromptLogprobs
from ...scheduler.plan import IntArray, LongArray, MaskArray
from ..config import LOGITS_PIECE
from ..layers.step_context import StepContext
from ..models.interfaces import Decoder
from ..step_batch import HostCopy, to_device
from .logprobs import sampled_logprobs
from .row_states import RowStates, StepInputs
from .sampler import choose_sampler

NO_TOKENS: IntArray = np.zeros(0, np.int32)


class StepSamples(NamedTuple):
    """What the outside learns of a step."""

    tokens: IntArray
    """[S] those of `StepInputs.rows`."""
    logprobs: Sequence[Logprobs | None] = ()
    """The log-probabilities of each token, None where the row wants none; empty where no row wants any."""
    prompt_logprobs: Sequence[tuple[int, PromptLogprobs]] = ()
    """(row, those of the prompt's tokens that follow computed ones)."""


class StepLogits(NamedTuple):
    """The logits that a decoder computed of a step, none of them read."""

    wanted: Tensor | None
    """[L, vocabulary] of `StepInputs.logits_indices`; None: there are none."""
    scored: Iterator[Tensor] | None = None
    """[S, vocabulary] of each piece of a prompt that is too long to be computed with the others."""


def compute_step_logits(decoder: Decoder, context: StepContext, inputs: StepInputs) -> StepLogits | None:
    """Compute a step in the caller's thread, or queue it on the device. None: a stage after this one has the logits."""
    wanted = (inputs.logits_indices,) if len(inputs.logits_indices) else ()
    scored = inputs.scored
    pieces = () if scored is None or scored.among is not None else scored.pieces
    logits = decoder.compute_logits(context, (*wanted, *pieces))
    if logits is None:
        return None
    return StepLogits(next(logits) if wanted else None, logits if pieces else None)


class ChosenTokens(NamedTuple):
    """The tokens of a step, and copies of the logits that are to be reported."""

    inputs: StepInputs
    tokens: Tensor
    """int32 [S], where the logits were."""
    host_tokens: HostCopy | None
    """The same on their way to the host; None: there are none."""
    sample_logits: Tensor | None = None
    """[W, vocabulary] of the samples that `StepInputs.logprobs` names."""
    scored_logits: Iterator[Tensor] | None = None
    """[S, vocabulary] of each of `ScoredTokens.pieces`."""

    def read(self) -> StepSamples:
        """Wait for the tokens; compute the log-probabilities that are wanted."""
        inputs = self.inputs
        scores: Sequence[tuple[int, PromptLogprobs]] = ()
        if inputs.scored is not None and self.scored_logits is not None:
            scores = inputs.scored.read(self.scored_logits)
        logprobs: Sequence[Logprobs | None] = ()
        if self.sample_logits is not None:
            samples = to_device(np.fromiter(inputs.logprobs, np.int64), self.tokens.device)
            logprobs = sampled_logprobs(
                self.sample_logits, self.tokens[samples].long(), inputs.logprobs, len(self.tokens)
            )
        tokens = NO_TOKENS if self.host_tokens is None else self.host_tokens.read()
        return StepSamples(tokens, logprobs, scores)


class TokenChooser:
    """Chooses the tokens of steps from their logits, as `rows` ask, and stores them in the rows. `device`: where the
    logits are."""

    def __init__(self, rows: RowStates, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._sample = choose_sampler(device)

    def choose(
        self, inputs: StepInputs, logits: StepLogits, masks: MaskArray | None, sampled: IntArray | None = None
    ) -> ChosenTokens:
        """The tokens of a step with these `logits`. `sampled`: those of `inputs.unprocessed`, which kernels have chosen
        already; None: none were."""
        wanted = logits.wanted
        if wanted is None:
            nothing = torch.zeros(0, dtype=torch.int32, device=self._device)
            return ChosenTokens(inputs, nothing, None, scored_logits=logits.scored)
        own = wanted if inputs.selected is None else wanted[self._to(inputs.selected)]
        if sampled is None:
            tokens = self._sample(own, inputs.sampling).to(torch.int32)
        else:
            tokens = torch.empty(len(inputs.rows), dtype=torch.int32)
            tokens[torch.from_numpy(inputs.unprocessed)] = torch.from_numpy(sampled)
        changed: Tensor | None = None
        if len(inputs.processed):
            # Changed in a copy: the rows without processors pay nothing for the others.
            places = self._to(inputs.processed)
            changed = own[places].float()
            self._rows.process_logits(inputs, changed, masks)
            sampling = None if inputs.sampling is None else inputs.sampling[inputs.processed]
            tokens[places] = self._sample(changed, sampling).to(torch.int32)
        self._rows.store_tokens(inputs.rows, inputs.positions, tokens)
        host_tokens = HostCopy(tokens)
        sample_logits = self._reported_logits(inputs, own, changed) if inputs.logprobs else None
        scored_logits = logits.scored
        if inputs.scored is not None and inputs.scored.among is not None:
            scored_logits = iter(torch.split(wanted[self._to(inputs.scored.among)], LOGITS_PIECE))
        return ChosenTokens(inputs, tokens, host_tokens, sample_logits, scored_logits)

    def _reported_logits(self, inputs: StepInputs, own: Tensor, changed: Tensor | None) -> Tensor:
        """The logits [W, vocabulary] of the samples whose log-probabilities are wanted. `changed`: those of
        `inputs.processed`."""
        samples = np.fromiter(inputs.logprobs, np.int64)
        processed = np.flatnonzero([report.processed for report in inputs.logprobs.values()])
        if changed is not None and len(processed) == len(samples) and np.array_equal(samples, inputs.processed):
            return changed  # no copy of it, which takes as long as choosing
        logits = _copy_rows(own, samples) if own.device.type == "cpu" else own[self._to(samples)]
        if changed is not None and len(processed):
            logits = logits.float()
            logits[self._to(processed)] = changed[self._to(np.searchsorted(inputs.processed, samples[processed]))]
        return logits

    def _to(self, places: LongArray) -> Tensor:
        return to_device(places, self._device)


def _copy_rows(logits: Tensor, rows: LongArray) -> Tensor:
    """Rows of a host's logits, copied by this thread alone: behind a copy of torch's, a thread of OpenMP would spin on
    a core that the next step's threads want."""
    same_size = torch.int16 if logits.element_size() == 2 else torch.int32
    return torch.from_numpy(logits.view(same_size).numpy()[rows]).view(logits.dtype)
