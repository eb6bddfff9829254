"""Calls of a Python model: other models, the repository, metrics."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from charonia.classic_backends.model import ClassicModel
from charonia.classic_backends.python.python_backend import PythonBackend
from charonia.core.errors import InvalidArgument, NotFound, Unavailable
from charonia.core.metrics import Histogram
from charonia.core.model import ModelConfig
from charonia.core.request import InferRequest, InferResponse
from charonia.core.request_context import Outcome, RequestContext
from charonia.core.tensor import Tensor
from charonia.repository.gateway import InProcessGateway
from charonia.telemetry.shared_state import ModelServices

from ...waiting import until
from ..asking import answers, serving
from .python_models import config, python_model, request, values, write_model


class OtherModels(InProcessGateway):
    """A gateway to models that are made up: `double` answers once, `count` as often as its input says, as does `slow`
    when it may `go`, and `hang` never."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[RequestContext] = []
        self.seen: list[InferRequest] = []
        self.running = self.made = 0
        self.calls: list[Any] = []
        self.go = asyncio.Event()

    def open_request(self, endpoint: str, headers: Any = ()) -> RequestContext:
        context = RequestContext(endpoint, headers)
        context.on_end(self.ended.append)
        return context

    async def acquire(self, context: RequestContext, name: str, version: str = "") -> Any:
        if name not in ("double", "count", "slow", "hang", "fail"):
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        context.model, context.version = name, version
        return _Handle(self, name, context)

    async def unready_reason(self, name: str, version: str = "") -> str:
        return "" if name == "double" else "Model version not ready"

    async def load_model(self, name: str, config: str | None = None, files: Any = ()) -> None:
        if name == "none":
            raise Unavailable("explicit model load / unload is not allowed")
        self.calls.append((name, config, files))

    async def unload_model(self, name: str, dependents: bool = False) -> None:
        self.calls.append(name)


class _Handle:
    def __init__(self, gateway: OtherModels, name: str, context: RequestContext) -> None:
        self.config = ModelConfig(name, "1", "fake", decoupled=name in ("count", "slow"))
        self._gateway, self._name, self._context = gateway, name, context

    async def infer(self, asked: InferRequest) -> AsyncIterator[InferResponse]:
        self._gateway.seen.append(asked)
        self._gateway.running += 1
        data = asked.inputs["X"].data
        try:
            match self._name:
                case "double":
                    yield InferResponse((Tensor("Y", "INT32", data.shape, data * 2),), {"made": "by double"}, True)
                case "count" | "slow":
                    if self._name == "slow":
                        await self._gateway.go.wait()
                    for number in range(int(data[0])):
                        self._gateway.made += 1
                        yield InferResponse((Tensor("Y", "INT32", (1,), np.array([number], np.int32)),))
                case "hang":
                    await asyncio.Event().wait()
                case "fail":
                    raise InvalidArgument("it cannot")
            self._context.finish()
        finally:
            self._gateway.running -= 1


CALL = """
def call(r, model, **more):
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=["Y"],
                                     inputs=[pb_utils.Tensor("X", x(r))], **more)
"""


async def test_another_model_is_asked_and_its_answer_passed_on(tmp_path: Path) -> None:
    body = """
    def execute(self, requests):
        return [self.answer(r) for r in requests]

    def answer(self, r):
        asked = pb_utils.InferenceRequest(
            request_id="inner", correlation_id=7, flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, timeout=9000,
            model_name="double", model_version=2, requested_output_names=["Y"], parameters={"k": "v"},
            inputs=[pb_utils.Tensor("X", x(r))], trace=r.trace())
        response = asked.exec()
        assert not response.has_error() and json.loads(response.parameters()) == {"made": "by double"}
        return y(pb_utils.get_output_tensor_by_name(response, "Y").as_numpy() + 1)
    """
    gateway = OtherModels()
    async with python_model(tmp_path, body, gateway) as model:
        [response] = await answers(model, request(1, 2))
    assert values(response) == {"Y": [3, 5]}
    [asked] = gateway.seen
    sequence = {"sequence_id": 7, "sequence_start": True, "sequence_end": False}
    assert (asked.id, asked.outputs, asked.parameters) == ("inner", ("Y",), {"k": "v", "timeout": 9000, **sequence})
    [context] = gateway.ended
    assert context.end is not None
    assert (context.model, context.version, context.end.outcome) == ("double", "2", Outcome.DONE)


