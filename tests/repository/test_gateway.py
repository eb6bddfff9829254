"""The gateway: lookup, validation, dispatch, readiness and the way out, over models of a few lines."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress

import numpy as np
import pytest

from charonia.core.errors import (
    CharoniaError,
    Internal,
    InvalidArgument,
    NotFound,
    QueueFull,
    ServerExiting,
    Unavailable,
)
from charonia.core.gateway import ModelState, RepositoryIndexEntry
from charonia.core.metrics import ModelStatistics, Reading, VersionStatistics
from charonia.core.model import Capabilities, ModelConfig, ModelStats
from charonia.core.request import (
    GenerateChunk,
    GenerateRequest,
    InferRequest,
    InferResponse,
    TokenizedPrompt,
    TokenizeRequest,
    Usage,
)
from charonia.core.request_context import QUEUE_FULL_ENDS, Outcome, RequestContext, RequestEnd
from charonia.core.tensor import Tensor, TensorSpec
from charonia.repository.gateway import InProcessGateway
from charonia.routing.route import Route, RouteArm, RouteRule, RouteTarget

from ..built_models import serve_model


class Echo:
    """Answers twice with its first input, then waits if the request says so."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def __init__(self, name: str = "echo", failure: Exception | None = None, max_batch_size: int = 0) -> None:
        inputs = (TensorSpec("A", "INT32", (-1,)), TensorSpec("B", "FP32", (2,), optional=True))
        outputs = (TensorSpec("A", "INT32", (-1,)),)
        self.config = ModelConfig(name, "2", "echo", max_batch_size=max_batch_size, inputs=inputs, outputs=outputs)
        self.failure = failure
        self.is_ready = True
        self.open = 0
        self.unloaded = False
        self.waiting = asyncio.Event()

    async def load(self) -> None:
        if self.failure:
            raise self.failure

    async def unload(self) -> None:
        self.unloaded = True

    def stats(self) -> ModelStats:
        return ModelStats(self.is_ready)

    def statistics(self) -> VersionStatistics:
        return VersionStatistics(inference_count=3)

    async def infer(self, request: InferRequest, context: RequestContext) -> AsyncGenerator[InferResponse, None]:
        self.open += 1
        try:
            yield InferResponse((request.inputs["A"],))
            if request.parameters.get("wait"):
                self.waiting.set()
                await asyncio.Event().wait()
            yield InferResponse((request.inputs["A"],))
        finally:
            self.open -= 1


