"""The interfaces between architectures and the worker: a decoder, and the builder that makes one from a checkpoint."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from ..checkpoint.adapter_targets import AdapterTargets
from ..checkpoint.build_context import BuildContext
from ..checkpoint.model_spec import DecoderShape
from ..checkpoint.served_forms import ServedForms
from ..config import ParallelConfig
from ..cpu.program import StepRun
from ..layers.step_context import StepContext
from ..step_batch import SampledTokens

log = logging.getLogger(__name__)

LogitsIterator: TypeAlias = Iterator[Tensor]
"""Logits [S, vocabulary] of each selection of places, computed when the iterator comes to it, good until it goes on."""


class Decoder(Protocol):
    """A causal language model over the packed tokens of several sequences, or one rank's share of it."""

    def compute_logits(self, context: StepContext, selections: Sequence[Tensor]) -> LogitsIterator | None:
        """Compute the tokens of `context`; returns the logits of each selection of packed places [S], ascending, in the
        model's dtype or in float32. No place is in two of them.

        All ranks of the last stage have the same logits, and must ask for equally many before the next step. Other
        stages hand their hidden states on and return None.
        """

    def begin_step(
        self, context: StepContext, logits_indices: Tensor, samples: SampledTokens | None = None
    ) -> StepRun | None:
        """Begin to compute the tokens of `context`, and logits of the packed places `logits_indices` [S], ascending,
        beside the caller and behind the steps begun before. With `samples` tokens are sampled, too, and stored in the
        batch's token ids, so that the next step may begin behind this one. None: only `compute_logits` can compute
        this step."""

    def close(self) -> None:
        """End the threads of `begin_step`, when everything begun is computed; no step may follow."""


class BuiltDecoder(NamedTuple):
    """A decoder of one rank, and the shape of the whole model. `adapters`: the products that adapters may change; None
    where they change none. `served`: what its matrices are kept as, where that is known."""

    decoder: Decoder
    shape: DecoderShape
    adapters: AdapterTargets | None = None
    served: ServedForms | None = None


_LONGEST_BY_DEFAULT = 1 << 20
"""Tokens of a sequence where the configuration names no number: tables for each position of each row take memory."""


def default_length(longest: int) -> int:
    """The length that is served of a checkpoint that claims texts of `longest` tokens."""
    if longest > _LONGEST_BY_DEFAULT:
        message = "texts of %d tokens are served, of the %d that config.json claims; max_model_len serves longer ones"
        log.warning(message, _LONGEST_BY_DEFAULT, longest)
    return min(longest, _LONGEST_BY_DEFAULT)


@dataclass(frozen=True, slots=True)
class CheckpointBuilder(ABC):
    """A checkpoint that can be served: the facts known before its weights are read, and how to build its decoder.
    `dtype`: the name of the dtype that the weights are stored in. `max_position`: the length of the longest sequence in
    tokens; `default_length`, where the configuration gives none."""

    dtype: str
    max_position: int
    default_length: int

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep a recurrent state."""
        return False

    @property
    def length_reason(self) -> str:
        """Why `max_position` is less than config.json says; empty where it is not."""
        return ""

    @property
    def attends_itself(self) -> bool:
        """Whether it is known already that the decoder will attend by itself (see `DecoderShape.attends_itself`)."""
        return False

    @abstractmethod
    def build(self, context: BuildContext) -> BuiltDecoder:
        """Read the weights.

        Raises:
            CheckpointError: the weights are broken, do not fit config.json, or can't be quantised.
        """

    @abstractmethod
    def dry_run(self, context: BuildContext, parallel: ParallelConfig) -> str:
        """Look for everything that `build` would refuse, without reading weights; returns what this can't find, for
        people, or nothing.

        Raises:
            CheckpointError: as `build`.
            InvalidArgument: the model can't be split as `parallel` says.
        """
