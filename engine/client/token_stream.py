"""The stream of one sequence's tokens from the engine to its reader.

Knows nothing of sockets, text or protocols. The writer never waits: unread tokens merge.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeAlias
from weakref import WeakKeyDictionary

import msgspec

from ...core.direct_stream import DirectStream, TextSink
from ...core.errors import CharoniaError, RequestTimeout
from ...core.logprobs import Logprobs, PromptLogprobs
from ...core.request import FinishReason, GenerateChunk
from .admission import QueueTicket
from .sequence_stats import SequenceStats

_GRACE_SECONDS = 5.0
"""How long after its time a sequence is ended here: an engine looks before each step, and one that hangs never."""


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


TokenWriter: TypeAlias = Callable[[int, Logprobs | None], str | None]
"""Gives a sink the text of a token in the middle of a stream, and its logprobs. Returns the text if the sink did not
take it, or a stop string may begin or end in it: the caller then gives it to `DeltaReader.pass_text`, with the delta of
the token."""


class _UnreadSinks:
    """The streams of an event loop whose sinks have something unread, which is passed on in one go: tokens that come in
    the same turn merge."""

    def __init__(self) -> None:
        self._streams: list[TokenStream] = []

    def add(self, streams: "Iterable[TokenStream]") -> None:
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._pass_all_on)
        self._streams += streams

    def _pass_all_on(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            token = stream._alone
            write = stream._write_token
            if token is None or write is None or stream._is_read():
                stream.pass_on()
                continue
            try:
                text = write(token, stream._alone_logprobs)
            except Exception as error:
                stream.break_off(error)
                continue
            if text is None:  # as of most
                stream._alone = None
                stream._unread = False
            else:
                stream.pass_on(text)


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

    def pass_text(self, delta: TokenDelta, sink: TextSink, text: str | None = None) -> GenerateChunk | None:
        """Give `sink` the text of the next delta if its chunk would have nothing else; that chunk otherwise, or if the
        sink leaves it. `text`: what a `TokenWriter` left of the delta's only token."""

    def token_writer(self, sink: TextSink) -> TokenWriter | None:
        """What does the same with the delta of a single token; None where each chunk may have more than text."""


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
        self._alone: int | None = None
        """The only unread token, if `push_step` pushed it."""
        self._alone_logprobs: Logprobs | None = None
        self._reader: asyncio.Future[None] | None = None
        self._on_unread: Callable[[], None] | None = None
        self._chunk: _WaitingChunk | None = None
        self._write_token: TokenWriter | None = None
        self._is_read: Callable[[], bool] = bool
        """Whether the waiting reader has its chunk, or has left; counts only beside a `_write_token`."""
        self._sinks: _UnreadSinks | None = None
        self._late: asyncio.TimerHandle | None = None
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
        self._join_alone()
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
            self._sinks.add([self])

    def _join_alone(self) -> None:
        """Put the token that came alone among the others that are unread."""
        if self._alone is not None:
            self._tokens.append(self._alone)
            self._alone = None
            if self._alone_logprobs is not None:
                self._logprobs.append(self._alone_logprobs)

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
        if self._late is not None:
            self._late.cancel()

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
        self._end()

    def fail(self, error: CharoniaError) -> None:
        self._error = error
        self._end()

    def interrupt(self, error: CharoniaError) -> None:
        """Have the reader leave with `error`; the engine then aborts the sequence."""
        self._interruption = error
        self._end()

    def _end(self) -> None:
        """Wake the reader for more than a token's text: the end."""
        self._write_token = None
        self._wake_reader()

    def expect_end(self, seconds: float) -> None:
        """Have the reader leave with `RequestTimeout` if the engine does not end the stream after so many seconds."""
        self._late = asyncio.get_running_loop().call_later(seconds + _GRACE_SECONDS, self._expire)

    def _expire(self) -> None:
        if not self.ended:
            self.interrupt(RequestTimeout())

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
        if output.text_sink is not None:
            self._write_token = builder.token_writer(output.text_sink)
            self._is_read = self._chunk.reader.done
        try:
            return await self._chunk.reader
        finally:
            self._sinks = self._chunk = self._write_token = None
            self._is_read = bool

    def pass_on(self, text: str | None = None) -> None:
        """Give the sinks what is unread, or the waiting reader what they do not take. `text`: what a `TokenWriter` left
        of it."""
        waiting = self._chunk
        # It may have taken all meanwhile, or have been cancelled.
        if waiting is None or not self._unread or waiting.reader.done():
            return
        try:
            if (left := self._pass_to_sinks(waiting.builder, waiting.output, text)) is not None:
                waiting.reader.set_result(left)
        except Exception as error:
            waiting.reader.set_exception(error)
            del waiting  # the traceback has this call, which would keep the error

    def break_off(self, error: Exception) -> None:
        """Have the waiting reader raise what passing a token on to a sink raised."""
        assert self._chunk is not None, "only a reader that waits has what writes tokens"
        self._chunk.reader.set_exception(error)

    def _pass_to_sinks(
        self, builder: DeltaReader, output: DirectStream[GenerateChunk], text: str | None = None
    ) -> GenerateChunk | None:
        """Give the sinks what is unread; the chunk that they do not take. `text`: as in `pass_on`."""
        delta = self.take()
        text_sink = output.text_sink
        sink = output.sink
        chunk = builder.build_chunk(delta) if text_sink is None else builder.pass_text(delta, text_sink, text)
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
        self._join_alone()
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
                self._sinks.add([self])
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


def push_step(
    streams: Mapping[int, TokenStream],
    keys: Sequence[int],
    counts: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[Logprobs | None],
    at: float,
) -> list[tuple[int, slice]]:
    """Push what a step brought, `counts[i]` of the `tokens` for `keys[i]`, in one pass: what a token costs is counted
    in function calls. `logprobs`: of all tokens, or none. Returns the keys that it leaves, and where their tokens are:
    those of streams whose readers do not wait for text alone, and all if not each has one token."""
    if counts.count(1) < len(counts):
        places = zip(keys, counts, accumulate(counts), strict=True)
        return [(key, slice(end - count, end)) for key, count, end in places if key in streams]
    left: list[tuple[int, slice]] = []
    pushed: list[TokenStream] = []
    first: SequenceStats | None = None
    last: float | None = None
    alike = 0  # sequences of the first one's tenant that had their last token when it had its
    scores = logprobs or (None,) * len(tokens)
    for place, key, token, logprob in zip(range(len(keys)), keys, tokens, scores, strict=True):
        stream = streams.get(key)
        if stream is None:
            continue
        if stream._write_token is None or stream._unread:
            left.append((key, slice(place, place + 1)))
            continue
        stats = stream.stats
        if first is None or stats.last is not last or stats.tenant is not first.tenant:
            if first is not None:
                first.record_alike(alike, last, at)
            first, last, alike = stats, stats.last, 0
        alike += 1
        stats.generated += 1
        stats.last = at
        stream._alone = token
        stream._alone_logprobs = logprob
        stream._unread = True
        pushed.append(stream)
    if first is not None:
        first.record_alike(alike, last, at)
        _unread_sinks_of(asyncio.get_running_loop()).add(pushed)
    return left
