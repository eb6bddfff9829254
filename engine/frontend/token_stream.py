"""The stream of one request's tokens between the engine that writes it and the reader.

Knows nothing of sockets or text. The writer never waits: unread tokens merge into one item.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from ...core.errors import CharoniaError, RequestTimeout
from ...core.logprobs import Logprobs, PromptLogprobs
from ...core.request import FinishReason
from .admission import QueueTicket
from .sequence_stats import SequenceStats


class TokenDelta(NamedTuple):
    """The tokens since the last read. `cached_tokens` of the prompt came out of the prefix cache. `logprobs`: one for
    each token if the request wants them. `scores`: the log-probabilities of the prompt's tokens, in the first delta."""

    token_ids: tuple[int, ...]
    cached_tokens: int
    finish_reason: FinishReason | None
    logprobs: tuple[Logprobs, ...] = ()
    scores: tuple[PromptLogprobs, ...] = ()


class TokenStream:
    """One writer, one reader, both in the same event loop. It ends with a finish reason or an error.

    `stats` records everything when it is written, however late it is read. `ticket`: its place among the requests that
    wait, in the class `priority`, until it starts. `uncomputed_tokens`: of its prompt, as its replica counts. Where no
    new tokens are wanted, the one that a computed prompt brings anyway is dropped.
    """

    def __init__(
        self, stats: SequenceStats, ticket: QueueTicket, priority: int = 0, uncomputed_tokens: int = 0
    ) -> None:
        self.stats = stats
        self.ticket = ticket
        self.priority = priority
        self.uncomputed_tokens = uncomputed_tokens
        self._written = False
        self._prompt_only = stats.sampling.max_tokens == 0
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._scores: list[PromptLogprobs] = []
        self._cached = 0
        self._finish: FinishReason | None = None
        self._error: CharoniaError | None = None
        self._interruption: CharoniaError | None = None
        self._unread = False
        self._reader: asyncio.Future[None] | None = None
        self.started = False

    @property
    def ended(self) -> bool:
        """Whether the engine will write nothing more."""
        return self._finish is not None or self._error is not None

    def start(self, cached: int, at: float) -> None:
        self.started = True
        self._cached = cached
        self.stats.record_start(cached, at)

    def push_prompt_scores(self, scores: PromptLogprobs) -> None:
        """Add some of the prompt's. The reader is not woken: the last of them come with the first token."""
        self._scores.append(scores)

    def push(self, tokens: list[int], at: float, logprobs: Sequence[Logprobs | None] = ()) -> None:
        self._written = True
        if self._prompt_only:
            tokens, logprobs = [], ()
        self._tokens += tokens
        if logprobs:
            self._logprobs += [each for each in logprobs if each is not None]
        self.stats.record_tokens(len(tokens), at)
        self._wake_reader()

    def finish(self, reason: FinishReason) -> None:
        """End the stream; a timeout before the first token is an error."""
        if reason is FinishReason.TIMEOUT and not self._written:
            self._error = RequestTimeout()
        elif self._prompt_only:
            self._finish = FinishReason.LENGTH
        else:
            self._finish = reason
        self._wake_reader()

    def fail(self, error: CharoniaError) -> None:
        self._error = error
        self._wake_reader()

    def interrupt(self, error: CharoniaError) -> None:
        """Have the reader leave with `error`, as if it did so by itself: the engine is to be told."""
        self._interruption = error
        self._wake_reader()

    async def read(self) -> TokenDelta:
        """Wait for new tokens and take all of them.

        Raises:
            CharoniaError: the stream broke; tokens unread by then are lost.
        """
        if not self._unread:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._unread = False
        if error := self._interruption or self._error:
            raise error
        tokens, self._tokens = tuple(self._tokens), []
        if not self._logprobs and not self._scores:
            return TokenDelta(tokens, self._cached, self._finish)
        logprobs, self._logprobs = tuple(self._logprobs), []
        scores, self._scores = tuple(self._scores), []
        return TokenDelta(tokens, self._cached, self._finish, logprobs, scores)

    def _wake_reader(self) -> None:
        self._unread = True
        # A reader that was cancelled may not know it yet.
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
