"""One request to a pipeline: runs its code, checks what it yields, and ends what it has begun.

The code runs in a task of its own. When the client leaves, that task is cancelled; code that goes on nevertheless is
left to itself after a while, and asks no models any more.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from ..core.errors import CharoniaError, Internal
from ..core.model import ModelConfig
from ..core.request import InferRequest, InferResponse, ParameterValue
from .lookup import ModelRequests
from .named_tensors import NamedTensors, to_tensor
from .pipeline_code import PipelineCode
from .response_buffer import ResponseBuffer
from .step_errors import first_error, with_model_name

log = logging.getLogger(__name__)

_PATIENCE = 5.0
"""Seconds that a pipeline's code may go on after its client has left."""


class PipelineRun:
    """One request. `requests`: those that it makes of other models."""

    def __init__(self, config: ModelConfig, code: PipelineCode, request: InferRequest, requests: ModelRequests) -> None:
        self._config, self._code, self._request, self._requests = config, code, request, requests
        self._name = f"pipeline '{config.name}'"
        self._buffer = ResponseBuffer(_PATIENCE)
        self._specs = {spec.name: spec for spec in config.outputs}
        self._wanted = [name for name in self._specs if request.outputs is None or name in request.outputs]

    async def stream(self) -> AsyncGenerator[InferResponse, None]:
        """The responses, as the code yields them; without `decoupled` the one, when the code has ended.

        Raises:
            CharoniaError: the code raised it, or failed.
        """
        try:
            async with aclosing(self._buffer.read(self._drive(), self._name)) as responses:
                async for response in responses:
                    yield response
        finally:
            await self._requests.close()

    async def _drive(self) -> None:
        tensors = NamedTensors(self._request.inputs.values(), self._request.parameters, self._request.id)
        try:
            answers = self._code.run(tensors, self._requests.lookup)
            async with aclosing(_await(answers) if inspect.isawaitable(answers) else answers) as values:
                await self._answer(values)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            raise self._failure(first_error(error)) from None
        finally:
            await self._requests.close()

    async def _answer(self, values: AsyncGenerator[Any, None]) -> None:
        answer: InferResponse | None = None
        async for value in values:
            if _is_cancelled():
                raise asyncio.CancelledError
            if answer is not None:
                raise Internal(f"{self._name} has yielded twice{self._at(values)}, and its config is not decoupled")
            response = self._make_response(value, values)
            if self._config.decoupled:
                if response.outputs:
                    await self._buffer.put(response)
            else:
                answer = msgspec.structs.replace(response, final=True)
        if answer is not None:
            await self._buffer.put(answer)
        elif not self._config.decoupled:
            raise Internal(f"{self._name} has not yielded an answer")

    def _make_response(self, value: Any, values: AsyncGenerator[Any, None]) -> InferResponse:
        parameters: Mapping[str, ParameterValue] = {}
        if isinstance(value, NamedTensors):  # a model's response passes as far as there are outputs for it
            parameters, value = value.parameters, {name: value[name] for name in self._specs if name in value}
        if not isinstance(value, Mapping) or not value:
            wrong = f"{type(value).__name__}, not its outputs by name" if not isinstance(value, Mapping) else "nothing"
            raise Internal(f"{self._name} has yielded {wrong}{self._at(values)}")
        for name in value:
            if name not in self._specs:
                known = ", ".join(f"'{each}'" for each in self._specs)
                raise Internal(f"{self._name} has yielded '{name}'{self._at(values)}; its outputs are {known}")
        tensors = []
        for name in self._wanted:
            try:
                if name in value:
                    tensors.append(to_tensor(self._specs[name], value[name], self._config.max_batch_size > 0))
                elif not self._config.decoupled:
                    raise ValueError("is missing")
            except ValueError as error:
                raise Internal(f"{self._name}: output '{name}' {error}{self._at(values)}") from None
        return InferResponse(tuple(tensors), parameters)

    def _at(self, values: AsyncGenerator[Any, None]) -> str:
        """The place of the `yield` that the code stands at."""
        frame = getattr(values, "ag_frame", None)
        place = None if frame is None else self._code.place(frame.f_code.co_filename, frame.f_lineno)
        return f" ({place})" if place else ""

    def _failure(self, error: BaseException) -> CharoniaError:
        if isinstance(error, CharoniaError):
            return with_model_name(self._name, error) if error is self._requests.last_error else error
        log.error("%s has failed", self._name, exc_info=error)
        return Internal(f"{self._name} has failed{self._code.where(error)}: {type(error).__name__}: {error}")


def _is_cancelled() -> bool:
    """Whether the client has left: also if the code has caught that, and goes on."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _await(answer: Awaitable[Any]) -> AsyncGenerator[Any, None]:
    yield await answer
