"""An ensemble: finds the models of its steps for each request, and runs a step as soon as it has its inputs.

Passes of a stream overlap; their responses leave in the order in which they began. A client that does not read holds up
its own. A failed step, or a client that leaves, cancels everything of the request.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from ..core.backends import AskedVersion, CompositionBackend, RequestTimes
from ..core.errors import CharoniaError, Internal, InvalidArgument
from ..core.gateway import ModelHandle, ModelLookup
from ..core.model import ModelConfig
from ..core.request import InferRequest, InferResponse, ParameterValue
from ..core.request_context import ENSEMBLE_ENDPOINT as ENDPOINT
from ..core.request_context import RequestContext
from ..core.tasks import RequestTaskGroup
from ..core.tensor import Tensor
from .composite_model import ResponseBuffer, first_error, with_model_name
from .ensemble_plan import ENSEMBLE, EnsemblePlan, EnsembleStep, Stage, plan_ensemble, read_steps
from .step_sequences import SequenceParameters, read_sequence, with_sequence

"""The endpoint that requests of ensembles come from, in metrics and traces."""

_DEADLOCK = "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"

_KEPT_PLANS = 64
"""Plans that an ensemble keeps for requests that name some of its outputs."""

StepOutputs: TypeAlias = Mapping[str, Tensor]


class Pass(NamedTuple):
    """One pass of an ensemble."""

    tensors: dict[str, "Tensor | asyncio.Task[StepOutputs]"]
    """By the ensemble's names; those of a step that still runs are in its task."""
    parameters: dict[str, ParameterValue]
    """Those of the responses that the tensors came with."""
    sequences: dict[str, SequenceParameters]
    """The sequences that tensors are of, where a response has said another than the client's."""
    final: bool = True
    """It is known to be the last."""


Place: TypeAlias = "list[InferResponse | None]"
"""The place of a pass in the order of responses: empty until the pass is done, then with its response or None."""


