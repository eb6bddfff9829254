"""Ensembles for tests: configs of steps, models that compute as the server's builtin ones do, and the same by hand."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from charonia.core.backends import RequestTimes
from charonia.core.errors import InvalidArgument
from charonia.core.model import ModelConfig
from charonia.core.request import InferRequest, InferResponse
from charonia.core.request_context import ExecutionTimes, RequestContext
from charonia.core.tensor import Tensor, TensorSpec
from charonia.ensembles.ensemble_model import EnsembleRun
from charonia.ensembles.ensemble_plan import EnsemblePlan, plan_ensemble


def spec(name: str, datatype: str = "INT32", dims: tuple[int, ...] = (1,), optional: bool = False) -> TensorSpec:
    return TensorSpec(name, datatype, dims, optional)


def model(
    name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], decoupled: bool = False, batch: int = 0
) -> ModelConfig:
    return ModelConfig(
        name, "1", "fake", max_batch_size=batch, decoupled=decoupled, inputs=tuple(inputs), outputs=tuple(outputs)
    )


MODELS = {
    "identity": model("identity", [spec("IN")], [spec("OUT")]),
    "add_sub": model("add_sub", [spec("A"), spec("B")], [spec("SUM"), spec("DIFF")]),
    "square": model("square", [spec("IN")], [spec("OUT")], decoupled=True),
    "repeat": model("repeat", [spec("IN")], [spec("OUT")], decoupled=True),
    "few": model("few", [spec("IN")], [spec("OUT")], decoupled=True),
    "nested": model("nested", [spec("IN")], [spec("OUT")], decoupled=True),
    "default": model("default", [spec("IN", optional=True)], [spec("OUT")]),
    "fails": model("fails", [spec("IN")], [spec("OUT")]),
    "text": model("text", [spec("IN", "BYTES")], [spec("OUT", "BYTES")]),
    "wide": model("wide", [spec("IN", dims=(2,))], [spec("OUT", dims=(2,))]),
    "batched": model("batched", [spec("IN", dims=())], [spec("OUT", dims=())], batch=4),
    "lone": model("lone", [spec("IN")], [spec("OUT")], batch=1),
}

Step = tuple[str, Mapping[str, str], Mapping[str, str]]


def ensemble(
    inputs: Sequence[str | TensorSpec],
    outputs: Sequence[str | TensorSpec],
    *steps: Step,
    passes: int = 0,
    batch: int = 0,
) -> ModelConfig:
    raw = {
        "ensemble_scheduling": {
            "step": [
                {"model_name": name, "model_version": -1, "input_map": takes, "output_map": makes}
                for name, takes, makes in steps
            ],
            "max_inflight_requests": passes,
        }
    }
    as_spec = [spec(each) if isinstance(each, str) else each for each in inputs]
    made = [spec(output) if isinstance(output, str) else output for output in outputs]
    return ModelConfig("whole", "1", "ensemble", "ensemble", batch, inputs=tuple(as_spec), outputs=tuple(made), raw=raw)


NESTED = ensemble(["x"], ["y"], ("square", {"IN": "x"}, {"OUT": "s"}), ("identity", {"IN": "s"}, {"OUT": "y"}))


def plan(config: ModelConfig) -> EnsemblePlan:
    return plan_ensemble(config, lambda name, version: MODELS[name])


def compute(name: str, inputs: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The outputs of a model: one set or, of `square`, as many as its input says."""
    match name:
        case "identity":
            yield {"OUT": inputs["IN"]}
        case "default":
            yield {"OUT": inputs.get("IN", -1)}
        case "add_sub":
            yield {"SUM": inputs["A"] + inputs["B"], "DIFF": inputs["A"] - inputs["B"]}
        case "square":
            for number in range(abs(inputs["IN"]) % 4):
                yield {"OUT": inputs["IN"] + number}
        case "repeat":
            for _ in range(inputs["IN"]):
                yield {"OUT": inputs["IN"]}
        case "few":
            for _ in range(inputs["IN"] % 3):
                yield {"OUT": inputs["IN"]}
        case "nested":
            for outputs in by_hand(NESTED, {"x": inputs["IN"]}):
                yield {"OUT": outputs["y"]}
        case "fails":
            raise InvalidArgument("it fails")