class Writer(Echo):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(text=self)

    async def generate(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[GenerateChunk, None]:
        yield GenerateChunk(text=str(request.prompt), token_ids=(1,), usage=Usage(1, 1))

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        self.waiting.set()
        await asyncio.sleep(0)
        return TokenizedPrompt([])

    async def detokenize(self, ids: list[int]) -> str:
        return ""

    async def tokenizer_info(self) -> dict[str, object]:
        raise NotImplementedError


A = Tensor.from_values("A", "INT32", [1, 2])


async def gateway_of(*models: Echo, strict: bool = True) -> InProcessGateway:
    gateway = InProcessGateway(strict)
    for model in models:
        await serve_model(gateway, model, "2")
    return gateway


async def collect(gateway: InProcessGateway, name: str, version: str = "", **request: object) -> list[InferResponse]:
    with gateway.open_request("test") as context:
        model = await gateway.acquire(context, name, version)
        async with aclosing(model.infer(InferRequest(**{"inputs": {"A": A}} | request))) as responses:
            return [response async for response in responses]


async def test_dispatch() -> None:
    gateway = await gateway_of(Echo())
    for version in ("", "2"):
        assert [response.outputs for response in await collect(gateway, "echo", version)] == [(A,), (A,)]


@pytest.mark.parametrize(
    ("name", "version", "kind", "text"),
    [
        ("no", "", NotFound, "Request for unknown model: 'no' is not found"),
        ("echo", "1", NotFound, "Request for unknown model: 'echo' version 1 is not found"),
        ("broken", "", NotFound, "Request for unknown model: 'broken' has no available versions"),
        ("broken", "2", Unavailable, "Request for unknown model: 'broken' version 2 is not at ready state"),
    ],
)
async def test_lookup_errors(name: str, version: str, kind: type[CharoniaError], text: str) -> None:
    gateway = await gateway_of(Echo(), Echo("broken", Internal("no weights")))
    with pytest.raises(kind) as lookup:
        gateway.model_config(name, version)
    with pytest.raises(kind) as inference:
        await collect(gateway, name, version)
    assert lookup.value.message == inference.value.message == text


async def test_another_name_finds_the_model_which_counts_under_its_own() -> None:
    gateway = await gateway_of(Echo(), Echo("other"))
    gateway.registry.aliases["gpt"] = "echo"
    with gateway.open_request("test") as context:
        model = await gateway.acquire(context, "gpt")
        assert (context.model, context.version, model.config.name) == ("echo", "2", "echo")
    assert gateway.model_config("gpt").name == "echo"
    assert gateway.served_versions("gpt") == ("2",)
    assert gateway.is_model_ready("gpt")
    assert [each.name for each in gateway.model_statistics("gpt")] == ["echo"]
    assert [config.name for config in gateway.model_configs()] == ["echo", "other"]
    with pytest.raises(NotFound, match="version 7 is not found"):
        gateway.model_config("gpt", "7")


async def test_text_and_no_text() -> None:
    gateway = await gateway_of(Echo(), Writer("writer"))
    request = GenerateRequest(id="1", prompt="hi")
    with gateway.open_request("test") as context:
        async with aclosing((await gateway.acquire(context, "writer")).generate(request)) as chunks:
            assert [chunk.text async for chunk in chunks] == ["hi"]
    with gateway.open_request("test") as context:
        echo = await gateway.acquire(context, "echo")
        with pytest.raises(InvalidArgument, match="model 'echo' does not generate text"):
            echo.generate(request)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (
            {"inputs": {}},
            "[request id: <id_unknown>] expected number of inputs between 1 and 2 but got 0 inputs for model 'echo'. "
            "Got input(s) [], but missing required input(s) ['A']. Please provide all required input(s).",
        ),
        (
            {"inputs": {"B": Tensor.from_values("B", "FP32", [1, 2])}, "id": "7"},
            "[request id: 7] expected number of inputs between 1 and 2 but got 1 inputs for model 'echo'. "
            "Got input(s) ['B'], but missing required input(s) ['A']. Please provide all required input(s).",
        ),
        ({"inputs": {"A": A, "C": A}}, "unexpected inference input 'C' for model 'echo'"),
        ({"outputs": ("Z",)}, "unexpected inference output 'Z' for model 'echo'"),
        (
            {"inputs": {"A": Tensor.from_values("A", "FP32", [1])}},
            "[request id: <id_unknown>] inference input 'A' data-type is 'FP32', but model 'echo' expects 'INT32'",
        ),
        (
            {"inputs": {"A": A, "B": Tensor.from_values("B", "FP32", [1, 2, 3])}},
            "[request id: <id_unknown>] unexpected shape for input 'B' for model 'echo'. Expected [2], got [3]. ",
        ),
    ],
)
async def test_validation(request_: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await collect(await gateway_of(Echo()), "echo", **request_)
    assert caught.value.message == text


async def test_validation_counts_the_batch() -> None:
    gateway = await gateway_of(Echo(max_batch_size=4))
    with pytest.raises(InvalidArgument, match=r"Expected \[-1,-1\], got \[2\]"):
        await collect(gateway, "echo")
    assert await collect(gateway, "echo", inputs={"A": Tensor.from_values("A", "INT32", [[1, 2]])})


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"A": ()}, "input 'A' has no shape but model requires batch dimension for 'echo'"),
        ({"A": (2, 1), "B": (3, 2)}, "input 'B' batch size does not match other inputs for 'echo'"),
        ({"A": (5, 1)}, "inference request batch-size must be <= 4 for 'echo'"),
        ({"A": (0, 1)}, "inference request batch-size must be >= 1 for 'echo'"),
        # The batch comes before the dims.
        ({"A": (5,)}, "inference request batch-size must be <= 4 for 'echo'"),
    ],
)
async def test_validation_of_the_batch(shapes: dict[str, tuple[int, ...]], text: str) -> None:
    gateway = await gateway_of(Echo(max_batch_size=4))
    types = {"A": ("INT32", np.int32), "B": ("FP32", np.float32)}
    inputs = {
        name: Tensor(name, types[name][0], shape, np.zeros(shape, types[name][1])) for name, shape in shapes.items()
    }
    with pytest.raises(InvalidArgument) as caught:
        await collect(gateway, "echo", inputs=inputs, id="7")
    assert caught.value.message == f"[request id: 7] {text}"


async def test_readiness() -> None:
    good, bad = Echo("good"), Echo("bad", Internal("no"))
    strict, lenient = await gateway_of(good, bad), await gateway_of(good, bad, strict=False)
    assert (strict.ready(), lenient.ready()) == (False, True)
    gateway = await gateway_of(good)
    assert gateway.ready()
    assert gateway.is_model_ready("good")
    good.is_ready = False
    assert not gateway.ready()
    assert not gateway.is_model_ready("good")
    assert not strict.is_model_ready("bad")
    assert (strict.is_model_ready("no"), strict.is_model_ready("good", "7")) == (False, False)
    await strict.lifecycle.close()
    assert not strict.is_model_ready("good")


