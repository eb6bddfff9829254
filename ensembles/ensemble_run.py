"""One request to an ensemble: runs the steps of its plan, each as soon as it has its inputs.

Steps of one pass run in parallel where they can; passes of a stream overlap, and their responses leave in the order in
which the stream began them. What a client does not read holds up its own passes, and so the stream. When a step fails
or the client leaves, everything else of the request is cancelled.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TypeAlias

import msgspec

from ..core.errors import CharoniaError, Internal
from ..core.gateway import ModelHandle
from ..core.request import InferRequest, InferResponse, ParameterValue
from ..core.tensor import Tensor
from .ensemble_plan import EnsemblePlan, EnsembleStep, Stage
from .response_buffer import ResponseBuffer
from .step_errors import first_error, with_model_name

_DEADLOCK = "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"

StepOutputs: TypeAlias = Mapping[str, Tensor]
Values: TypeAlias = dict[str, "Tensor | asyncio.Task[StepOutputs]"]
"""The tensors of a pass by the ensemble's names; those of a step that still runs are in its task."""


class EnsembleRun:
    """One request. `handles`: of the steps' models, by the steps' numbers. `asked`: the steps that were run; `failed`:
    the errors of those that failed."""

    def __init__(self, plan: EnsemblePlan, request: InferRequest, handles: Mapping[int, ModelHandle]) -> None:
        self._plan, self._request, self._handles = plan, request, handles
        self.asked: set[int] = set()
        self.failed: dict[int, Exception] = {}
        self._outputs = plan.outputs if request.outputs is None else request.outputs
        self._parameters: dict[str, ParameterValue] = {}
        self._tasks: asyncio.TaskGroup
        self._buffer = ResponseBuffer()

    async def answer(self) -> InferResponse:
        """The response of an ensemble without decoupled steps.

        Raises:
            CharoniaError: a step failed.
        """
        values: Values = dict(self._request.inputs)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self._run_steps(self._plan.stages[0], values)
                response = await self._make_response(values)
        except BaseExceptionGroup as group:
            raise self._failure(group) from None
        if response is None or len(response.outputs) < len(self._outputs):
            raise Internal(f"in ensemble '{self._plan.name}', {_DEADLOCK}")
        return msgspec.structs.replace(response, final=True)

    def stream(self) -> AsyncGenerator[InferResponse, None]:
        """The responses of an ensemble with decoupled steps. Raises as `answer` does."""
        return self._buffer.read(self._drive(), f"ensemble {self._plan.name}")

    async def _drive(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self._run_stage(0, dict(self._request.inputs), None)
        except BaseExceptionGroup as group:
            raise self._failure(group) from None

    async def _run_stage(self, number: int, values: Values, previous: asyncio.Task[None] | None) -> None:
        """Run one pass of a stage; `previous`: the pass that answers before it."""
        await self._run_steps(self._plan.stages[number], values)
        if number + 1 < len(self._plan.stages):
            if previous is not None:
                await previous
            await self._run_source(number + 1, values)
            return
        response = await self._make_response(values)
        if previous is not None:
            await previous
        if response is not None:
            await self._buffer.put(response)

    async def _run_source(self, number: int, values: Values) -> None:
        """Run the passes of a stage, one for each response of its source."""
        stage = self._plan.stages[number]
        assert stage.source is not None
        inputs = await self._inputs(stage.source, values)
        if inputs is None:
            return
        slots = asyncio.Semaphore(self._plan.max_passes)
        previous: asyncio.Task[None] | None = None
        async with aclosing(self._ask(stage.source, inputs)) as responses:
            async for outputs in responses:
                if outputs:
                    await slots.acquire()
                    previous = self._tasks.create_task(self._run_stage(number, {**values, **outputs}, previous))
                    previous.add_done_callback(lambda _: slots.release())
        if previous is not None:
            await previous

    async def _run_steps(self, stage: Stage, values: Values) -> None:
        """Run, or start, the steps of a pass."""
        if stage.chained:
            for step in stage.steps:
                values.update(await self._run_step(step, values))
            return
        for step in stage.steps:
            task = self._tasks.create_task(self._run_step(step, values))
            values.update(dict.fromkeys(step.outputs.values(), task))

    async def _run_step(self, step: EnsembleStep, values: Values) -> StepOutputs:
        """The outputs of a step; none if it lacks an input."""
        inputs = await self._inputs(step, values)
        if inputs is None:
            return {}
        async with aclosing(self._ask(step, inputs)) as responses:
            async for outputs in responses:
                return outputs
        raise Internal(f"model '{step.model}' has not answered")

    async def _inputs(self, step: EnsembleStep, values: Values) -> dict[str, Tensor] | None:
        """The inputs of a step under its model's names, as soon as all are there; None if one is missing."""
        inputs = {}
        for name, tensor in step.inputs.items():
            value = await _value(values, tensor)
            if value is not None:
                inputs[name] = Tensor(name, value.datatype, value.shape, value.data)
            elif name not in self._plan.optional[step.number]:
                return None
        return inputs

    async def _ask(self, step: EnsembleStep, inputs: dict[str, Tensor]) -> AsyncGenerator[StepOutputs, None]:
        """The outputs of each response of a step's model, under the ensemble's names."""
        self.asked.add(step.number)
        request = InferRequest(self._request.id, inputs, tuple(step.outputs), self._request.parameters)
        try:
            async with aclosing(self._handles[step.number].infer(request)) as responses:
                async for response in responses:
                    self._parameters.update(response.parameters)
                    outputs = {}
                    for tensor in response.outputs:
                        name = step.outputs[tensor.name]
                        outputs[name] = Tensor(name, tensor.datatype, tensor.shape, tensor.data)
                    yield outputs
        except Exception as error:
            self.failed[step.number] = error
            raise

    async def _make_response(self, values: Values) -> InferResponse | None:
        """The outputs that there are; None without any."""
        outputs = [await _value(values, name) for name in self._outputs]
        there = tuple(tensor for tensor in outputs if tensor is not None)
        return InferResponse(there, dict(self._parameters)) if there else None

    def _failure(self, group: BaseExceptionGroup[BaseException]) -> BaseException:
        """The first error of the steps, with the ensemble's name before it."""
        error = first_error(group)
        if isinstance(error, CharoniaError):
            return with_model_name(f"ensemble '{self._plan.name}'", error)
        return error


async def _value(values: Values, name: str) -> Tensor | None:
    value = values.get(name)
    return (await value).get(name) if isinstance(value, asyncio.Task) else value