async def test_many_are_asked_at_once_by_coroutines(tmp_path: Path) -> None:
    body = """
    async def execute(self, requests):
        calls = [pb_utils.InferenceRequest(model_name="double", requested_output_names=["Y"],
                 inputs=[pb_utils.Tensor("X", np.array([n], np.int32))]).async_exec() for n in range(20)]
        found = await asyncio.gather(*calls)
        hanging = pb_utils.InferenceRequest(model_name="hang", requested_output_names=["Y"],
                                            inputs=[pb_utils.Tensor("X", np.array([1], np.int32))])
        try:
            await asyncio.wait_for(hanging.async_exec(), 0.05)
        except asyncio.TimeoutError:
            pb_utils.load_model("went on")
        return [y([pb_utils.get_output_tensor_by_name(f, "Y").as_numpy()[0] for f in found]) for r in requests]
    """
    gateway = OtherModels()
    async with python_model(tmp_path, body, gateway) as model:
        [response] = await answers(model, request(1))
        await until(lambda: gateway.running == 0 and len(gateway.ended) == 21)
    assert values(response) == {"Y": [2 * number for number in range(20)]}
    assert gateway.calls == [("went on", None, {})]


@pytest.mark.parametrize("way", ["exec(decoupled=True)", "async_exec(decoupled=True)"])
async def test_a_stream_is_read_as_it_comes(tmp_path: Path, way: str) -> None:
    body = f"""
    async def execute(self, requests):
        [r] = requests
        stream = pb_utils.InferenceRequest(model_name="count", requested_output_names=["Y"],
                                           inputs=[pb_utils.Tensor("X", x(r))]).{way}
        stream = await stream if "{way}".startswith("async") else stream
        found = [int(part.output_tensors()[0].as_numpy()[0]) for part in stream if part.output_tensors()]
        return [y(found)]
    """
    async with python_model(tmp_path, body, OtherModels()) as model:
        [response] = await answers(model, request(5))
    assert values(response) == {"Y": [0, 1, 2, 3, 4]}


async def test_a_short_stream_is_read_once_more(tmp_path: Path) -> None:
    body = """
    def execute(self, requests):
        [r] = requests
        stream = pb_utils.InferenceRequest(model_name="count", requested_output_names=["Y"],
                                           inputs=[pb_utils.Tensor("X", x(r))]).exec(decoupled=True)
        next(stream)
        lengths = [len(list(stream)), len(list(stream))]
        for part in stream:
            break
        return [y([*lengths, len(list(stream)), len(list(stream))])]
    """
    async with python_model(tmp_path, body, OtherModels()) as model:
        for count, lengths in ((5, [5, 6, 5, 6]), (2000, [2000, 0, 0, 0])):
            [response] = await answers(model, request(count))
            assert values(response) == {"Y": lengths}


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("fail", "it cannot", 3),
        (
            "nobody",
            "Failed for execute the inference request. Model 'nobody' is not ready. "
            "Request for unknown model: 'nobody' is not found",
            2,
        ),
        ("count", "model 'count' is decoupled: call exec or async_exec with decoupled=True", 3),
    ],
)
async def test_errors_of_other_models_are_values(tmp_path: Path, name: str, text: str, code: int) -> None:
    body = f"""
    def execute(self, requests):
        [r] = requests
        response = pb_utils.InferenceRequest(model_name="{name}", requested_output_names=["Y"],
                                             inputs=[pb_utils.Tensor("X", x(r))]).exec()
        text = pb_utils.Tensor("T", np.array([response.error().message()], dtype=object))
        return [pb_utils.InferenceResponse([text, pb_utils.Tensor("Y", np.array([response.error().code()], np.int32))])]
    """
    async with python_model(tmp_path, body, OtherModels()) as model:
        [response] = await answers(model, request(1))
    assert values(response) == {"T": [text.encode()], "Y": [code]}


