"""What a composite model counts, whoever composes it: the ends of requests, and the first responses of streams."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import cast

import pytest

from charonia.core.backends import AskedVersion, RequestTimes
from charonia.core.errors import NotReady
from charonia.core.gateway import ModelLookup
from charonia.core.model import ModelConfig
from charonia.core.request import InferRequest, InferResponse
from charonia.core.request_context import RequestContext
from charonia.ensembles.composite_model import CompositeModel

from .pipelines import Models, request

CONFIG = ModelConfig("made", "1", "ensemble", decoupled=True)


class Answers:
    """A composition that answers twice, and calls `between` before the second one."""

    def __init__(self, between: Callable[[], None] = lambda: None, asked: str = "text") -> None:
        self.between = between
        self.asked = [AskedVersion(asked)]

    async def load(self) -> ModelConfig:
        return CONFIG

    async def unload(self) -> None: ...

    async def answer(
        self, request: InferRequest, context: RequestContext, times: RequestTimes
    ) -> AsyncGenerator[InferResponse, None]:
        yield InferResponse(())
        self.between()
        yield InferResponse((), final=True)


async def made(composition: Answers) -> CompositeModel:
    model = CompositeModel(CONFIG, cast(ModelLookup, Models()), composition)
    await model.load()
    return model


async def read(model: CompositeModel, most: int = 9) -> None:
    async with aclosing(model.infer(request(), RequestContext("test"))) as responses:
        async for _ in responses:
            most -= 1
            if not most:
                return


def fail() -> None:
    raise ZeroDivisionError("code of somebody else")


async def test_ends_of_requests_are_told_apart() -> None:
    model = await made(Answers())
    await read(model)
    await read(model, 2)  # what is closed after the final response has succeeded
    await read(model, 1)
    counts = model.stats()
    assert (counts.success, counts.failure, counts.cancelled) == (2, 0, 1)


async def test_errors_of_any_kind_are_failures() -> None:
    model = await made(Answers(fail))
    with pytest.raises(ZeroDivisionError):
        await read(model)
    counts = model.stats()
    assert (counts.success, counts.failure, counts.cancelled) == (0, 1, 0)


async def test_first_response_of_a_stream_is_measured_once() -> None:
    model = await made(Answers(fail))
    with pytest.raises(ZeroDivisionError):
        await read(model)
    [first] = [
        reading.value for reading in model.readings() if reading.family == "nv_inference_first_response_histogram_ms"
    ]
    assert sum(first.counts) == 1


@pytest.mark.parametrize(("asked", "ready"), [("text", True), ("down", False)])
async def test_is_ready_while_what_it_asks_is(asked: str, ready: bool) -> None:
    model = await made(Answers(asked=asked))
    assert model.stats().ready is ready
    assert await model.unready_reason() == ("" if ready else "down is not ready")
    await model.unload()
    assert not model.stats().ready
    with pytest.raises(NotReady, match="model 'made' is not loaded"):
        await read(model)