@dataclass
class Handle:
    """The `ModelHandle` of a fake. `delays`: turns of the event loop before each response, in order, then none.
    `running`: how many streams are open; `most`: how many were at once. `parameters`: those of each response.
    `omitted`: outputs that it does not send. `inline`: it computes in the event loop, where it answers once. `final`:
    it marks the last of its responses, which a stream's may lack."""

    name: str
    delays: list[int] = field(default_factory=list)
    omitted: frozenset[str] = frozenset()
    running: int = 0
    most: int = 0
    made: int = 0
    requests: list[InferRequest] = field(default_factory=list)
    parameters: list[dict[str, Any]] = field(default_factory=list)
    inline: bool = False
    final: bool = False

    @property
    def config(self) -> ModelConfig:
        return MODELS[self.name]

    def for_request(self, context: RequestContext) -> "Handle":
        return self

    def answer_now(self, request: InferRequest) -> tuple[InferResponse, ExecutionTimes] | None:
        if not self.inline or self.name not in ("identity", "default", "add_sub"):
            return None
        self.requests.append(request)
        [outputs] = compute(self.name, {name: int(tensor.data[0]) for name, tensor in request.inputs.items()})
        made = tuple(tensor(name, value) for name, value in outputs.items())
        return InferResponse(made, final=True), ExecutionTimes(0, 0, (0, 0, 0))

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            inputs = {name: int(tensor.data[0]) for name, tensor in request.inputs.items()}
            responses = list(compute(self.name, inputs))
            for number, outputs in enumerate(responses, 1):
                for _ in range(self.delays.pop(0) if self.delays else 0):
                    await asyncio.sleep(0)
                self.made += 1
                parameters = self.parameters.pop(0) if self.parameters else {}
                made = tuple(tensor(name, value) for name, value in outputs.items() if name not in self.omitted)
                yield InferResponse(made, parameters, self.final and number == len(responses))
        finally:
            self.running -= 1


class Nested(Handle):
    """The handle of an ensemble, `NESTED`."""

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        built = plan(NESTED)
        used = {step.number: Handle(step.model, self.delays) for step in built.steps}
        self.running += 1
        try:
            async with aclosing(make_run(built, used, x=int(request.inputs["IN"].data[0])).stream()) as responses:
                async for response in responses:
                    yield InferResponse((tensor("OUT", values(response)["y"]),))
        finally:
            self.running -= 1


def tensor(name: str, value: int) -> Tensor:
    return Tensor(name, "INT32", (1,), np.array([value], np.int32))


def request(**inputs: int) -> InferRequest:
    return InferRequest("id", {name: tensor(name, value) for name, value in inputs.items()}, None, {"priority": 3})


def handles(built: EnsemblePlan, delays: Sequence[int] = (), inline: bool = False) -> dict[int, Handle]:
    kinds = {step.number: Nested if step.model == "nested" else Handle for step in built.steps}
    return {step.number: kinds[step.number](step.model, list(delays), inline=inline) for step in built.steps}


def values(response: InferResponse) -> dict[str, int]:
    return {output.name: int(output.data[0]) for output in response.outputs}


def make_run(built: EnsemblePlan, used: Mapping[int, Any], **inputs: int) -> EnsembleRun:
    return EnsembleRun(built, request(**inputs), RequestContext("test"), used, RequestTimes())


async def run(config: ModelConfig, used: Mapping[int, Any] | None = None, **inputs: int) -> list[dict[str, int]]:
    """The responses of an ensemble, as numbers."""
    built = plan(config)
    runner = make_run(built, handles(built) if used is None else used, **inputs)
    if not built.decoupled:
        return [values(await runner.answer())]
    return [values(response) async for response in runner.stream()]


def by_hand(config: ModelConfig, inputs: Mapping[str, int]) -> list[dict[str, int]]:
    """The responses of an ensemble, computed step by step."""
    built = plan(config)

    def passes(number: int, known: dict[str, int]) -> Iterator[dict[str, int]]:
        for step in built.stages[number].steps:
            with suppress(KeyError):
                [outputs] = compute(step.model, {name: known[tensor] for name, tensor in step.inputs.items()})
                known |= {step.outputs[name]: value for name, value in outputs.items() if name in step.outputs}
        if number + 1 == len(built.stages):
            yield {name: known[name] for name in built.outputs if name in known}
            return
        source = built.stages[number + 1].source
        assert source is not None
        for outputs in compute(source.model, {name: known[tensor] for name, tensor in source.inputs.items()}):
            made = {source.outputs[name]: value for name, value in outputs.items() if name in source.outputs}
            yield from passes(number + 1, {**known, **made})

    return list(passes(0, dict(inputs)))