async def test_nothing_is_ready_in_a_process_that_is_not() -> None:
    healthy = True
    gateway = InProcessGateway(healthy=lambda: healthy)
    await serve_model(gateway, Echo(), "2")
    assert (gateway.ready(), gateway.is_model_ready("echo")) == (True, True)
    healthy = False
    assert (gateway.ready(), gateway.is_model_ready("echo")) == (False, False)


class Queueing(Writer):
    full = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(text=self, queue=self)

    def check_room(self, tenant: str) -> None:
        if self.full:
            raise QueueFull(f"too many of {tenant} wait", retry_after=1)


async def test_a_full_queue_is_known_before_a_body_where_the_model_is() -> None:
    model = Queueing("llm")
    gateway = await gateway_of(model, Echo())

    async def refused(name: str = "") -> bool:
        """By a path that names the model, or by a body that will."""
        with suppress(QueueFull), gateway.open_request("chat") as context:
            context.tenant = "a"
            if name:
                (await gateway.acquire(context, name)).check_room()
            else:
                gateway.check_room(context)
            return False
        assert (context.model, context.version) == ("llm", "2")
        assert context.end == QUEUE_FULL_ENDS["requests"]
        return True

    assert [await refused(name) for name in ("llm", "")] == [False, False]
    model.full = True
    assert [await refused(name) for name in ("llm", "", "echo")] == [True, True, False]
    await serve_model(gateway, Writer("other"), "2")
    assert [await refused(name) for name in ("llm", "", "other")] == [True, False, False], "the body says which"
    await gateway.lifecycle.unload("other")
    assert await refused()
    gateway.routes.replace({"route": Route((RouteArm("llm", 0, 1),))})
    assert [await refused(name) for name in ("route", "")] == [True, False]
    by_body = RouteRule(to=RouteTarget("llm"), field="user", equals="x")
    gateway.routes.replace({"route": Route((RouteArm("llm", 0, 1),), rules=(by_body,))})
    assert not await refused("route")


async def test_what_is_measured_of_models() -> None:
    gateway = await gateway_of(Echo(), Echo("broken", Internal("no weights")))
    gateway.registry.get_or_add("strange").record_load_failure("line 3")
    seen = {
        (labels["model"], reading.family): reading.value
        for labels, readings in gateway.measurements()
        for reading in readings
    }
    assert seen.pop(("echo", "nv_model_load_duration_secs")) >= 0
    assert seen == {
        ("echo", "charonia_model_ready"): 1,
        ("echo", "charonia_model_resident"): 1,
        ("echo", "charonia_model_load_failures_total"): 0,
        ("echo", "charonia_model_last_load_failed"): 0,
        ("broken", "charonia_model_ready"): 0,
        ("broken", "charonia_model_resident"): 0,
        ("broken", "charonia_model_load_failures_total"): 1,
        ("broken", "charonia_model_last_load_failed"): 1,
        ("strange", "charonia_model_ready"): 0,
        ("strange", "charonia_model_resident"): 0,
        ("strange", "charonia_model_load_failures_total"): 1,
        ("strange", "charonia_model_last_load_failed"): 1,
    }
    with gateway.open_request("test") as context:
        assert (await gateway.acquire(context, "echo")).stats().ready


async def test_on_the_way_out() -> None:
    model = Echo()
    gateway = await gateway_of(model)
    with gateway.open_request("test") as context:
        running = (await gateway.acquire(context, "echo")).infer(InferRequest(inputs={"A": A}))
        await anext(running)
        assert gateway.in_flight.count == 1
        gateway.begin_exit()
        assert (gateway.ready(), gateway.exiting()) == (False, True)
        with pytest.raises(Unavailable, match="Server exiting"):
            await collect(gateway, "echo")
        drained = asyncio.create_task(gateway.in_flight.wait_drained())
        assert [response.outputs async for response in running] == [(A,)]
        await asyncio.sleep(0)
        assert not drained.done()
    await drained
    await gateway.lifecycle.close()
    assert model.unloaded


async def test_an_exit_does_not_wait_for_a_request_that_is_still_being_read() -> None:
    gateway = await gateway_of(Echo())
    with gateway.open_request("test") as context:
        model = await gateway.acquire(context, "echo")
        gateway.begin_exit()
        await asyncio.wait_for(gateway.in_flight.wait_drained(), 1)
        with pytest.raises(ServerExiting):
            model.infer(InferRequest(inputs={"A": A}))


async def test_who_only_tokenizes_is_waited_for_too() -> None:
    model = Writer("writer")
    gateway = await gateway_of(model)

    async def tokenize() -> TokenizedPrompt:
        with gateway.open_request("test") as context:
            return await (await gateway.acquire(context, "writer")).tokenize(TokenizeRequest(prompt="x"))

    tokenizing = asyncio.create_task(tokenize())
    await model.waiting.wait()
    assert gateway.in_flight.count == 1
    await gateway.in_flight.wait_drained()
    assert await tokenizing == TokenizedPrompt([])
    with gateway.open_request("test") as context:
        assert await (await gateway.acquire(context, "writer")).detokenize([]) == ""
    assert context.end == RequestEnd(Outcome.DONE)
    assert gateway.in_flight.count == 0


