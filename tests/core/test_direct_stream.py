"""Items that a reader takes in the turn in which they are made, and those that it leaves to the iteration."""

from collections.abc import AsyncGenerator
from functools import partial

import pytest

from charonia.core.direct_stream import DirectStream, ReadyResponse, relay
from charonia.core.logprobs import TokenLogprob
from charonia.core.request import InferResponse


async def numbers(last: int, closed: list[str], output: DirectStream[int]) -> AsyncGenerator[int, None]:
    """Counts up to `last`, which is always yielded, and so is what the sink leaves."""
    try:
        for number in range(last):
            if output.sink is None or not output.sink(number):
                yield number
        yield last
    finally:
        closed.append("numbers")


def odd_doubled(number: int) -> int | None:
    return 2 * number if number % 2 else None


async def test_items_come_in_order_once_whoever_takes_them() -> None:
    closed: list[str] = []
    stream = DirectStream(partial(numbers, 10, closed))
    taken: list[int] = []

    def take(number: int) -> bool:
        if number in (4, 7):
            return False
        taken.append(number)
        return True

    iterated: list[int] = []
    async for number in stream:
        assert (taken or [-1])[-1] < number
        iterated.append(number)
        stream.sink = take
    assert (iterated, taken) == ([0, 4, 7, 10], [1, 2, 3, 5, 6, 8, 9])
    assert closed == ["numbers"]


@pytest.mark.parametrize("left", [(), (6,), (6, 10), (2, 6, 10, 14, 18)])
async def test_a_relay_converts_each_item_once(left: tuple[int, ...]) -> None:
    closed: list[str] = []
    stream = DirectStream(partial(relay, DirectStream(partial(numbers, 9, closed)), odd_doubled))
    taken: list[int] = []
    iterated: list[int] = []

    def take(number: int) -> bool:
        if number not in left:
            taken.append(number)
        return number not in left

    async for number in stream:
        iterated.append(number)
        stream.sink = take
    assert sorted(iterated + taken) == [2, 6, 10, 14, 18]
    assert iterated == sorted({2, 18, *left})
    assert closed == ["numbers"]


@pytest.mark.parametrize("kept", [False, True])
async def test_a_relay_that_keeps_text_passes_it_on_as_it_is(kept: bool) -> None:
    async def two(output: DirectStream[int]) -> AsyncGenerator[int, None]:
        for _ in range(2):
            yield 1
            assert output.text_sink == (take if kept else None)

    def take(text: str, tokens: int, logprob: TokenLogprob | None) -> bool:
        return True

    source = DirectStream(two)
    stream = DirectStream(lambda output: relay(source, odd_doubled, output, kept))
    async for item in stream:
        assert item == 2
        stream.sink, stream.text_sink = (lambda item: True), take


async def test_closing_closes_what_is_relayed() -> None:
    closed: list[str] = []
    stream = DirectStream(partial(relay, DirectStream(partial(numbers, 9, closed)), odd_doubled))
    assert await anext(stream) == 2
    await stream.aclose()
    assert closed == ["numbers"]


async def test_an_error_of_the_sink_ends_the_stream() -> None:
    closed: list[str] = []
    stream = DirectStream(partial(relay, DirectStream(partial(numbers, 9, closed)), odd_doubled))

    def fail(number: int) -> bool:
        raise ValueError(number)

    assert await anext(stream) == 2
    stream.sink = fail
    with pytest.raises(ValueError, match="6"):
        await anext(stream)
    assert closed == ["numbers"]


async def test_a_response_that_is_ready_is_also_a_stream_of_one() -> None:
    ready = ReadyResponse(InferResponse((), final=True))
    assert [response async for response in ready] == [ready.response]
    closed = ReadyResponse(ready.response)
    await closed.aclose()
    assert not [response async for response in closed]
