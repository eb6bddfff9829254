"""What a stream's reader gets in the turn of the event loop in which it is written."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from charonia.core.direct_stream import DirectStream
from charonia.core.errors import Unavailable
from charonia.core.request import FinishReason, GenerateChunk, Usage
from charonia.engine.client.admission import AdmissionControl, QueueLimits
from charonia.engine.client.token_stream import SequenceStats, TokenDelta, TokenStream
from charonia.telemetry.llm_metrics import LlmMetrics


def open_stream() -> TokenStream:
    return TokenStream(SequenceStats(LlmMetrics()), AdmissionControl(QueueLimits(1, 100)).admit())


class Builder:
    """Makes chunks whose text is their tokens; `plain`: of those in the middle there is nothing else."""

    def __init__(self, plain: bool = False) -> None:
        self.plain = plain

    def build_chunk(self, delta: TokenDelta) -> GenerateChunk:
        text = ",".join(map(str, delta.token_ids))
        return GenerateChunk(text=text, token_ids=delta.token_ids, usage=Usage(1, 1), finish_reason=delta.finish_reason)

    def pass_text(self, delta: TokenDelta, sink: Callable[[str], bool]) -> GenerateChunk | None:
        chunk = self.build_chunk(delta)
        if not self.plain or chunk.finish_reason is not None:
            return chunk
        text = chunk.text.replace("0", "")
        if not text or sink(text):
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

    def take_text(text: str) -> bool:
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
