"""Shadows of routes before models of a few lines: who gets copies, of what, and what is told of the answers."""

import asyncio
import mmap
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from charonia.core.errors import Internal, QueueFull
from charonia.core.media import MediaSource
from charonia.core.metrics import Histogram
from charonia.core.model import Capabilities, ModelConfig
from charonia.core.request import (
    ChatMessage,
    Conversation,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    InferRequest,
    InferResponse,
    Prompt,
    TextWithMedia,
    TokenizedPrompt,
    TokenizeRequest,
    Usage,
)
from charonia.core.request_context import RequestContext
from charonia.core.sampling import SamplingParams
from charonia.core.speech import Speech
from charonia.core.tensor import Tensor, TensorSpec
from charonia.extras.rollouts.extension import SHADOWS
from charonia.extras.rollouts.shadow import SHADOW_TENANT, ShadowTraffic
from charonia.processes.client_shared_memory import is_lent
from charonia.repository.gateway import InProcessGateway
from charonia.repository.model_registry import LoadedModel
from charonia.routing.route import Route, RouteArm, RouteShadow

from ...repository.test_gateway import Echo
from ...waiting import until

HALF = (TensorSpec("A", "FP32", (-1,)),)


class Shadowed(Echo):
    """Adds `off` to its input, fails with `failure` if there is one, and keeps who asked what."""

    def __init__(self, version: str, off: float = 0.0) -> None:
        super().__init__("m")
        self.config = ModelConfig("m", version, "toy", inputs=HALF, outputs=HALF)
        self.off, self.asked, self.tokens = off, list[RequestContext](), (1, 2, 3)
        self.inputs: list[Tensor] = []
        self.fails: Exception | None = None
        self.go = asyncio.Event()
        self.go.set()

    async def infer(self, request: InferRequest, context: RequestContext) -> AsyncGenerator[InferResponse, None]:
        self.asked.append(context)
        self.inputs.append(request.inputs["A"])
        await self.go.wait()
        if self.fails is not None:
            raise self.fails
        yield InferResponse((Tensor.from_values("A", "FP32", request.inputs["A"].data + self.off),))


