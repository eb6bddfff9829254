"""What the executor needs of an architecture."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from ..attention.backend import StepAttention
from ..checkpoint.build_context import BuildContext
from ..checkpoint.model_spec import DecoderShape, ModelSpec
from ..checkpoint.weights import WeightLoader
from ..config import ParallelConfig
from ..step_batch import SampledTokens, StepBatch

LogitsIterator: TypeAlias = Iterator[Tensor]
"""Logits [S, vocabulary] of one selection of places after the other, each computed when it is asked for, and good until
the next one is."""


class PendingStep(Protocol):
    """A step that is computed beside the caller."""

    def finish(self) -> None:
        """Help, until it is computed: one step after the other."""

    @property
    def logits(self) -> Tensor:
        """Of a step that is finished: [S, vocabulary], good until the next one begins."""


class Decoder(Protocol):
    """A causal language model over packed sequences, or a rank's share of it."""

    def compute_logits(
        self, batch: StepBatch, attend: StepAttention, chosen: Sequence[Tensor]
    ) -> LogitsIterator | None:
        """Compute the tokens of `batch`; keys and values go through `attend`, which counts this rank's layers from 0.

        Returns the logits of each selection of packed places [S] in `chosen`, which are in order and no place is twice,
        in the model's dtype or in float32, the same on every rank of the last stage. All its ranks must ask for equally
        many, before the next step. The other stages hand on what they computed, return None, and all but the first
        ignore token ids.
        """

    def begin_step(
        self, batch: StepBatch, attend: StepAttention, places: Tensor, picks: SampledTokens | None = None
    ) -> PendingStep | None:
        """Begin to compute logits of packed `places` [S] beside the caller, when the steps begun before are done.

        With `picks` tokens are chosen too, and the batch's rows know them: then the next step may begin before this one
        is finished. None: only `logits` can compute this.
        """

    def close(self) -> None:
        """Let go of threads, when everything begun is computed; nothing is computed afterwards."""


DecoderFactory: TypeAlias = Callable[[ModelSpec, WeightLoader], Decoder]
"""Builds a decoder, or the rank's share of it, from its spec and weights."""


class BuiltDecoder(NamedTuple):
    decoder: Decoder
    shape: DecoderShape


class CheckpointBuilder(Protocol):
    """A checkpoint that can be served: what is known before its weights are read, and how to build it."""

    @property
    def dtype(self) -> str:
        """What the weights are stored in."""

    @property
    def max_position(self) -> int:
        """Tokens of the longest sequence."""

    @property
    def default_length(self) -> int:
        """Tokens of the longest sequence where nobody asks for another length."""

    def build(self, place: BuildContext) -> BuiltDecoder:
        """Raises CheckpointError: the weights are broken, not what config.json says, or can't be quantised."""

    def dry_run(self, place: BuildContext, parallel: ParallelConfig) -> str:
        """Look for what `build` would refuse, without reading any weights; what that can't find, if anything.

        Raises:
            CheckpointError: as `build`.
            InvalidArgument: it can't be split so.
        """
