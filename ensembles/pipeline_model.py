"""A pipeline: `pipeline.py` of its version's directory, run in the server's own event loop.

Its code is trusted as the server's own is. It runs in a task for each request, which is cancelled when the client
leaves; code that goes on nevertheless is left to itself after a while, and asks no models any more.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from ..core.backends import AskedVersion, CompositionBackend, RequestTimes
from ..core.errors import CharoniaError, Internal, InvalidArgument
from ..core.gateway import ModelLookup
from ..core.model import MODELS_PARAMETER, DeclaredModels, ModelConfig
from ..core.request import InferRequest, InferResponse, ParameterValue
from ..core.request_context import RequestContext
from .composite_model import ResponseBuffer, first_error, with_model_name
from .lookup import ModelRequests
from .named_tensors import NamedTensors, to_tensor
from .pipeline_code import PipelineCode

log = logging.getLogger(__name__)

_PATIENCE = 5.0
"""Seconds that a pipeline's code may go on after its client has left."""


class PipelineRun:
    """One request. `requests`: those that it makes of other models."""

    def __init__(self, config: ModelConfig, code: PipelineCode, request: InferRequest, requests: ModelRequests) -> None:
        self._config = config
        self._code = code
        self._request = request
        self._requests = requests
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
                    await self._buffer.wait_for_room()
                    self._buffer.append(response)
            else:
                answer = msgspec.structs.replace(response, final=True)
        if answer is not None:
            self._buffer.append(answer)
        elif not self._config.decoupled:
            raise Internal(f"{self._name} has not yielded an answer")

    def _make_response(self, value: Any, values: AsyncGenerator[Any, None]) -> InferResponse:
        parameters: Mapping[str, ParameterValue] = {}
        if isinstance(value, NamedTensors):  # a model's response passes as far as there are outputs for it
            parameters = value.parameters
            value = {name: value[name] for name in self._specs if name in value}
        if not isinstance(value, Mapping) or not value:
            wrong = f"{type(value).__name__}, not its outputs by name" if not isinstance(value, Mapping) else "nothing"
            raise Internal(f"{self._name} has yielded {wrong}{self._at(values)}")
        for name in value:
            if name not in self._specs:
                known = ", ".join(f"'{spec}'" for spec in self._specs)
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


class Pipeline:
    """One version of a pipeline.

    Raises:
        InvalidArgument: its config or its file is no pipeline's; the message says where.
    """

    def __init__(self, config: ModelConfig, gateway: ModelLookup, directory: Path) -> None:
        if not config.inputs or not config.outputs:
            side = "input" if not config.inputs else "output"
            raise InvalidArgument(f"pipeline '{config.name}' must declare at least one {side}", field=side)
        self._config = config
        self._declared = DeclaredModels.of(config.parameters)
        if config.name in self._declared.names:
            raise InvalidArgument(f"pipeline '{config.name}' asks itself", field=MODELS_PARAMETER)
        self._gateway = gateway
        self._code = PipelineCode(directory, config)

    async def load(self) -> ModelConfig:
        """Import the code, and call its `load`.

        Raises:
            InvalidArgument: a model that it needs is not loaded, or the code failed; the message names file and line.
        """
        for model in sorted(self._declared.required):
            try:
                self._gateway.model_config(model)
            except CharoniaError as error:
                message = f"pipeline '{self._config.name}' depends on '{model}' which has no loaded version"
                raise InvalidArgument(f"{message}: {error.message}", field=MODELS_PARAMETER) from None
        await asyncio.to_thread(self._code.load)
        try:
            await self._call("load", self._config)
        except BaseException:
            self._code.unload()
            raise
        return self._config

    async def unload(self) -> None:
        """Call the code's `unload`, and forget the code."""
        try:
            await self._call("unload")
        except InvalidArgument as error:
            log.error("%s", error.message)
        finally:
            self._code.unload()

    async def _call(self, name: str, *arguments: object) -> None:
        """Call a function of the code if there is one: a plain one in a thread, for that may take its time."""
        function = self._code.function(name)
        if function is None:
            return
        try:
            if inspect.iscoroutinefunction(function):
                await function(*arguments)
            else:
                await asyncio.to_thread(function, *arguments)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            log.error("'%s' of pipeline '%s' has failed", name, self._config.name, exc_info=error)
            message = f"'{name}' of pipeline '{self._config.name}' has failed{self._code.where(error)}"
            raise InvalidArgument(f"{message}: {type(error).__name__}: {error}") from None

    @property
    def asked(self) -> list[AskedVersion]:
        return [AskedVersion(model) for model in self._declared.required]

    def answer(
        self, request: InferRequest, context: RequestContext, times: RequestTimes
    ) -> AsyncGenerator[InferResponse, None]:
        """Raises what the code raises."""
        requests = ModelRequests(self._config.name, self._declared, self._gateway, request, context, times)
        return PipelineRun(self._config, self._code, request, requests).stream()


COMPOSITION_BACKEND = CompositionBackend(Pipeline)