async def test_calls_that_fail_or_are_left_at_once_hold_no_memory(tmp_path: Path) -> None:
    body = """
    def execute(self, requests):
        memory = sys.modules["charonia_stub.connection"].server().writer
        for number in range(200):
            asked = pb_utils.InferenceRequest(model_name="nobody" if number % 2 else "hang", requested_output_names=[],
                                              inputs=[pb_utils.Tensor("X", np.zeros(1 << 16, np.uint8))])
            asked.exec() if number % 2 else asked.exec(decoupled=True).cancel()
        return [y(memory.size) for r in requests]
    """
    async with python_model(tmp_path, body, OtherModels()) as model:
        [response] = await answers(model, request(1))
    [size] = values(response)["Y"]
    assert size <= 4 << 20


STREAMS = """
def stream(r, model):
    asked = pb_utils.InferenceRequest(model_name=model, requested_output_names=[], inputs=[pb_utils.Tensor("X", x(r))])
    return asked.exec(decoupled=True)

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)
"""


async def test_a_stream_that_is_not_read_waits(tmp_path: Path) -> None:
    body = f"""{STREAMS}
def execute(self, requests):
    [r] = requests
    parts = TritonPythonModel.stream(r, "count")
    TritonPythonModel.wait_for({str(tmp_path / "go")!r})
    return [y(sum(len(part.output_tensors()) for part in parts))]
    """
    gateway = OtherModels()
    async with python_model(tmp_path, body, gateway) as model:
        answer = asyncio.create_task(answers(model, request(1000)))
        await until(lambda: gateway.made >= 64)
        await asyncio.sleep(0.05)
        assert gateway.made == 65  # one more than may wait unread
        (tmp_path / "go").touch()
        assert values((await answer)[0]) == {"Y": [1000]}


async def test_a_stream_is_cancelled_by_the_model_alone(tmp_path: Path) -> None:
    body = f"""{STREAMS}
def execute(self, requests):
    [r] = requests
    several = [TritonPythonModel.stream(r, "hang") for _ in range(4)]
    [refused] = TritonPythonModel.stream(r, "hang")
    pb_utils.load_model(refused.error().message())
    while not r.is_cancelled():
        time.sleep(0.01)
    pb_utils.load_model("cancelled")
    TritonPythonModel.wait_for({str(tmp_path / "go")!r})
    several[0].cancel()
    [end] = several[0]
    assert end.error().code() == pb_utils.TritonError.CANCELLED, end.error().message()
    del several[1]
    pb_utils.load_model("left")
    TritonPythonModel.wait_for({str(tmp_path / "end")!r})
    os._exit(1)
    """
    gateway = OtherModels()
    async with python_model(tmp_path, body, gateway, parameters={"max-open-calls": "4"}) as model:
        client = asyncio.create_task(answers(model, request(1)))
        await until(lambda: gateway.running == 4 and gateway.calls)
        client.cancel()
        await until(lambda: len(gateway.calls) == 2)
        assert gateway.running == 4  # the model was told, and goes on
        (tmp_path / "go").touch()
        await until(lambda: len(gateway.calls) == 3 and gateway.running == 2)
        (tmp_path / "end").touch()
        await until(lambda: gateway.running == 0)
    refused, *others = (name for name, _, _ in gateway.calls)
    text = "has 4 requests to other models open, which are the most (max-open-calls)"
    assert (refused, others) == (f"instance 'model_0_0' {text}", ["cancelled", "left"])


