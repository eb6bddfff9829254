"""The stream of one sequence's tokens from the engine to its reader, and its measurements: the times of its phases, its
tokens, and its part in the model's counts.

Knows nothing of sockets, text or protocols. The writer never waits: unread tokens merge.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import msgspec

from ...core.direct_stream import DirectStream, Sink
from ...core.errors import CharoniaError, RequestTimeout
from ...core.logprobs import Logprobs, PromptLogprobs
from ...core.request import FinishReason, GenerateChunk, GenerateRequest
from ...core.request_context import CANCELLED, Outcome, RequestContext, RequestEnd, end_for_error
from ...core.sampling import SamplingParams
from ...telemetry.llm_metrics import LlmMetrics
from .admission import QueueTicket

_ENDS: dict[FinishReason, RequestEnd] = {
    reason: CANCELLED if reason is FinishReason.ABORT else RequestEnd(Outcome(reason.value)) for reason in FinishReason
}

_DEFAULTS = SamplingParams()


class SequenceStats:
    """A `core.request_context.SequenceRecord`. `arrived`: when an endpoint got the request. Tests and benchmarks
    measure sequences without a request or a context."""

    def __init__(
        self, metrics: LlmMetrics, request: GenerateRequest | None = None, context: RequestContext | None = None
    ) -> None:
        self.metrics = metrics
        self.tenant = metrics.tenant("" if context is None else context.tenant)
        if context is not None:
            self.tenant.weight = context.tenant_weight
        self.sampling = _DEFAULTS if request is None else request.sampling
        self.choice = 0 if request is None else request.choice
        self.opened = time.monotonic()
        self.arrived = self.opened if context is None else context.arrived_at
        self.submitted: float | None = None
        self.begun: float | None = None
        self.first: float | None = None
        self.last: float | None = None
        self.prompt: int | None = None
        self.cached: int | None = None
        self.generated = 0
        self.drafts: list[tuple[int, int]] = []
        """Tokens drafted and accepted in each step that drafted, if the configuration has them reported."""
        self.held: dict[str, Any] | None = None  # how another server finds what was computed, if one is to go on
        self.finish_reason: FinishReason | None = None
        self.end: RequestEnd | None = None
        self._waits = False

    def time_left(self, limit: float) -> float:
        """The rest of `limit` seconds since the request arrived; 0 is no limit. Raises `RequestTimeout` if none is
        left."""
        left = limit - (time.monotonic() - self.arrived)
        if limit and left <= 0:
            raise RequestTimeout
        return left if limit else 0.0

    def record_submission(self, prompt: int) -> None:
        self.prompt = prompt
        self.submitted = time.monotonic()
        self._waits = True
        self.tenant.waiting.add(1)

    def end_wait(self) -> None:
        """Count the sequence as waiting no longer; may be called again."""
        self.tenant.waiting.add(-self._waits)
        self._waits = False

    @property
    def seconds_waited(self) -> float:
        """Seconds since the engine got the sequence."""
        return time.monotonic() - (self.submitted or self.opened)

    def record_start(self, cached: int, at: float) -> None:
        submitted = self.opened if self.submitted is None else self.submitted
        self.begun = max(at, submitted)
        self.cached = cached
        self.end_wait()
        self.tenant.prompt += self.prompt or 0
        self.metrics.queue.observe(self.begun - submitted)

    def record_tokens(self, count: int, at: float) -> None:
        self.generated += count
        self.tenant.generated += count
        if self.last is None:
            self.first = at
            self.metrics.first_token.observe(at - self.arrived)
            self.metrics.first_response.observe(1000 * (at - self.arrived))
            if self.begun is not None:
                self.metrics.prefill.observe(at - self.begun)
        else:
            self.metrics.inter_token.observe((at - self.last) / count, count)
        self.last = at

    def record_finish(self, reason: FinishReason) -> None:
        """Record the end, when the last token goes to the client."""
        self.finish_reason = reason
        self.end = _ENDS[reason]


@contextmanager
def open_sequence(metrics: LlmMetrics, request: GenerateRequest, context: RequestContext) -> Iterator[SequenceStats]:
    """The stats of one sequence, for the block: one that ends before the last token has cancelled it."""
    stats = SequenceStats(metrics, request, context)
    context.add_sequence(stats)
    try:
        yield stats
    except Exception as error:
        stats.end = end_for_error(error, stats.submitted is not None)
        raise
    finally:
        if stats.end is None:
            stats.end = CANCELLED


class TokenDelta(msgspec.Struct, frozen=True, gc=False):
    """The tokens since the last read."""

    token_ids: tuple[int, ...]
    cached_tokens: int
    """Tokens of the prompt that came from the prefix cache."""
    finish_reason: FinishReason | None
    logprobs: tuple[Logprobs, ...] = ()
    """One for each token, if the request wants them."""
    scores: tuple[PromptLogprobs, ...] = ()
    """The log-probabilities of the prompt's tokens, in the first delta."""


