"""What the engine has said of one request and its reader has not read yet.

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
    """Tokens since the last one; `cached_tokens` of the prompt came out of the prefix cache. `logprobs`: one for each
    token if the request wants them; `scores`: of the prompt's tokens, in the first one."""

    token_ids: tuple[int, ...]
    cached_tokens: int
    finish_reason: FinishReason | None
    logprobs: tuple[Logprobs, ...] = ()
    scores: tuple[PromptLogprobs, ...] = ()


class TokenStream:
    """One writer, one reader, both in the same event loop. Ends with a finish reason or an error.

    `account` learns of everything when it is written, however late it is read. `place`: what it has in line, in the
    class `priority`, until it starts. `owed`: prompt tokens still to be computed, as its replica counts.

    Where no new tokens are wanted, the one that a computed prompt brings anyway goes no further.
    """

    def __init__(self, account: SequenceStats, place: QueueTicket, priority: int = 0, owed: int = 0) -> None:
        self.stats = account
        self.ticket = place
        self.priority = priority
        self.uncomputed_tokens = owed
        self._written = False
        self._prompt_only = account.sampling.max_tokens == 0
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._scores: list[PromptLogprobs] = []
        self._cached = 0
        self._finish: FinishReason | None = None
        self._error: CharoniaError | None = None
        self._news = False
        self._reader: asyncio.Future[None] | None = None
        self.started = False

    @property
    def ended(self) -> bool:
        """The engine has nothing more to say."""
        return self._finish is not None or self._error is not None

    def start(self, cached: int, at: float) -> None:
        self.started = True
        self._cached = cached
        self.stats.record_start(cached, at)

    def push_prompt_scores(self, scores: PromptLogprobs) -> None:
        """Some of the prompt. No news: the last of it come with the first token."""
        self._scores.append(scores)

    def push(self, tokens: list[int], at: float, logprobs: Sequence[Logprobs | None] = ()) -> None:
        self._written = True
        if self._prompt_only:
            tokens, logprobs = [], ()
        self._tokens += tokens
        if logprobs:
            self._logprobs += [each for each in logprobs if each is not None]
        self.stats.record_tokens(len(tokens), at)
        self._tell()

    def finish(self, reason: FinishReason) -> None:
        """There will be no more; time that ran out before the first token is an error."""
        if reason is FinishReason.TIMEOUT and not self._written:
            self._error = RequestTimeout()
        elif self._prompt_only:
            self._finish = FinishReason.LENGTH
        else:
            self._finish = reason
        self._tell()

    def fail(self, error: CharoniaError) -> None:
        self._error = error
        self._tell()

    async def read(self) -> TokenDelta:
        """Wait for news and take all of it.

        Raises:
            CharoniaError: the stream broke; tokens unread by then are lost.
        """
        if not self._news:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._news = False
        if self._error is not None:
            raise self._error
        tokens, self._tokens = tuple(self._tokens), []
        if not self._logprobs and not self._scores:
            return TokenDelta(tokens, self._cached, self._finish)
        logprobs, self._logprobs = tuple(self._logprobs), []
        scores, self._scores = tuple(self._scores), []
        return TokenDelta(tokens, self._cached, self._finish, logprobs, scores)

    def _tell(self) -> None:
        self._news = True
        # A reader that was cancelled may not know it yet.
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