async def test_the_repository_is_changed_and_asked(tmp_path: Path) -> None:
    body = """
    def initialize(self, args):
        pb_utils.load_model("one", config="{}", files={"1/model": b"\\x00\\x01"})
        pb_utils.load_model("two")
        pb_utils.unload_model("two")
        try:
            pb_utils.load_model("none")
        except pb_utils.TritonModelException as error:
            self.error = str(error)

    def execute(self, requests):
        seen = [pb_utils.is_model_ready("double"), pb_utils.is_model_ready("other", "3")]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array(seen, np.int32)),
                                            pb_utils.Tensor("T", np.array([self.error]))])]
    """
    gateway = OtherModels()
    async with python_model(tmp_path, body, gateway) as model:
        [response] = await answers(model, request(1))
    assert gateway.calls == [("one", "{}", {"1/model": b"\x00\x01"}), ("two", None, {}), "two"]
    assert values(response) == {"Y": [1, 0], "T": [b"explicit model load / unload is not allowed"]}


async def test_metrics_of_all_kinds(tmp_path: Path) -> None:
    body = """
    def initialize(self, args):
        F = pb_utils.MetricFamily
        self.families = counters, gauges, histograms = [
            F("requests_seen", "how many", F.COUNTER), F("depth", "how deep", F.GAUGE), F("sizes", "", F.HISTOGRAM)]
        self.counter = counters.Metric(labels={"model": "m"})
        self.gauge = gauges.Metric()
        self.histogram = histograms.Metric(buckets=[1, 10])
        self.errors = []
        for wrong in (lambda: F("requests_seen", "", F.GAUGE), lambda: F("9", "", F.GAUGE),
                      lambda: self.counter.set(1), lambda: self.counter.increment(-1), lambda: self.histogram.value(),
                      lambda: gauges.Metric(labels={"a-b": 1}),
                      lambda: histograms.Metric(labels={"a": 1}, buckets=[3, 2]),
                      lambda: histograms.Metric(), lambda: histograms.Metric(buckets=(1, 2)),
                      lambda: gauges.Metric(buckets=[1]), lambda: gauges.Metric(labels=["a"])):
            try:
                wrong()
            except pb_utils.TritonModelException as error:
                self.errors.append(str(error))

    def execute(self, requests):
        self.counter.increment(2)
        self.gauge.set(9)
        self.gauge.increment(-4)
        self.histogram.observe(5)
        assert [text.partition("metric. ")[2] for text in self.errors[7:]] == [
            "Missing required buckets.", "Buckets must be a list.", "Unexpected buckets found.",
            "Labels must be a dictionary."], self.errors
        return [y([self.counter.value(), self.gauge.value()])]
    """
    gateway = OtherModels()
    metrics = gateway.shared_state.metrics
    backend = PythonBackend(ModelServices(gateway, asyncio.get_running_loop()))
    async with serving(backend, config(), write_model(tmp_path, body)) as model:
        [response] = await answers(model, request(1))
        assert values(response) == {"Y": [2, 5]}
        found = {family.name: (family.kind, family.description, list(family.series.values())) for family in metrics}
        assert {name: each[:2] for name, each in found.items()} == {
            "requests_seen": ("counter", "how many"),
            "depth": ("gauge", "how deep"),
            "sizes": ("histogram", ""),
        }
        [counter] = found["requests_seen"][2]
        assert (counter.labels, counter.value) == ((("model", "m"),), 2)
        [histogram] = found["sizes"][2]
        assert isinstance(histogram.value, Histogram)
        assert histogram.value.counts == [0, 1, 0]
    assert list(metrics) == []