class _UnreadSinks:
    """The streams of an event loop whose sinks have something unread, which is passed on in one go: tokens that come in
    the same turn merge."""

    def __init__(self) -> None:
        self._streams: list[TokenStream] = []

    def add(self, stream: "TokenStream") -> None:
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._pass_all_on)
        self._streams.append(stream)

    def _pass_all_on(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.pass_on()


@dataclass(frozen=True, slots=True)
class _WaitingChunk:
    """Who waits for the first chunk that the sinks of `output` do not take, and what makes chunks meanwhile."""

    reader: "asyncio.Future[GenerateChunk]"
    builder: "DeltaReader"
    output: DirectStream[GenerateChunk]


_unread_sinks: WeakKeyDictionary[asyncio.AbstractEventLoop, _UnreadSinks] = WeakKeyDictionary()


def _unread_sinks_of(loop: asyncio.AbstractEventLoop) -> _UnreadSinks:
    sinks = _unread_sinks.get(loop)
    if sinks is None:
        sinks = _unread_sinks[loop] = _UnreadSinks()
    return sinks


class DeltaReader(Protocol):
    """Makes chunks of the deltas of one stream: a builder."""

    def build_chunk(self, delta: TokenDelta) -> GenerateChunk:
        """The chunk of the next delta."""

    def pass_text(self, delta: TokenDelta, sink: Sink[str]) -> GenerateChunk | None:
        """Give `sink` the text of the next delta if its chunk would have nothing else; that chunk otherwise, or if the
        sink leaves it. Nothing comes of an empty text."""


class TokenStream:
    """A stream with one writer and one reader in the same event loop. It ends with a finish reason or an error. Where
    no new tokens are wanted, the one that a computed prompt brings anyway is dropped."""

    def __init__(
        self, stats: SequenceStats, ticket: QueueTicket, priority: int = 0, uncomputed_tokens: int = 0
    ) -> None:
        self.stats = stats
        """Records what is written, however late it is read."""
        self.ticket = ticket
        """The sequence's place among those that wait, until it starts."""
        self.priority = priority
        self.uncomputed_tokens = uncomputed_tokens
        """Tokens of the prompt that count as work ahead of the replica."""
        self._written = False
        self._prompt_only = stats.sampling.max_tokens == 0
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._scores: list[PromptLogprobs] = []
        self._cached = 0
        self._finish: FinishReason | None = None
        self._error: CharoniaError | None = None
        self._interruption: CharoniaError | None = None
        self._unread = self._lags = False
        self._reader: asyncio.Future[None] | None = None
        self._on_unread: Callable[[], None] | None = None
        self._chunk: _WaitingChunk | None = None
        self._sinks: _UnreadSinks | None = None
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
        """Add scores of the prompt. The reader is not woken: the first token follows them."""
        self._scores.append(scores)

    def push(self, tokens: list[int], at: float, logprobs: Sequence[Logprobs | None] = ()) -> None:
        self._written = True
        if self._prompt_only:
            tokens, logprobs = [], ()
        if self._tokens:
            self._count_unread(len(tokens))
        self._tokens += tokens
        if logprobs:
            self._logprobs += filter(None, logprobs)
        self.stats.record_tokens(len(tokens), at)
        if self._sinks is None:
            self._wake_reader()
        elif not self._unread:
            self._unread = True
            self._sinks.add(self)

    def _count_unread(self, tokens: int) -> None:
        """Count tokens that come while others are unread."""
        self.stats.metrics.merged_tokens += tokens
        if not self._lags:
            self._lags = True
            self.stats.metrics.unread.add(1)

    def close(self) -> None:
        """Its reader has left: the sequence counts neither as waiting nor as unread. May be called again."""
        self.stats.end_wait()
        self._end_unread()

    def _end_unread(self) -> None:
        """Count the stream as unread no longer."""
        if self._lags:
            self._lags = False
            self.stats.metrics.unread.add(-1)

    def finish(self, reason: FinishReason) -> None:
        """End the stream; a timeout before the first token is an error."""
        if reason is FinishReason.TIMEOUT and not self._written:
            self._error = RequestTimeout()
        elif self._prompt_only and reason is not FinishReason.CACHE_THRESHOLD:
            self._finish = FinishReason.LENGTH
        else:
            self._finish = reason
        self._wake_reader()

    def fail(self, error: CharoniaError) -> None:
        self._error = error
        self._wake_reader()

    def interrupt(self, error: CharoniaError) -> None:
        """Have the reader leave with `error`; the engine then aborts the sequence."""
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
        return self.take()

    async def read_chunk(self, builder: DeltaReader, output: DirectStream[GenerateChunk]) -> GenerateChunk:
        """The chunk that `builder` makes of what `read` would give. Chunks that the sinks of `output` take are made
        without waking this task, after all that has come for other streams is written; the first that they do not take
        is returned, and so is the last. Raises as `read`, and what the builder and the sinks raise."""
        if output.sink is None:
            return builder.build_chunk(await self.read())
        while self._unread:
            if (left := self._pass_to_sinks(builder, output)) is not None:
                return left
        loop = asyncio.get_running_loop()
        self._chunk = _WaitingChunk(loop.create_future(), builder, output)
        self._sinks = _unread_sinks_of(loop)
        try:
            return await self._chunk.reader
        finally:
            self._sinks = self._chunk = None

    def pass_on(self) -> None:
        """Give the sinks what is unread, or the waiting reader what they do not take."""
        waiting = self._chunk
        # It may have taken all meanwhile, or have been cancelled.
        if waiting is None or not self._unread or waiting.reader.done():
            return
        try:
            if (left := self._pass_to_sinks(waiting.builder, waiting.output)) is not None:
                waiting.reader.set_result(left)
        except Exception as error:
            waiting.reader.set_exception(error)
            del waiting  # the traceback has this call, which would keep the error

    def _pass_to_sinks(self, builder: DeltaReader, output: DirectStream[GenerateChunk]) -> GenerateChunk | None:
        """Give the sinks what is unread; the chunk that they do not take."""
        delta = self.take()
        text_sink = output.text_sink
        sink = output.sink
        chunk = builder.build_chunk(delta) if text_sink is None else builder.pass_text(delta, text_sink)
        if chunk is None:
            return None
        taken = chunk.finish_reason is None and sink is not None and sink(chunk)
        return None if taken else chunk

    def listen(self, on_unread: Callable[[], None]) -> None:
        """Have `on_unread` called, in place of a waiting reader, by the write after which there is something to
        `take`."""
        self._on_unread = on_unread

    def take(self) -> TokenDelta:
        """Take everything unread without waiting. Raises as `read`."""
        self._unread = False
        if self._lags:
            self._end_unread()
        if error := self._interruption or self._error:
            raise error
        tokens, self._tokens = tuple(self._tokens), []
        if not self._logprobs and not self._scores:
            return TokenDelta(tokens, self._cached, self._finish)
        logprobs, self._logprobs = tuple(self._logprobs), []
        scores, self._scores = tuple(self._scores), []
        return TokenDelta(tokens, self._cached, self._finish, logprobs, scores)

    def _wake_reader(self) -> None:
        if self._sinks is not None:
            if not self._unread:
                self._unread = True
                self._sinks.add(self)
            return
        if self._on_unread is not None:
            if not self._unread:
                self._unread = True
                self._on_unread()
            return
        self._unread = True
        # A reader that was cancelled may not know it yet.
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