async def test_cancelling_the_reader_closes_the_model() -> None:
    model = Echo()
    gateway = await gateway_of(model)
    reader = asyncio.create_task(collect(gateway, "echo", parameters={"wait": True}))
    await model.waiting.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert (model.open, gateway.in_flight.count) == (0, 0)


async def test_models_unload_whatever_one_of_them_says(caplog: pytest.LogCaptureFixture) -> None:
    class Sticky(Echo):
        async def unload(self) -> None:
            raise RuntimeError("stuck")

    model = Echo()
    await (await gateway_of(Sticky("sticky"), model)).lifecycle.close()
    assert model.unloaded
    assert "did not unload" in caplog.text


class Counting(Echo):
    """Counts the requests that were for it."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[RequestEnd | None] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(measured=self)

    def count(self, context: RequestContext) -> None:
        self.counted.append(context.end)

    def readings(self) -> Iterator[Reading]:
        yield from ()


async def test_an_ended_request_is_counted_once_by_its_model_or_by_nobody() -> None:
    model, seen = Counting(), []
    gateway = InProcessGateway(
        end_listeners=(lambda context: seen.append((context.model, context.version, context.end)),)
    )
    await serve_model(gateway, model, "2")
    await collect(gateway, "echo")
    for name, version in (("echo", "7"), ("no", "")):
        with pytest.raises(NotFound):
            await collect(gateway, name, version)
    done, refused = RequestEnd(Outcome.DONE), RequestEnd(Outcome.REJECTED, "not_found")
    assert seen == [("echo", "2", done), ("echo", "7", refused), ("no", "", refused)]
    assert model.counted == [done, refused]
    homeless = [measured.readings for measured in gateway.measurements() if not measured.labels]
    labels = {"outcome": "rejected", "reason": "not_found"}
    assert homeless == [(Reading("charonia_requests_total", 1, labels),)]


@pytest.mark.parametrize("final", [True, False])
async def test_a_reader_that_stops_at_the_final_response_was_answered(final: bool) -> None:
    class Once(Echo):
        async def infer(self, request: InferRequest, context: RequestContext) -> AsyncGenerator[InferResponse, None]:
            yield InferResponse((A,), final=final)

    gateway = await gateway_of(Once())
    with gateway.open_request("test") as context:
        async with aclosing((await gateway.acquire(context, "echo")).infer(InferRequest(inputs={"A": A}))) as responses:
            await anext(responses)
    assert context.end == RequestEnd(Outcome.DONE if final else Outcome.CANCELLED)


async def test_a_request_that_is_answered_holds_its_inputs_no_more() -> None:
    gateway = await gateway_of(Echo())
    gc.disable()
    try:
        with gateway.open_request("test") as context:
            inputs = {"A": Tensor.from_values("A", "INT32", [1, 2])}
            data = weakref.ref(inputs["A"].data)
            model = await gateway.acquire(context, "echo")
            async with aclosing(model.infer(InferRequest(inputs=inputs))) as responses:
                async for _ in responses:
                    pass
            del inputs, responses, _
            assert data() is None
    finally:
        gc.enable()


async def test_a_request_given_up_is_cancelled() -> None:
    seen: list[RequestEnd | None] = []
    gateway = InProcessGateway(end_listeners=(lambda context: seen.append(context.end),))
    await serve_model(gateway, Echo(), "2")
    with gateway.open_request("test") as context:
        async with aclosing((await gateway.acquire(context, "echo")).infer(InferRequest(inputs={"A": A}))) as responses:
            await anext(responses)
    assert seen == [RequestEnd(Outcome.CANCELLED)]


async def test_what_is_known_of_models() -> None:
    gateway = await gateway_of(Echo(), Echo("broken", Internal("no weights")))
    assert gateway.served_versions("echo") == ("2",)
    assert (
        gateway.model_statistics()
        == gateway.model_statistics("echo")
        == [ModelStatistics("echo", "2", VersionStatistics(inference_count=3))]
    )
    ready = RepositoryIndexEntry("echo", "2", ModelState.READY)
    assert (await gateway.repository_index()) == [
        ready,
        RepositoryIndexEntry("broken", "2", ModelState.UNAVAILABLE, "no weights"),
    ]
    assert (await gateway.repository_index(ready_only=True)) == [ready]
    for control in (gateway.load_model("echo"), gateway.unload_model("echo")):
        with pytest.raises(Unavailable, match="explicit model load / unload is not allowed"):
            await control