async def test_a_metric_that_the_model_drops_goes_and_a_family_takes_its_own_along(tmp_path: Path) -> None:
    body = """
    def execute(self, requests):
        if x(requests[0])[0]:
            F = pb_utils.MetricFamily
            self.family = F("depth", "how deep", F.GAUGE)
            self.gauge = self.family.Metric()
        elif hasattr(self, "gauge"):
            del self.gauge
            self.other = self.family.Metric(labels={"of": "the family"})
        else:
            del self.family
            for operation in (lambda: self.other.set(1), lambda: self.other.increment(1), self.other.value):
                try:
                    operation()
                except pb_utils.TritonModelException as error:
                    assert "as the corresponding 'MetricFamily' has been deleted. The 'MetricF" in str(error), error
                else:
                    raise AssertionError(operation)
        return [y(1)]
    """
    gateway = OtherModels()
    metrics = gateway.shared_state.metrics
    backend = PythonBackend(ModelServices(gateway, asyncio.get_running_loop()))
    async with serving(backend, config(), write_model(tmp_path, body)) as model:
        await answers(model, request(1))
        [family] = metrics
        assert list(family.series) == [()]
        await answers(model, request(0))
        assert list(family.series) == [(("of", "the family"),)]
        await answers(model, request(0))
        assert not list(metrics)


async def test_coroutines_ask_at_once_and_read_beside_each_other(tmp_path: Path) -> None:
    """Each stream is asked for before any of them has an answer, and none of them holds up another coroutine."""
    body = """
    async def read(self, r, way):
        asked = pb_utils.InferenceRequest(model_name="slow", requested_output_names=["Y"],
                                          inputs=[pb_utils.Tensor("X", x(r))])
        stream = await asked.async_exec(decoupled=True)
        if way:
            return [int(p.output_tensors()[0].as_numpy()[0]) async for p in stream if p.output_tensors()]
        return [int(p.output_tensors()[0].as_numpy()[0]) for p in stream if p.output_tensors()]

    async def tick(self):
        while True:
            self.ticks += 1
            await asyncio.sleep(0.001)

    async def execute(self, requests):
        [r] = requests
        self.ticks = 0
        ticking = asyncio.create_task(self.tick())
        parts = await asyncio.gather(*(self.read(r, way % 2) for way in range(4)))
        ticking.cancel()
        assert self.ticks > 1
        return [y(sum(parts, []))]
    """
    gateway = OtherModels()
    async with python_model(tmp_path, body, gateway) as model:
        answer = asyncio.create_task(answers(model, request(3)))
        await until(lambda: gateway.running == 4)
        gateway.go.set()
        assert values((await answer)[0]) == {"Y": [0, 1, 2] * 4}


TALKING = """
    def execute(self, requests):
        for r in requests:
            threading.Thread(target=self.answer, args=(r.get_response_sender(), int(x(r)[0]))).start()

    def answer(self, sender, ends):
        sender.send(y(1))
        while not sender.is_cancelled():
            time.sleep(0.002)
        sender.send(y(2))
        error = pb_utils.TritonError("it heard", pb_utils.TritonError.CANCELLED) if ends else None
        sender.send(pb_utils.InferenceResponse([], error=error), flags=FINAL)
"""
CANCELS = """
    async def execute(self, requests):
        [r] = requests
        asked = pb_utils.InferenceRequest(model_name="model", requested_output_names=["Y"],
                                          inputs=[pb_utils.Tensor("X", x(r))])
        stream = await asked.async_exec(decoupled=True)
        heard = []
        for part in stream:
            heard.append(part.error().message() if part.has_error() else str(len(part.output_tensors())))
            stream.cancel()
        stream.cancel()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("T", np.array(heard))])]
"""


async def test_a_stream_that_is_cancelled_ends_as_the_called_model_ends_it(tmp_path: Path) -> None:
    gateway = Models()
    async with python_model(tmp_path / "talks", TALKING, gateway, decoupled=True) as talks:
        gateway.models["model"] = talks
        async with python_model(tmp_path / "cancels", CANCELS, gateway) as model:
            for ends, end in ((1, b"it heard"), (0, b"0")):
                [response] = await answers(model, request(ends))
                assert values(response) == {"T": [b"1", b"1", end]}


