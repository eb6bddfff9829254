"""Ensembles in a gateway, over the server's builtin models: counts, traces, the cache, and steps that come and go."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from charonia.core.errors import InvalidArgument, NotFound
from charonia.core.request import InferRequest
from charonia.core.request_context import Outcome, RequestContext
from charonia.core.tensor import Tensor
from charonia.repository.builder import ModelBuilder
from charonia.repository.gateway import InProcessGateway
from charonia.repository.model_source import read_model
from charonia.repository.response_cache import ResponseCache
from charonia.telemetry.otlp import OtlpTracer
from charonia.telemetry.request_trace import TraceFileWriter
from charonia.telemetry.shared_state import SharedState
from charonia.telemetry.trace_settings import TraceControl, parse_trace_config

from ..waiting import until

NUMBER = "data_type: TYPE_INT32 dims: [ 1 ]"
CONFIGS = {
    "square": f'backend: "square" input {{ name: "IN" {NUMBER} }} output {{ name: "OUT" {NUMBER} }}'
    " model_transaction_policy { decoupled: true }",
    "echo": f'backend: "identity" input {{ name: "IN" {NUMBER} }} output {{ name: "OUT" {NUMBER} }}'
    " response_cache { enable: true }",
    "repeat": """backend: "repeat" model_transaction_policy { decoupled: true }
        input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] },
                { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
                { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] } ]
        output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] },
                 { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] } ]""",
}


def step(model: str, takes: dict[str, str], makes: dict[str, str]) -> str:
    maps = (("input_map", takes), ("output_map", makes))
    lines = [f'{kind} {{ key: "{key}" value: "{value}" }}' for kind, pairs in maps for key, value in pairs.items()]
    return f'step {{ model_name: "{model}" model_version: -1 {" ".join(lines)} }}'


def ensemble(*steps: str, extra: str = "model_transaction_policy { decoupled: true }") -> str:
    return f"""platform: "ensemble" {extra} input {{ name: "X" {NUMBER} }} output {{ name: "Y" {NUMBER} }}
        ensemble_scheduling {{ {" ".join(steps)} }}"""


SQUARE = step("square", {"IN": "X"}, {"OUT": "s"})
ENSEMBLES = {
    "squares": ensemble(SQUARE, step("echo", {"IN": "s"}, {"OUT": "Y"})),
    "outer": ensemble(step("squares", {"X": "X"}, {"Y": "s"}), step("echo", {"IN": "s"}, {"OUT": "Y"})),
    "plain": ensemble(step("echo", {"IN": "X"}, {"OUT": "Y"}), extra="response_cache { enable: true }"),
    "undeclared": ensemble(SQUARE, step("echo", {"IN": "s"}, {"OUT": "Y"}), extra=""),
    "around": ensemble(step("undeclared", {"X": "X"}, {"Y": "Y"}), extra=""),
    "delayed": """platform: "ensemble" model_transaction_policy { decoupled: true }
        input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] },
                { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
                { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] } ]
        output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ] ensemble_scheduling { """
    + step("repeat", {"IN": "IN", "DELAY": "DELAY", "WAIT": "WAIT"}, {"OUT": "r"})
    + step("echo", {"IN": "r"}, {"OUT": "Y"})
    + " }",
    "branched": f"""platform: "ensemble" input {{ name: "X" {NUMBER} }}
        output [ {{ name: "Y" {NUMBER} }}, {{ name: "Z" {NUMBER} }} ] ensemble_scheduling {{ """
    + SQUARE
    + step("echo", {"IN": "s"}, {"OUT": "Y"})
    + step("echo", {"IN": "X"}, {"OUT": "Z"})
    + " }",
}


class Served:
    """A gateway over all of these models. `ended`: the contexts of its requests, with those made of them."""

    def __init__(self, directory: Path, shared: SharedState | None = None) -> None:
        self.directory = directory
        self.ended: list[RequestContext] = []
        self.children: list[RequestContext] = []
        for name, config in {**CONFIGS, **ENSEMBLES}.items():
            (directory / name / "1").mkdir(parents=True)
            (directory / name / "config.pbtxt").write_text(config)
        builder = ModelBuilder(cache=ResponseCache(1 << 20))
        self.gateway = InProcessGateway(end_listeners=[self._hear], shared_state=shared, builder=builder)

    def _hear(self, context: RequestContext) -> None:
        self.ended.append(context)
        self.children += context.children or ()

    async def load(self, *names: str) -> None:
        for name in names or (*CONFIGS, *ENSEMBLES):
            await self.gateway.lifecycle.load(read_model(self.directory / name))

    async def responses(
        self, model: str, outputs: tuple[str, ...] | None = None, **inputs: np.ndarray
    ) -> AsyncIterator[int]:
        """The first output of each response."""
        tensors = {
            name: Tensor(name, _DATATYPES[array.dtype.char], array.shape, array) for name, array in inputs.items()
        }
        with self.gateway.open_request("test") as context:
            handle = await self.gateway.acquire(context, model)
            async with aclosing(handle.infer(InferRequest("id", tensors, outputs))) as responses:
                async for response in responses:
                    yield int(response.outputs[0].data.item())

    async def ask(self, model: str, x: int, outputs: tuple[str, ...] | None = None) -> list[int]:
        return [response async for response in self.responses(model, outputs, X=np.array([x], np.int32))]

    def counts(self, model: str) -> tuple[int, int, int]:
        """Requests that succeeded and failed, and those that a cache had."""
        [each] = self.gateway.model_statistics(model)
        said = each.statistics.inference
        return said.success.count, said.fail.count, said.cache_hit.count


_DATATYPES = {"i": "INT32", "I": "UINT32"}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    made = Served(tmp_path)
    await made.load()
    yield made
    await made.gateway.lifecycle.close()


async def test_every_pass_counts_for_its_model_and_the_request_for_the_ensemble(served: Served) -> None:
    assert await served.ask("squares", 3) == [3, 3, 3]
    assert served.counts("square") == (1, 0, 0)
    assert served.counts("echo") == (3, 0, 2)
    assert served.counts("squares") == (1, 0, 0)
    compute = [
        served.gateway.model_statistics(name)[0].statistics.inference.compute_infer for name in ("squares", "square")
    ]
    assert compute[0].ns > compute[1].ns > 0
    [ended] = {each.end.outcome for each in served.ended if each.end is not None}
    assert ended is Outcome.DONE


async def test_streams_within_ensembles_within_ensembles(served: Served) -> None:
    assert await served.ask("outer", 4) == [4, 4, 4, 4]
    assert served.counts("squares") == served.counts("outer") == (1, 0, 0)
    assert served.counts("echo")[0] == 8


@pytest.mark.parametrize("name", ["undeclared", "around"])
async def test_an_ensemble_is_decoupled_if_a_step_is_whatever_its_config_says(served: Served, name: str) -> None:
    assert await served.ask(name, 3) == [3, 3, 3]
    config = served.gateway.model_config(name)
    assert (config.decoupled, config.raw["model_transaction_policy"]) == (True, {"decoupled": True})
    assert list(config.raw) == list(served.gateway.model_config("squares").raw)
    first = [measurement for measurement in served.gateway.measurements() if measurement.labels.get("model") == name]
    histogram = [
        reading for reading in first[0].readings if reading.family == "nv_inference_first_response_histogram_ms"
    ]
    assert [sum(each.value.counts) for each in histogram] == [1]


async def test_steps_that_no_wanted_output_needs_do_not_run(served: Served) -> None:
    """Nor do they multiply the answers, or fail the request."""
    assert await served.ask("branched", 3, ("Z",)) == [3]
    assert served.counts("square") == (0, 0, 0)
    assert await served.ask("branched", 3, ("Z", "Y")) == await served.ask("branched", 3) == [3, 3, 3]
    assert served.counts("square") == (2, 0, 0)
    await served.gateway.lifecycle.unload("square")
    assert await served.ask("branched", 4, ("Z",)) == [4]
    with pytest.raises(NotFound):
        await served.ask("branched", 4, ("Y",))


async def test_answers_are_cached_whole_and_by_step(served: Served) -> None:
    assert [await served.ask("plain", 7) for _ in range(3)] == [[7]] * 3
    assert served.counts("plain") == (3, 0, 2)
    assert served.counts("echo") == (1, 0, 0)


async def test_a_failing_step_counts_as_such_and_for_the_ensemble(served: Served) -> None:
    wrong = {"IN": np.array([1, 2], np.int32), "DELAY": np.array([0], np.uint32), "WAIT": np.array([0], np.uint32)}
    with pytest.raises(InvalidArgument, match="in ensemble 'delayed', expected IN and DELAY shape to match"):
        [response async for response in served.responses("delayed", **wrong)]
    assert served.counts("repeat") == served.counts("delayed") == (0, 1, 0)
    failures = {
        (at.labels["model"], reading.labels["reason"]): reading.value
        for at in served.gateway.measurements()
        for reading in at.readings
        if reading.family == "nv_inference_request_failure" and reading.value
    }
    assert failures == {("repeat", "BACKEND"): 1, ("delayed", "OTHER"): 1}


async def test_steps_stand_in_the_trace_of_their_request(tmp_path: Path) -> None:
    path = tmp_path / "traces.json"
    shared = SharedState(traces=TraceControl(parse_trace_config([f"triton,file={path}", "level=TIMESTAMPS", "rate=1"])))
    served = Served(tmp_path / "models", shared)
    writer = TraceFileWriter(shared.traces)
    served.gateway.add_end_listener(writer)
    await served.load("square", "echo", "squares")
    assert await served.ask("squares", 2) == [2, 2]
    await served.gateway.lifecycle.close()
    writer.close()
    models = [load for load in json.loads(path.read_text()) if "model_name" in load]
    first, *others = [(model["model_name"], model.get("parent_id")) for model in models]
    assert (first, sorted(others)) == (("squares", None), [("echo", 1), ("echo", 1), ("square", 1)])
    assert [model["id"] for model in models] == [1, 2, 3, 4]


async def test_a_span_for_every_request_to_a_step(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    shared, kept, tracer = SharedState(), InMemorySpanExporter(), OtlpTracer("http://127.0.0.1:9/v1/traces", "1")
    tracer._provider._active_span_processor._span_processors = (SimpleSpanProcessor(kept),)
    shared.traces.send_spans(True)
    served = Served(tmp_path / "models", shared)
    served.gateway.add_end_listener(tracer)
    await served.load("square", "echo", "squares", "outer")
    assert await served.ask("outer", 1) == [1]
    await served.gateway.lifecycle.close()
    spans = {span.context.span_id: span for span in kept.get_finished_spans()}
    tree = sorted(
        (span.name.split()[-1], spans[span.parent.span_id].name.split()[-1] if span.parent else "")
        for span in spans.values()
    )
    assert tree == [("echo", "outer"), ("echo", "squares"), ("outer", ""), ("square", "squares"), ("squares", "outer")]
    assert len({span.context.trace_id for span in spans.values()}) == 1


async def test_a_step_that_is_loaded_anew_loses_no_request(served: Served) -> None:
    done = asyncio.Event()

    async def traffic() -> int:
        asked = 0
        while not done.is_set():
            assert await served.ask("squares", 2) == [2, 2]
            asked += 1
        return asked

    delays = {"IN": np.arange(4, dtype=np.int32), "DELAY": np.full(4, 30, np.uint32), "WAIT": np.zeros(1, np.uint32)}
    stream = served.responses("delayed", **delays)
    assert await anext(stream) == 0
    clients = [asyncio.create_task(traffic()) for _ in range(4)]
    for _ in range(5):
        await served.load("echo", "square")
    done.set()
    assert all(await asyncio.gather(*clients))
    await served.gateway.lifecycle.unload("echo")
    assert not served.gateway.is_model_ready("delayed")
    assert [each async for each in stream] == [1, 2, 3], "what has begun ends"
    with pytest.raises(NotFound, match="in ensemble 'squares', Request for unknown model: 'echo' has no available"):
        await served.ask("squares", 1)
    await served.load("echo")
    assert await served.ask("squares", 1) == [1]


async def test_a_reader_may_leave_while_a_step_is_unloaded(served: Served) -> None:
    delays = {"IN": np.arange(4, dtype=np.int32), "DELAY": np.full(4, 30, np.uint32), "WAIT": np.zeros(1, np.uint32)}
    stream = served.responses("delayed", **delays)
    assert await anext(stream) == 0
    unloading = asyncio.create_task(served.gateway.lifecycle.unload("repeat"))
    await until(lambda: not served.gateway.is_model_ready("repeat"))
    await stream.aclose()
    await asyncio.wait_for(unloading, 10)
    await served.load("repeat", "echo")
    assert await served.ask("squares", 2) == [2, 2]
    assert [response async for response in served.responses("delayed", **delays)] == [0, 1, 2, 3]