class EnsembleRun:
    """One request. `handles`: of the steps' models, by the steps' numbers. `times`: those of the steps are added
    there."""

    def __init__(
        self,
        plan: EnsemblePlan,
        request: InferRequest,
        context: RequestContext,
        handles: Mapping[int, ModelHandle],
        times: RequestTimes,
    ) -> None:
        self._plan = plan
        self._request = request
        self._context = context
        self._handles = handles
        self._times = times
        self._outputs = plan.outputs if request.outputs is None else request.outputs
        self._tasks: asyncio.TaskGroup
        self._buffer = ResponseBuffer()
        self._order: deque[Place] = deque()
        self._place_freed = asyncio.Event()
        self._waits_for_steps = self._lacks_inputs = False
        self._final: InferResponse | None = None

    def _first_pass(self) -> Pass:
        """The pass that the request itself begins. As Triton's, responses say of which sequence they are."""
        parameters = self._request.parameters
        flags = {name: bool(parameters.get(name, False)) for name in ("sequence_start", "sequence_end")}
        return Pass(dict(self._request.inputs), {"sequence_id": parameters.get("sequence_id", 0), **flags}, {})

    async def answer(self) -> InferResponse:
        """The response of an ensemble without decoupled steps, without the outputs that no step has sent.

        Raises:
            CharoniaError: a step failed, or there is no output as one lacked an input.
        """
        state = self._first_pass()
        stage = self._plan.stages[0]
        try:
            if stage.chained:
                response = await self._run_pass(stage, state)
            else:
                async with RequestTaskGroup() as self._tasks:
                    response = await self._run_pass(stage, state)
        except (CharoniaError, BaseExceptionGroup) as error:
            raise self._failure(error) from None
        if response is None and self._lacks_inputs:
            raise Internal(f"in ensemble '{self._plan.name}', {_DEADLOCK}")
        return response or InferResponse((), state.parameters, final=True)

    def stream(self) -> AsyncGenerator[InferResponse, None]:
        """The responses of an ensemble with decoupled steps. Raises as `answer` does."""
        return self._buffer.read(self._drive(), f"ensemble {self._plan.name}")

    async def _drive(self) -> None:
        state = self._first_pass()
        try:
            async with RequestTaskGroup() as self._tasks:
                await self._run_outer_pass(0, state, None)
        except BaseExceptionGroup as group:
            raise self._failure(group) from None
        if self._final is not None:
            self._buffer.append(self._final)

    def _send(self, response: InferResponse | None) -> None:
        """Let it be read. The final one waits for the end of the steps: whoever has it reads no further, and what still
        runs would be cancelled."""
        if response is not None and response.final:
            self._final = response
        elif response is not None:
            self._buffer.append(response)

    async def _run_outer_pass(self, number: int, state: Pass, previous: asyncio.Task[None] | None) -> None:
        """Run a pass of a stage that another one lies within. `previous`: the pass that answers before it."""
        await self._run_steps(self._plan.stages[number], state)
        if previous is not None:
            await previous
        number += 1
        source = self._plan.stages[number].source
        assert source is not None
        inputs = await self._inputs(source, state)
        if inputs is None:
            return
        outer = asyncio.Semaphore(self._plan.max_passes)
        previous = None
        sequence = _sequence_of(source, state)
        async with aclosing(self._ask_for_stream(source, self._request_of(source, inputs, sequence))) as responses:
            async for response in responses:
                if not response.outputs:
                    continue
                tensors = {**state.tensors, **_renamed(source, response)}
                made = Pass(tensors, {**state.parameters}, {**state.sequences}, state.final and response.final)
                self._note_parameters(source, response, sequence, made)
                if number + 1 == len(self._plan.stages):
                    await self._begin_pass(made)
                else:
                    await outer.acquire()
                    previous = self._tasks.create_task(self._run_outer_pass(number, made, previous))
                    previous.add_done_callback(lambda _: outer.release())
        if previous is not None:
            await previous

    async def _begin_pass(self, state: Pass) -> None:
        """Run a pass of the last stage; only begin it, where steps take their time."""
        # Without waiting nothing can overlap, and a task for each pass would cost as much again.
        if not self._waits_for_steps:
            self._send(await self._run_pass(self._plan.stages[-1], state))
        else:
            while len(self._order) >= self._plan.max_passes:
                self._place_freed.clear()
                await self._place_freed.wait()
            place: Place = []
            self._order.append(place)
            self._tasks.create_task(self._run_beside(state, place))
        await self._buffer.wait_for_room()

    async def _run_beside(self, state: Pass, place: Place) -> None:
        """Run a pass beside others, and tell what is answered by now."""
        place.append(await self._run_pass(self._plan.stages[-1], state))
        while self._order and self._order[0]:
            [response] = self._order.popleft()
            self._send(response)
        self._place_freed.set()

    async def _run_pass(self, stage: Stage, state: Pass) -> InferResponse | None:
        """The outputs that there are after a pass; None without any."""
        await self._run_steps(stage, state)
        outputs = []
        changes = self._plan.batch_changes[ENSEMBLE]
        for name in self._outputs:
            tensor = state.tensors.get(name)
            if isinstance(tensor, asyncio.Task):
                tensor = (await tensor).get(name)
            if tensor is not None:
                outputs.append(_as_taken(tensor, name, changes[name]))
        return InferResponse(tuple(outputs), state.parameters, state.final) if outputs else None

    async def _run_steps(self, stage: Stage, state: Pass) -> None:
        if stage.chained:
            for step in stage.steps:
                state.tensors.update(await self._run_step(step, state))
            return
        for step in stage.steps:
            task = self._tasks.create_task(self._run_step(step, state))
            state.tensors.update(dict.fromkeys(step.outputs.values(), task))

    async def _run_step(self, step: EnsembleStep, state: Pass) -> StepOutputs:
        """The outputs of a step; none if it lacks an input."""
        inputs = await self._inputs(step, state)
        if inputs is None:
            return {}
        sequence = _sequence_of(step, state)
        request = self._request_of(step, inputs, sequence)
        handle = self._handles[step.number]
        # A trace has a span for each request: then each needs a context.
        answer = handle.answer_now(request) if self._context.children is None else None
        if answer is None:
            response = await self._ask(step, handle, request)
        else:
            response, times = answer
            self._times.add_execution(times)
        self._note_parameters(step, response, sequence, state)
        return _renamed(step, response)

    def _note_parameters(
        self, step: EnsembleStep, response: InferResponse, sequence: SequenceParameters | None, state: Pass
    ) -> None:
        """Keep what a response says beside its tensors: its parameters, and the sequence that those are of."""
        told = response.parameters
        if told:
            state.parameters.update(told)
            other = read_sequence(step.model, told, self._request.parameters if sequence is None else sequence)
            if other is not None:
                sequence = other
                state.parameters.update(other)
        if sequence is not None:
            state.sequences.update(dict.fromkeys(step.outputs.values(), sequence))

    async def _ask(self, step: EnsembleStep, handle: ModelHandle, request: InferRequest) -> InferResponse:
        self._waits_for_steps = True
        child = self._context.child(ENDPOINT)
        try:
            with child:
                async with aclosing(handle.for_request(child).infer(request)) as responses:
                    response = await anext(responses, None)
                    if response is None:
                        raise Internal(f"model '{step.model}' has not answered")
                    # Only models that ask others can answer once more without being decoupled, and models that have
                    # become decoupled since the ensemble was loaded.
                    if not response.final and (step.number in self._plan.asking or handle.config.decoupled):
                        async for _ in responses:
                            raise Internal(f"model '{step.model}' has answered more than once, and is not decoupled")
                child.finish()
        finally:
            self._times.add(child)
        return response

    async def _inputs(self, step: EnsembleStep, state: Pass) -> dict[str, Tensor] | None:
        """The inputs of a step under its model's names, as soon as all are there; None if one is missing."""
        inputs = {}
        changes = self._plan.batch_changes[step.number]
        for name, taken in step.inputs.items():
            tensor = state.tensors.get(taken)
            if isinstance(tensor, asyncio.Task):
                tensor = (await tensor).get(taken)
            if tensor is not None:
                inputs[name] = _as_taken(tensor, name, changes[name])
            elif name not in self._plan.optional[step.number]:
                self._lacks_inputs = True
                return None
        return inputs

    def _request_of(
        self, step: EnsembleStep, inputs: dict[str, Tensor], sequence: SequenceParameters | None
    ) -> InferRequest:
        parameters = self._request.parameters
        if sequence is not None:
            parameters = with_sequence(parameters, sequence)
        return InferRequest(self._request.id, inputs, tuple(step.outputs), parameters)

    async def _ask_for_stream(self, step: EnsembleStep, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        child = self._context.child(ENDPOINT)
        try:
            with child:
                handle = self._handles[step.number].for_request(child)
                async with aclosing(handle.infer(request)) as responses:
                    async for response in responses:
                        yield response
        finally:
            self._times.add(child)

    def _failure(self, error: BaseException) -> BaseException:
        """The first error of the steps, with the ensemble's name before it."""
        error = first_error(error)
        if isinstance(error, CharoniaError):
            return with_model_name(f"ensemble '{self._plan.name}'", error)
        return error


def _sequence_of(step: EnsembleStep, state: Pass) -> SequenceParameters | None:
    """The sequence of the first input, whose tensors are there, that has another than the client's; else None."""
    known = state.sequences
    return next((known[taken] for taken in step.inputs.values() if taken in known), None) if known else None


def _renamed(step: EnsembleStep, response: InferResponse) -> StepOutputs:
    """The outputs of a step's model under the ensemble's names."""
    outputs = {}
    for tensor in response.outputs:
        name = step.outputs[tensor.name]
        outputs[name] = Tensor(name, tensor.datatype, tensor.shape, tensor.data)
    return outputs


def _as_taken(tensor: Tensor, name: str, batch_change: int) -> Tensor:
    """A tensor under the name that its receiver has for it. `batch_change`: of its shape, see `EnsemblePlan`."""
    shape = tensor.shape
    if batch_change == 1:
        shape = (1, *shape)
    elif batch_change == -1 and shape[:1] == (1,):
        shape = shape[1:]
    return Tensor(name, tensor.datatype, shape, tensor.data)


class Ensemble:
    """One version of an ensemble.

    Raises:
        InvalidArgument: the config's steps do not fit together.
    """

    def __init__(self, config: ModelConfig, gateway: ModelLookup) -> None:
        read_steps(config)
        self._config = config
        self._gateway = gateway
        self._plan: EnsemblePlan | None = None
        self._plan_for: Callable[[frozenset[str]], EnsemblePlan]

    async def load(self) -> ModelConfig:
        """Check the steps against their models, which are loaded. Whatever the config says, it is decoupled if one of
        them is.

        Raises:
            CharoniaError: a model is not loaded, or does not fit.
        """
        self._plan = plan_ensemble(self._config, self._loaded_config)
        self._plan_for = lru_cache(_KEPT_PLANS)(self._plan.for_outputs)
        if not self._plan.decoupled or self._config.decoupled:
            return self._config
        raw = {**self._config.raw, "model_transaction_policy": {"decoupled": True}}
        return replace(self._config, decoupled=True, raw=raw)

    def _loaded_config(self, model: str, version: str) -> ModelConfig:
        try:
            return self._gateway.model_config(model, version)
        except CharoniaError as error:
            version = f"whose required version {version} is not loaded" if version else "which has no loaded version"
            message = f"ensemble '{self._config.name}' depends on '{model}' {version}: {error.message}"
            raise InvalidArgument(message, field="ensemble_scheduling") from None

    async def unload(self) -> None:
        self._plan = None

    @property
    def asked(self) -> list[AskedVersion]:
        return [] if self._plan is None else [AskedVersion(step.model, step.version) for step in self._plan.steps]

    async def answer(
        self, request: InferRequest, context: RequestContext, times: RequestTimes
    ) -> AsyncGenerator[InferResponse, None]:
        """Raises the error of the step that fails, with the ensemble's name before its text."""
        plan = self._plan
        holder = RequestContext(ENDPOINT)
        assert plan is not None
        if request.outputs is not None and len(request.outputs) < len(plan.outputs):
            plan = self._plan_for(frozenset(request.outputs))
        holder.counted = True  # it asks nothing, but holds the models until the end
        with holder:
            handles = {step.number: await self._acquire(step, holder) for step in plan.steps}
            run = EnsembleRun(plan, request, context, handles, times)
            if plan.decoupled:
                async with aclosing(run.stream()) as responses:
                    async for response in responses:
                        yield response
            else:
                yield await run.answer()

    async def _acquire(self, step: EnsembleStep, holder: RequestContext) -> ModelHandle:
        try:
            return await self._gateway.acquire(holder, step.model, step.version)
        except CharoniaError as error:
            raise with_model_name(f"ensemble '{self._config.name}'", error) from None


COMPOSITION_BACKEND = CompositionBackend(lambda config, gateway, _: Ensemble(config, gateway))
