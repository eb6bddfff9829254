"""What a stream's reader gets in the turn of the event loop in which it is written."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from charonia.core.direct_stream import DirectStream, TextSink
from charonia.core.errors import Unavailable
from charonia.core.logprobs import Logprobs, TokenLogprob
from charonia.core.request import FinishReason, GenerateChunk, Usage
from charonia.core.request_context import RequestContext
from charonia.engine.client.admission import AdmissionControl, QueueLimits
from charonia.engine.client.sequence_stats import SequenceStats
from charonia.engine.client.token_stream import TokenDelta, TokenStream, TokenWriter, push_step
from charonia.telemetry.llm_metrics import LlmMetrics


def open_stream() -> TokenStream:
    return TokenStream(SequenceStats(LlmMetrics()), AdmissionControl(QueueLimits(1, 100)).admit())


class Builder:
    """Makes chunks whose text is their tokens; `plain`: of those in the middle there is nothing else; `writes`: one
    token's may be written by itself, but for 7, which is left, and 13, which is an error."""

    def __init__(self, plain: bool = False, writes: bool = False) -> None:
        self.plain, self.writes = plain, writes
        self.deltas: list[tuple[int, ...]] = []
        self.scored: list[tuple[int, Logprobs]] = []

    def build_chunk(self, delta: TokenDelta) -> GenerateChunk:
        text = ",".join(map(str, delta.token_ids))
        return GenerateChunk(text=text, token_ids=delta.token_ids, usage=Usage(1, 1), finish_reason=delta.finish_reason)

    def token_writer(self, sink: TextSink) -> TokenWriter | None:
        def write(token: int, logprobs: Logprobs | None) -> str | None:
            if token == 13:
                raise ValueError("broken")
            if token == 7 or not sink(str(token), 2, None):
                return "seven"
            if logprobs is not None:
                self.scored.append((token, logprobs))
            return None

        return write if self.writes else None

    def pass_text(self, delta: TokenDelta, sink: TextSink, text: str | None = None) -> GenerateChunk | None:
        self.deltas.append(delta.token_ids)
        self.scored += zip(delta.token_ids, delta.logprobs, strict=False)
        if text is not None:
            taken = sink(text, 2, None)
            return None if taken else GenerateChunk(text=text, token_ids=delta.token_ids, usage=Usage(1, 2))
        chunk = self.build_chunk(delta)
        if not self.plain or chunk.finish_reason is not None:
            return chunk
        text = chunk.text.replace("0", "")
        if not text or sink(text, 2, None):
            return None
        return GenerateChunk(text=text, token_ids=delta.token_ids, usage=Usage(1, 2))


async def nothing(output: DirectStream[GenerateChunk]) -> AsyncGenerator[GenerateChunk, None]:
    for _ in ():
        yield _


def output_to(sink: Any, text_sink: Any = None) -> DirectStream[GenerateChunk]:
    output = DirectStream(nothing)
    output.sink, output.text_sink = sink, text_sink
    return output


class Sink:
    """Takes chunks until one is in `left`."""

    def __init__(self, *left: int) -> None:
        self.left = left
        self.taken: list[int] = []

    def __call__(self, chunk: GenerateChunk) -> bool:
        if chunk.token_ids[-1] in self.left:
            return False
        self.taken += chunk.token_ids
        return True


async def begin(stream: TokenStream, sink: Any, text_sink: Any = None) -> "asyncio.Task[GenerateChunk]":
    builder = Builder(plain=text_sink is not None)
    reading = asyncio.create_task(stream.read_chunk(builder, output_to(sink, text_sink)))
    await asyncio.sleep(0)
    return reading


async def test_chunks_are_taken_while_they_are_written_and_the_last_is_returned() -> None:
    stream, sink = open_stream(), Sink()
    stream.push([1], at=1.0)
    reading = await begin(stream, sink)
    assert sink.taken == [1]
    stream.push([2], at=2.0)
    await asyncio.sleep(0)
    assert sink.taken == [1, 2]
    stream.push([3, 4], at=3.0)
    await asyncio.sleep(0)
    stream.push([5], at=4.0)
    stream.finish(FinishReason.LENGTH)
    chunk = await reading
    assert (chunk.token_ids, chunk.finish_reason) == ((5,), FinishReason.LENGTH)
    assert sink.taken == [1, 2, 3, 4]
    assert stream.stats.metrics.merged_tokens == 0


async def test_what_the_sink_leaves_is_returned_and_what_follows_merges_meanwhile() -> None:
    stream, sink = open_stream(), Sink(2)
    reading = await begin(stream, sink)
    for token in (1, 2, 3, 4):
        stream.push([token], at=1.0)
        if token < 3:
            await asyncio.sleep(0)
    assert (await reading).token_ids == (2,)
    assert sink.taken == [1]
    reading = await begin(stream, sink)
    assert sink.taken == [1, 3, 4]
    assert stream.stats.metrics.merged_tokens == 1
    reading.cancel()