async def test_a_stream_that_was_made_before_it_is_cancelled_can_be_read(tmp_path: Path) -> None:
    makes = f"""
    def execute(self, requests):
        [r] = requests
        sender = r.get_response_sender()
        for number in range(200):
            sender.send(y(number))
        sender.send(flags=FINAL)
        open({str(tmp_path / "made")!r}, "w").close()
    """
    reads = f"""{STREAMS}
def execute(self, requests):
    [r] = requests
    parts = TritonPythonModel.stream(r, "made")
    TritonPythonModel.wait_for({str(tmp_path / "made")!r})
    pb_utils.load_model("made")
    parts.cancel()
    return [y([len([part for part in parts if part.output_tensors()])])]
    """
    gateway = Models()
    async with (
        python_model(tmp_path / "makes", makes, gateway, decoupled=True) as made,
        python_model(tmp_path / "reads", reads, gateway) as model,
    ):
        gateway.models["made"] = made
        [response] = await answers(model, request(1))
    assert values(response) == {"Y": [200]}


class Models(InProcessGateway):
    """A gateway to models of the test's, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[str, ClassicModel] = {}

    def open_request(self, endpoint: str, headers: Any = ()) -> RequestContext:
        return RequestContext(endpoint, headers)

    async def load_model(self, name: str, config: str | None = None, files: Any = ()) -> None:
        """Return when nothing of the model is in flight."""
        await until(lambda: self.models[name].stats().success == 1)

    async def acquire(self, context: RequestContext, name: str, version: str = "") -> Any:
        model = self.models[name]

        def infer(asked: InferRequest) -> Any:
            return model.infer(asked, context)

        return SimpleNamespace(config=model.config, infer=infer)


ASKING = """
    {define} execute(self, requests):
        [r] = requests
        left = int(x(r)[0])
        if not left:
            return [y(1)]
        asked = pb_utils.InferenceRequest(model_name="{other}", requested_output_names=["Y", "T"],
                                          inputs=[pb_utils.Tensor("X", np.array([left - 1], np.int32))])
        {ask}
        if answer.has_error():
            return [pb_utils.InferenceResponse([pb_utils.Tensor("T", np.array([answer.error().message()]))])]
        return [pb_utils.InferenceResponse(answer.output_tensors())]
"""
STREAM = ("def", "answer = next(asked.exec(decoupled=True))")
AWAIT = ("async def", "answer = await asked.async_exec()")
GATHER = ("async def", "answer, _ = await asyncio.gather(asked.async_exec(), asyncio.sleep(0.01))")


def asking(way: tuple[str, str], other: str) -> str:
    return ASKING.format(define=way[0], ask=way[1], other=other)


async def test_models_that_ask_each_other_are_told_that_they_wait_for_ever(tmp_path: Path) -> None:
    gateway = Models()
    name = {"instance_group": [{"kind": "KIND_CPU", "name": "b"}]}
    async with (
        python_model(tmp_path / "a", asking(GATHER, "b"), gateway) as a,
        python_model(tmp_path / "b", asking(STREAM, "a"), gateway, **name) as b,
    ):
        gateway.models.update(a=a, b=b)
        assert values((await answers(a, request(1)))[0]) == {"Y": [1]}
        [response] = await answers(a, request(2))
        [text] = values(response)["T"]
        assert b"models wait for each other, which would never end: " in text
        assert b"instance 'model_0_0' waits for 'b_0'" in text
        assert b"instance 'b_0' waits for 'model_0_0'" in text
        assert values((await answers(a, request(1)))[0]) == {"Y": [1]}


async def test_a_model_may_wait_for_itself_where_it_has_another_instance(tmp_path: Path) -> None:
    gateway = Models()
    async with python_model(tmp_path, asking(AWAIT, "a"), gateway, instances=2) as a:
        gateway.models["a"] = a
        assert values((await answers(a, request(1)))[0]) == {"Y": [1]}
        [response] = await answers(a, request(2))
    assert b"waits for 'model_0_0' or 'model_0_1' (" in values(response)["T"][0]
