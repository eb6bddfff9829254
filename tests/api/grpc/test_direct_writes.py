"""Messages that are written where a model makes them: the same as others, one at a time, and none for who has left."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from charonia.api.grpc.direct_writes import StreamWrites
from charonia.api.grpc.messages import write_response
from charonia.api.infer_call import InferCall, RequestedOutput
from charonia.core.direct_stream import DirectStream
from charonia.core.request import InferRequest, InferResponse
from charonia.core.tensor import Tensor

from ..conftest import LLM

LIMIT = 1 << 20


class Rpc:
    """A call whose writes end when `release` is called, unless it `flows`; `gone`: its client has left."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.flows, self.gone = True, False
        self._waiting: list[asyncio.Future[None]] = []

    async def write(self, message: Any) -> None:
        if self.gone:
            raise grpc.aio.UsageError("RPC already finished.")
        self.written.append(message)
        if not self.flows:
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]
            if self.gone:
                raise asyncio.CancelledError

    def release(self) -> None:
        self._waiting.pop(0).set_result(None)


def response_of(text: str) -> InferResponse:
    return InferResponse((Tensor.from_values("text_output", "BYTES", [text.encode()]),))


async def nothing(output: DirectStream[InferResponse]) -> AsyncGenerator[InferResponse, None]:
    for _ in ():
        yield _


def call_of(**outputs: RequestedOutput) -> InferCall:
    return InferCall(InferRequest("id é", {}, tuple(outputs) or None), outputs)


@pytest.fixture
def rpc() -> Rpc:
    return Rpc()


@pytest.mark.parametrize("text", ["a", "é€\U0001f600", "x" * 200, "x" * 4096])
def test_a_text_alone_is_the_message_of_its_response(rpc: Rpc, text: str) -> None:
    responses = DirectStream(nothing)
    call = call_of()
    with StreamWrites(rpc).direct(responses, LLM, call, LIMIT):
        assert responses.text_sink is not None
        assert responses.sink is not None
        assert responses.text_sink(text, 1, None)
        assert responses.sink(response_of(text))
    alone, whole = (pb.ModelStreamInferResponse.FromString(data) for data in rpc.written)
    assert alone == whole
    assert alone.infer_response == pb.ModelInferResponse.FromString(write_response(LLM, call, response_of(text), False))
    assert (responses.sink, responses.text_sink) == (None, None)


def test_an_output_that_is_returned_otherwise_is_no_text_alone(rpc: Rpc) -> None:
    responses = DirectStream(nothing)
    with StreamWrites(rpc).direct(responses, LLM, call_of(text_output=RequestedOutput(classes=1)), LIMIT):
        assert responses.text_sink is None
    with StreamWrites(rpc).direct(responses, LLM, call_of(), 1000):
        assert responses.text_sink is None, "a text may be longer than allowed"


async def test_one_message_is_written_at_a_time(rpc: Rpc) -> None:
    writes, responses = StreamWrites(rpc), DirectStream(nothing)
    rpc.flows = False
    with writes.direct(responses, LLM, call_of(), LIMIT):
        text_sink, sink = responses.text_sink, responses.sink
        assert text_sink is not None
        assert sink is not None
        assert text_sink("one", 1, None)
        assert not text_sink("two", 1, None)
        assert not sink(response_of("two"))
        other = asyncio.create_task(writes.write(b"other"))
        await asyncio.sleep(0)
        assert len(rpc.written) == 1
        rpc.release()
        await asyncio.sleep(0)
        assert not text_sink("two", 1, None), "the other's turn has come"
        await asyncio.sleep(0)
        assert rpc.written[1:] == [b"other"]
        assert not text_sink("two", 1, None)
        rpc.release()
        await other
        assert sink(response_of("two"))
        assert len(rpc.written) == 3
        rpc.release()
        await asyncio.sleep(0)
        assert text_sink("three", 1, None)


@pytest.mark.parametrize("waits", [False, True])
async def test_who_has_left_gets_no_more(rpc: Rpc, waits: bool) -> None:
    writes, responses = StreamWrites(rpc), DirectStream(nothing)
    rpc.flows, rpc.gone = not waits, not waits
    with writes.direct(responses, LLM, call_of(), LIMIT):
        assert responses.text_sink is not None
        assert responses.text_sink("one", 1, None)
        if waits:
            other = asyncio.create_task(writes.write(b"other"))
            await asyncio.sleep(0)
            rpc.gone = True
            rpc.release()
            with pytest.raises(asyncio.CancelledError):
                await other
        assert not responses.text_sink("two", 1, None), "the reader finds out"
        with pytest.raises(asyncio.CancelledError):
            await writes.write(b"two")


@pytest.mark.parametrize("waits", [False, True])
async def test_a_write_that_breaks_ends_the_call_and_hangs_nobody(waits: bool) -> None:
    class Broken(Rpc):
        async def write(self, message: Any) -> None:
            if waits:
                await asyncio.sleep(0)
            raise ValueError("it cannot be sent")

    writes, responses = StreamWrites(Broken()), DirectStream(nothing)
    with writes.direct(responses, LLM, call_of(), LIMIT):
        assert responses.text_sink is not None
        assert responses.text_sink("one", 1, None)
        async with asyncio.timeout(10):
            with pytest.raises(ValueError, match="it cannot be sent"):
                await writes.write(b"two")
        assert not responses.text_sink("three", 1, None), "one message is missing"