async def test_what_comes_in_one_turn_is_passed_on_together_when_all_streams_have_theirs() -> None:
    streams, sinks = [open_stream(), open_stream()], [Sink(), Sink()]
    readings = [await begin(stream, sink) for stream, sink in zip(streams, sinks, strict=True)]
    for token in (1, 2):
        for stream in streams:
            stream.push([token], at=1.0)
    assert [sink.taken for sink in sinks] == [[], []]
    await asyncio.sleep(0)
    assert [sink.taken for sink in sinks] == [[1, 2], [1, 2]]
    assert [stream.stats.metrics.merged_tokens for stream in streams] == [1, 1]
    for reading in readings:
        reading.cancel()


async def test_text_goes_to_its_own_sink_what_that_leaves_to_the_other_and_the_last_to_the_reader() -> None:
    stream, sink = open_stream(), Sink(3)
    texts: list[str] = []

    def take_text(text: str, tokens: int, logprob: TokenLogprob | None) -> bool:
        if text in ("2", "3"):
            return False
        texts.append(text)
        return True

    reading = await begin(stream, sink, take_text)
    for token in (1, 0, 2, 10, 3):
        stream.push([token], at=1.0)
        await asyncio.sleep(0)
    left = await reading
    assert (texts, sink.taken) == (["1", "1"], [2])
    assert (left.token_ids, left.text, left.usage) == ((3,), "3", Usage(1, 2)), "a chunk of the text that was made"
    reading = await begin(stream, sink, take_text)
    stream.push([5], at=2.0)
    stream.finish(FinishReason.STOP)
    assert ((await reading).text, texts) == ("5", ["1", "1"])


async def test_without_a_sink_chunks_are_returned() -> None:
    stream = open_stream()
    reading = await begin(stream, None)
    stream.push([1], at=1.0)
    assert (await reading).token_ids == (1,)


