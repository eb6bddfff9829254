"""The types between scheduler and executor: the plan of one step, and its result. Both are diffs."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..core.logprobs import Logprobs, PromptLogprobs
from ..core.resolved_sampling import ResolvedSampling
from .drafts.proposals import NO_PROPOSALS, Proposals
from .encoders.encoder_rows import EmbeddedSpan, EncoderRows

IntArray = NDArray[np.int32]
LongArray = NDArray[np.int64]
"""The type of numpy's indices, and of torch's."""


MaskArray: TypeAlias = NDArray[np.int32]
"""The tokens that M places may get, [M, ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is set for token t."""

MaskSource: TypeAlias = Callable[[], MaskArray]
"""Makes the masks of a step, once, while it is computed."""

NO_ROWS: IntArray = np.zeros(0, np.int32)
NO_TOKENS: IntArray = np.zeros((0, 3), np.int32)
NO_HOST_COPIES: IntArray = np.zeros((0, 3), np.int32)
NO_STATE_SAVES: IntArray = np.zeros((0, 3), np.int32)
NO_STATE_RESTORES: IntArray = np.zeros((0, 2), np.int32)


class NewSequence(NamedTuple):
    """A sequence that enters a row: all tokens known so far, of which the first `computed` are in its blocks and the
    first `prompt` are its prompt. `adapter`: the digest of the one that computes it; "" is the model itself."""

    row: int
    tokens: IntArray
    computed: int
    sampling: ResolvedSampling
    prompt: int = 0
    adapter: str = ""
    state: int = -1
    """The snapshot that its row's state begins as, where the model has states and `computed` is above 0; -1: as
    nothing."""
    embedded: tuple[EmbeddedSpan, ...] = ()
    """Those of its prompt, ascending, of which some place is yet to be computed."""
    shift: int = 0
    """The sum of `EmbeddedSpan.shift` of those before them."""
    encoded: EncoderRows | None = None
    """What its layers attend to beside its tokens, if the model has an encoder."""


class StepWork(NamedTuple):
    """A step's tokens of decoding rows and of prompts, each with the tokens attended to, summed over its tokens."""

    decode_tokens: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    prefill_context: int = 0


class StepPlan(NamedTuple):
    """One step of R rows, as the difference from the step before.

    An executor processes plans in the order of `step`, and within one: `closed`, `block_copies` and `state_copies`,
    `new`, `appended`, `forced`, `drafted`, then the rows, with `state_restores` before `state_saves`. It keeps each
    row's blocks and tokens: a row may be scheduled again before the host has seen its last token.
    """

    step: int
    rows: IntArray
    """[R] row of each running sequence; distinct."""
    starts: IntArray
    """[R] position of the first token to compute."""
    counts: IntArray
    """[R] tokens to compute, at least 1."""
    samples: NDArray[np.bool_]
    """[R] whether the row's last computed token is the newest known one, so that a next token is sampled."""
    num_logits: IntArray
    """[R] how many of the row's last computed tokens want logits: 0, 1 to sample, more to sample after drafts or for
    prompt log-probabilities."""
    appended: IntArray
    """[A, 2] (row, block id) pairs to append to block tables, in order."""
    new: tuple[NewSequence, ...]
    closed: IntArray
    """[C] rows whose sequence has left since the last plan."""
    forced: IntArray = NO_TOKENS
    """[G, 3] (row, position, token): tokens that no step sampled, for sequences that the executor has."""
    masked: IntArray = NO_ROWS
    """[M] sampled rows whose token is chosen among those that a mask allows, in the order of `rows`; one with drafts is
    named for each of them too, for each has a mask."""
    drafts: IntArray = NO_ROWS
    """[R] how many of a row's last computed tokens are drafts: a token is sampled at each, and at the one before the
    first. Empty where no row has any."""
    drafted: IntArray = NO_ROWS
    """[D] the drafts themselves, row after row."""
    proposals: IntArray = NO_ROWS
    """[R] how many tokens the executor's draft model proposes to follow the row's next token, once that is sampled; its
    own cache, of the same blocks, has all that is computed of the row by then, as far as a step suffices for it. 0: it
    leaves the row as it is. Empty where it does nothing."""
    block_copies: IntArray = NO_HOST_COPIES
    """[V, 3] the fields of each `TierCopy` of a block, to be made in this order before anything is computed."""
    state_saves: IntArray = NO_STATE_SAVES
    """[S, 3] (row, position, snapshot): the state of the row after its first `position` tokens goes into the snapshot;
    starts < position <= starts + counts of the row in this plan."""
    state_restores: IntArray = NO_STATE_RESTORES
    """[T, 2] (row, snapshot): the row goes on from the state in the snapshot, for its own is that after drafts which
    were wrong."""
    state_copies: IntArray = NO_HOST_COPIES
    """[W, 3] the fields of each `TierCopy` of a snapshot, in the same way: before one is read or written."""

    @property
    def tokens(self) -> int:
        """Tokens computed by this step, over all rows."""
        return sum(self.counts.tolist())

    def drafts_by_row(self) -> dict[int, list[int]]:
        """The drafts of each row that has some."""
        if not len(self.drafts):
            return {}
        drafted = iter(self.drafted.tolist())
        numbers = zip(self.rows.tolist(), self.drafts.tolist(), strict=True)
        return {row: [*islice(drafted, number)] for row, number in numbers if number}


class StepResult(NamedTuple):
    """The tokens that a step sampled, and those that follow them for sure, ragged."""

    step: int
    rows: IntArray
    offsets: IntArray
    """Position in its sequence of the first token of each row."""
    counts: IntArray
    """Tokens of each row, 0 or more."""
    tokens: IntArray
    """The tokens of all rows, row after row."""
    logprobs: Sequence[Logprobs | None] = ()
    """One for each token, None where the row does not want it; empty if no row wants any."""
    prompt_logprobs: Sequence[tuple[int, PromptLogprobs]] = ()
    """(row, those of the prompt's tokens that follow computed ones) for rows that want them, also where they were
    reported before."""
    proposals: Proposals = NO_PROPOSALS
    forced: IntArray = NO_ROWS
    """How many of each row's last tokens no step sampled: the host says that they follow. Empty where it says
    nothing."""
    ending: frozenset[int] = frozenset()
    """Rows whose sequence ends with these tokens, as the host says."""


class StepUpdates(NamedTuple):
    """A result by sequence key, for the outside."""

    keys: list[int]
    counts: list[int]
    """New tokens of each key."""
    tokens: list[int]
    """The new tokens of all keys, key after key."""
    started: list[tuple[int, int]]
    """(key, prompt tokens found in the prefix cache) of sequences first admitted since the last updates."""
    finished: list[tuple[int, str]]
    """(key, finish reason)."""
    logprobs: Sequence[Logprobs | None] = ()
    """As in `StepResult`."""
    prompt_logprobs: Sequence[tuple[int, PromptLogprobs]] = ()
    """(key, those of the prompt's next tokens), each token's once."""
    drafts: Sequence[tuple[int, int, int]] = ()
    """(key, tokens that were drafted, how many of them were accepted)."""