class Text(Shadowed):
    """Writes the same whatever it is asked: `tokens`, or `pieces` of a text."""

    pieces: tuple[bytes, ...] | list[bytes] = (b"one, ", b"two")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(text=self)

    async def infer(self, request: InferRequest, context: RequestContext) -> AsyncGenerator[InferResponse, None]:
        for piece in self.pieces:
            yield InferResponse((Tensor.from_values("text_output", "BYTES", [piece]),))
        context.finish()

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        return TokenizedPrompt([])

    async def detokenize(self, ids: list[int]) -> str:
        return ""

    async def tokenizer_info(self) -> dict[str, Any]:
        raise NotImplementedError

    async def generate(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[GenerateChunk, None]:
        self.asked.append(context)
        yield GenerateChunk(text="", token_ids=self.tokens[:1], usage=Usage(1, 1))
        last = GenerateChunk(text="", token_ids=self.tokens[1:], usage=Usage(1, 3), finish_reason=FinishReason.STOP)
        yield last
        context.finish()


class World:
    """A route of version 1, whose shadow is version 2."""

    def __init__(self, backend: str = "toy", kind: type[Shadowed] = Shadowed, **shadow: Any) -> None:
        self.gateway = InProcessGateway()
        self.arm, self.shadow = kind("1"), kind("2")
        self.shadow.config = replace(self.shadow.config, backend=backend)
        models: list[Any] = [self.arm, self.shadow]
        self.loaded = {model.config.version: LoadedModel(model, model.config) for model in models}
        self.gateway.registry.get_or_add("m").publish(self.loaded)
        self.traffic = ShadowTraffic(self.gateway)
        self.gateway.routes.add_observer(self.traffic, SHADOWS.route_fields)
        self.serve(**shadow)

    def serve(self, **shadow: Any) -> None:
        document = {"model": "m", "version": 2, **shadow}
        copied = msgspec.convert(document, RouteShadow)
        self.gateway.routes.replace({"r": Route((RouteArm("m", 1, 1),), shadow=copied)})

    async def infer(self, value: float = 1.0, data: Any = None, **parameters: Any) -> None:
        """One request for the route, whose copy, if there is one, has been answered."""
        tensor = Tensor.from_values("A", "FP32", [value]) if data is None else Tensor("A", "FP32", data.shape, data)
        with suppress(Internal), self.gateway.open_request("test") as context:
            model = await self.gateway.acquire(context, "r")
            request = InferRequest(inputs={"A": tensor}, parameters=parameters)
            async with aclosing(model.infer(request)) as responses:
                assert [response async for response in responses]
        await until(lambda: self.traffic.copies == 0 or not self.shadow.go.is_set())

    async def generate(self, prompt: Prompt = "hello", speech: Speech | None = None, **sampling: Any) -> None:
        with self.gateway.open_request("test") as context:
            model = await self.gateway.acquire(context, "r")
            request = GenerateRequest(id="x", prompt=prompt, sampling=SamplingParams(**sampling), speech=speech)
            async with aclosing(model.generate(request)) as chunks:
                assert len([chunk async for chunk in chunks]) == 2
        await until(lambda: self.traffic.copies == 0)

    @property
    def outcomes(self) -> dict[str, int]:
        assert self.traffic.bytes >= 0
        return {outcome: count for (_, outcome), count in self.traffic.outcomes.items()}

    def seconds(self) -> list[int]:
        """How many times were measured of the shadow, and of the arm."""
        read = [reading for measured in self.traffic.measure() for reading in measured.readings]
        return [sum(each.value.counts) for each in read if isinstance(each.value, Histogram)]


async def test_a_share_of_the_requests_is_copied_and_counts_for_no_client() -> None:
    world = World(share=0.25)
    for _ in range(40):
        await world.infer()
    assert (len(world.arm.asked), len(world.shadow.asked)) == (40, 10)
    assert world.outcomes == {"answered": 10}
    assert world.seconds() == [10, 10]
    copied = world.shadow.asked[0]
    assert (copied.tenant, copied.background, copied.counted, copied.headers) == (SHADOW_TENANT, True, True, ())
    counted = {
        tuple(measurement.labels.values())
        for measurement in world.gateway.measurements()
        for reading in measurement.readings
        if reading.family == "charonia_route_requests_total"
    }
    assert counted == {("m", "1")}
    assert (world.traffic.copies, world.traffic.bytes) == (0, 0)
    assert [value.in_flight.count for value in world.loaded.values()] == [0, 0]
    assert world.gateway.in_flight.count == 0
    world.gateway.routes.replace({})
    assert (world.outcomes, list(world.traffic.measure())) == ({}, [])


@pytest.mark.parametrize(
    ("shadow", "off", "outcome"),
    [
        ({"compare": "tensors"}, 0.0, "same"),
        ({"compare": "tensors"}, 1e-3, "different"),
        ({"compare": "tensors", "tolerance": 0.01}, 1e-3, "same"),
        ({"compare": "tensors", "tolerance": 1e-4}, 1e-3, "different"),
        ({}, 5.0, "answered"),
        ({"compare": "tokens"}, 0.0, "answered"),
    ],
)
async def test_tensors_are_compared_as_stated(shadow: dict[str, Any], off: float, outcome: str) -> None:
    world = World(**shadow)
    world.shadow.off = off
    await world.infer()
    await world.infer(data=np.ones(40_000, np.float32))
    assert world.outcomes == {outcome: 2}


async def test_tokens_are_compared_where_they_are_no_chance() -> None:
    world = World(kind=Text, compare="tokens")
    await world.generate(temperature=0)
    await world.generate(seed=3)
    await world.generate(temperature=1)
    assert world.outcomes == {"same": 2, "answered": 1}
    world.shadow.tokens = (1, 2)
    await world.generate(temperature=0)
    world.shadow.tokens = (1, 2, 4)
    await world.generate(temperature=0)
    assert world.outcomes == {"same": 2, "answered": 1, "different": 2}
    assert len({context.tenant for context in world.shadow.asked}) == 1


async def test_texts_through_v2_are_compared_however_they_are_cut() -> None:
    world = World(kind=Text, compare="tokens")
    for parameters in ({"temperature": 0}, {"random_seed": 7}, {}, {"temperature": 0.5}):
        await world.infer(**parameters)
    assert world.outcomes == {"same": 2, "answered": 2}
    world.shadow.pieces = [b"on", b"e, tw", b"o"]
    await world.infer(seed=1)
    world.shadow.pieces = [b"one, tw"]
    await world.infer(seed=1)
    world.shadow.pieces = [b"one, ", b"four"]
    await world.infer(seed=1)
    assert world.outcomes == {"same": 3, "answered": 2, "different": 2}
    world.serve(compare="tensors")
    await world.infer(seed=1)
    assert world.outcomes["answered"] == 3


async def test_failures_are_told_apart_by_whose_they_are(caplog: pytest.LogCaptureFixture) -> None:
    world = World(compare="tensors")
    world.shadow.fails = Internal("no luck")
    await world.infer()
    await world.infer()
    world.arm.fails = Internal("none here")
    await world.infer()
    world.shadow.fails = None
    await world.infer()
    world.arm.fails, world.shadow.fails = None, QueueFull("full", retry_after=1)
    await world.infer()
    assert world.outcomes == {"failed": 2, "both_failed": 1, "arm_failed": 1, "dropped": 1}
    assert caplog.text.count("the shadow of route 'r', m:2: a copy failed: no luck") == 1


async def test_a_shadow_that_hangs_holds_up_nobody_and_no_more_than_the_bound() -> None:
    world = World(compare="tensors")
    world.traffic.most = 3
    world.shadow.go.clear()
    for _ in range(8):
        await world.infer()
    assert (world.traffic.copies, world.outcomes) == (3, {"dropped": 5})
    world.gateway.begin_exit()
    await until(lambda: world.traffic.copies == 0)
    assert world.traffic.bytes == 0
    assert [value.in_flight.count for value in world.loaded.values()] == [0, 0]


async def test_what_copies_hold_is_bounded() -> None:
    world = World(compare="tensors")
    world.traffic.most_bytes = 1000
    await world.infer(data=np.ones(300, np.float32))
    assert world.outcomes == {"dropped": 1}
    await world.infer(data=np.ones(200, np.float32))  # the answer finds no room to be compared
    assert world.outcomes == {"dropped": 1, "answered": 1}
    assert (world.traffic.copies, world.traffic.bytes) == (0, 0)


async def test_pictures_and_sounds_count_as_what_copies_hold() -> None:
    world = World(kind=Text)
    world.traffic.most_bytes = 999
    picture, sound = (MediaSource(kind, bytes(1000)) for kind in ("image", "audio"))
    await world.generate(TextWithMedia("<image>", (picture,)))
    await world.generate(Conversation((ChatMessage(role="user", content="a", media=(picture,)),)))
    await world.generate("", Speech(sound))
    assert world.outcomes == {"dropped": 3}


async def test_requests_that_fail_by_the_client_or_are_left_are_not_copied() -> None:
    world = World()
    with world.gateway.open_request("test") as context:
        model = await world.gateway.acquire(context, "r")
        async with aclosing(model.infer(InferRequest(inputs={"A": Tensor.from_values("A", "FP32", [1])}))):
            pass
    assert (world.traffic.copies, world.shadow.asked) == (0, [])


async def test_sequences_are_copied_whole_or_not_at_all() -> None:
    world = World()
    await world.infer(sequence_id=7, sequence_start=True)
    assert world.shadow.asked == []
    world.serve(share=0.5, also=["sequences"])
    for id_ in range(1, 41):
        for _ in range(3):
            await world.infer(float(id_), sequence_id=id_)
    copied = [float(each.data[0]) for each in world.shadow.inputs]
    assert 5 < len({*copied}) < 35
    assert {copied.count(each) for each in copied} == {3}


async def test_what_a_client_lends_is_copied_only_if_the_route_says_so() -> None:
    world = World()
    memory = memoryview(mmap.mmap(-1, 4096))
    lent = np.frombuffer(memory[:8], np.float32)
    assert is_lent(lent)
    assert is_lent(lent.reshape(2, 1)[0])
    assert not is_lent(np.ones(2))
    assert not is_lent(np.frombuffer(b"12345678", np.float32))
    await world.infer(data=lent)
    assert world.shadow.asked == []
    world.serve(also=["shared_memory"])
    await world.infer(data=lent)
    assert len(world.shadow.inputs) == 1
    assert not is_lent(world.shadow.inputs[0].data)


@pytest.mark.parametrize(("backend", "also"), [("python", "python"), ("ensemble", "pipelines")])
async def test_models_that_may_do_more_than_answer_get_copies_only_if_the_route_says_so(
    backend: str, also: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(backend)
    await world.infer()
    assert (world.outcomes, world.shadow.asked) == ({"excluded": 1}, [])
    assert f"also: [{also}]" in caplog.text
    world.serve(also=[also])
    await world.infer()
    assert world.outcomes == {"excluded": 1, "answered": 1}


@pytest.mark.parametrize(
    ("shadow", "says"),
    [
        ({"share": 0}, "share must be above 0 and at most 1, got 0"),
        ({"share": 5}, "share must be above 0 and at most 1, got 5"),
        ({"tolerance": 0.1}, "tolerance is for compare: tensors"),
        ({"compare": "text"}, "Invalid enum value 'text'"),
        ({"also": ["files"]}, "Invalid enum value 'files'"),
    ],
)
def test_a_wrong_shadow_is_refused(shadow: dict[str, Any], says: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=says):
        msgspec.convert({"model": "m", **shadow}, RouteShadow)
