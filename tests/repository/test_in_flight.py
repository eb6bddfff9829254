"""Requests that are being answered: how they end, and that nothing of them stays."""

import gc
import weakref

import pytest

from charonia.core.metrics import Outcome
from charonia.core.request import InferResponse
from charonia.core.request_context import RequestContext, request_scope
from charonia.repository.in_flight import CountedStream, InFlightCounter


class Answers:
    """A stream of these."""

    def __init__(self, *responses: InferResponse) -> None:
        self._responses = iter(responses)

    def __aiter__(self) -> "Answers":
        return self

    async def __anext__(self) -> InferResponse:
        try:
            return next(self._responses)
        except StopIteration:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize("final", [True, False])
async def test_who_stops_reading_at_the_final_response_was_answered(final: bool) -> None:
    tally = InFlightCounter(InFlightCounter())
    with request_scope(RequestContext("infer")) as exchange:
        running = CountedStream(Answers(InferResponse((), final=final)), tally, accounted=False)
        assert await anext(running) == InferResponse((), final=final)
        assert tally.count == 1
        await running.aclose()
    assert exchange.end is not None
    assert exchange.end.outcome is (Outcome.DONE if final else Outcome.CANCELLED)
    assert tally.count == 0


@pytest.mark.parametrize("accounted", [True, False])
async def test_a_stream_is_gone_with_its_reader(accounted: bool) -> None:
    stream = Answers(InferResponse(()))
    gone = weakref.ref(stream)
    gc.disable()
    try:
        running = CountedStream(stream, InFlightCounter(), accounted)
        assert await anext(running, None) is not None
        del running, stream
        assert gone() is None
    finally:
        gc.enable()