@pytest.mark.parametrize("ending", ["fail", "interrupt"])
async def test_an_error_reaches_the_reader(ending: str) -> None:
    stream, sink = open_stream(), Sink()
    reading = await begin(stream, sink)
    stream.push([1], at=1.0)
    await asyncio.sleep(0)
    getattr(stream, ending)(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await reading
    assert sink.taken == [1]


async def test_an_error_of_the_sink_is_the_readers_and_no_cycle_keeps_what_it_saw() -> None:
    stream = open_stream()

    def fail(chunk: GenerateChunk) -> bool:
        raise ValueError("broken")

    async def read(stream: TokenStream) -> None:
        with pytest.raises(ValueError, match="broken"):
            await stream.read_chunk(Builder(), output_to(fail))

    reading = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    gc.collect()
    gc.disable()
    try:
        stream.push([1], at=1.0)  # the writer goes on
        await reading
        gone = weakref.ref(stream)
        del stream, reading
        await asyncio.sleep(0)
        assert gone() is None
    finally:
        gc.enable()


async def test_a_reader_that_was_cancelled_is_given_nothing() -> None:
    stream, sink = open_stream(), Sink()
    reading = await begin(stream, sink)
    reading.cancel()
    stream.push([1], at=1.0)  # in the same turn
    with pytest.raises(asyncio.CancelledError):
        await reading
    stream.push([2], at=2.0)
    assert sink.taken == []
    assert (await stream.read()).token_ids == (1, 2)


class Readers:
    """Streams whose readers wait for text, which goes into `texts`; each has its first token, at time 0."""

    def __init__(self, *tenants: str) -> None:
        self.metrics = LlmMetrics()
        self.streams: dict[int, TokenStream] = {}
        self.builders = [Builder(plain=True, writes=True) for _ in tenants]
        self.texts: list[list[str]] = [[] for _ in tenants]
        self.takes = True
        self.reads: list[asyncio.Task[GenerateChunk]] = []
        for key, tenant in enumerate(tenants):
            context = RequestContext("test")
            context.tenant = tenant
            admission = AdmissionControl(QueueLimits(1, 100)).admit()
            self.streams[key] = TokenStream(SequenceStats(self.metrics, None, context), admission)

    async def wait(self) -> "Readers":
        for key, stream in self.streams.items():
            stream.push([1], at=0.0)
            stream.take()
            self.read(key)
        await asyncio.sleep(0)
        return self

    def read(self, key: int) -> None:
        def take(text: str, tokens: int, logprob: TokenLogprob | None) -> bool:
            if self.takes:
                self.texts[key].append(text)
            return self.takes

        output = output_to(lambda chunk: False, take)
        self.reads.append(asyncio.create_task(self.streams[key].read_chunk(self.builders[key], output)))

    def step(self, at: float, **tokens: int) -> None:
        """Push `r1=5`: token 5 for the reader 1."""
        keys = [int(name[1:]) for name in tokens]
        assert push_step(self.streams, keys, [1] * len(keys), [*tokens.values()], (), at) == []

    def leave(self) -> None:
        for reading in self.reads:
            reading.cancel()


async def test_a_steps_tokens_are_written_and_counted_as_if_each_was_pushed() -> None:
    readers, others = await Readers("a", "b", "b", "a").wait(), await Readers("a", "b", "b", "a").wait()
    for at, keys in ((1.0, (0, 1, 2, 3)), (2.0, (0, 2)), (4.0, (0, 1, 2, 3)), (5.0, (3,))):
        readers.step(at, **{f"r{key}": 51 + key for key in keys})
        for key in keys:
            others.streams[key].push([51 + key], at)
        await asyncio.sleep(0)
    assert readers.texts == [["51"] * 3, ["52"] * 2, ["53"] * 3, ["54"] * 3] == others.texts
    one, other = readers.metrics, others.metrics
    assert (one.inter_token.counts, one.inter_token.sum) == (other.inter_token.counts, other.inter_token.sum)
    assert [one.tenant(name).generated for name in "ab"] == [other.tenant(name).generated for name in "ab"] == [8, 7]
    assert [stream.stats.generated for stream in readers.streams.values()] == [4, 3, 4, 4]
    assert not any(builder.deltas for builder in readers.builders), "none of it needs a delta"
    assert all(builder.deltas for builder in others.builders)
    readers.leave()
    others.leave()


async def test_what_a_step_has_beside_single_tokens_of_waiting_readers_is_left_to_push() -> None:
    readers = await Readers("", "", "").wait()
    readers.reads[2].cancel()
    await asyncio.sleep(0)
    readers.streams[1].push([2], at=1.0)
    left = push_step(readers.streams, [0, 1, 2, 9], [1, 1, 1, 1], [5, 6, 8, 9], (), 1.0)
    assert left == [(1, slice(1, 2)), (2, slice(2, 3))], "nobody has the last one any more"
    await asyncio.sleep(0)
    assert readers.texts[0] == ["5"]
    left = push_step(readers.streams, [0, 9, 1], [2, 1, 1], [5, 6, 7, 8], (), 2.0)
    assert left == [(0, slice(0, 2)), (1, slice(3, 4))]
    assert push_step(readers.streams, [0, 1], [1, 0], [5], (), 2.0) == [(0, slice(0, 1)), (1, slice(1, 1))]
    readers.leave()


async def test_steps_of_one_turn_merge_and_an_end_in_that_turn_is_not_lost() -> None:
    readers = await Readers("", "").wait()
    readers.step(1.0, r0=5, r1=6)
    assert push_step(readers.streams, [0, 1], [1, 1], [8, 9], (), 2.0) == [(0, slice(0, 1)), (1, slice(1, 2))]
    readers.streams[0].push([8], 2.0)
    readers.streams[1].finish(FinishReason.STOP)
    chunk = await readers.reads[1]
    assert (chunk.token_ids, chunk.finish_reason) == ((6,), FinishReason.STOP)
    assert (readers.texts, readers.builders[0].deltas) == ([["5,8"], []], [(5, 8)])
    assert readers.metrics.merged_tokens == 1
    readers.step(3.0, r0=10)
    readers.streams[0].interrupt(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await readers.reads[0]
    assert readers.texts[0] == ["5,8"]


async def test_what_a_writer_leaves_is_passed_on_with_its_delta_and_what_it_raises_is_the_readers() -> None:
    readers = await Readers("", "", "").wait()
    readers.step(1.0, r0=7, r1=13, r2=5)
    await asyncio.sleep(0)
    assert (readers.texts, readers.builders[0].deltas) == ([["seven"], [], ["5"]], [(7,)])
    with pytest.raises(ValueError, match="broken"):
        await readers.reads[1]
    readers.takes = False
    readers.step(2.0, r0=8)
    chunk = await readers.reads[0]
    assert (chunk.token_ids, chunk.text) == ((8,), "seven"), "what its sink did not take"
    readers.leave()


async def test_logprobs_go_with_their_tokens_whether_those_are_written_left_or_merged() -> None:
    readers = await Readers("", "", "").wait()
    scores = [Logprobs(-float(number), [], []) for number in range(5)]
    assert push_step(readers.streams, [0, 1, 2], [1, 1, 1], [5, 7, 6], [scores[0], None, scores[1]], 1.0) == []
    readers.streams[2].push([8], 1.0, [scores[2]])
    await asyncio.sleep(0)
    assert push_step(readers.streams, [0, 1, 2], [1, 1, 1], [9, 7, 10], [None, scores[3], scores[4]], 2.0) == []
    await asyncio.sleep(0)
    assert [builder.scored for builder in readers.builders] == [
        [(5, scores[0])],
        [(7, scores[3])],
        [(6, scores[1]), (8, scores[2]), (10, scores[4])],
    ]
    readers.leave()


async def test_a_reader_that_left_in_the_turn_of_a_step_is_given_nothing() -> None:
    readers = await Readers("").wait()
    readers.step(1.0, r0=5)
    readers.reads[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await readers.reads[0]
    assert readers.texts == [[]]
    assert readers.streams[0].take().token_ids == (5,)
