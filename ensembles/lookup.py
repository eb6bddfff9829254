"""What a pipeline asks other models with: `lookup(name)` is a model, which answers once or streams.

A request to a model is made for the client of the pipeline's: with its id, parameters, priority, place in a trace, and
what is left of its time. It ends with the pipeline's request at the latest, whatever the pipeline's code does.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Protocol, Self, TypeAlias

from ..core.backends import RequestTimes
from ..core.errors import CharoniaError, Internal, InvalidArgument, RequestTimeout
from ..core.gateway import ModelLookup
from ..core.model import DeclaredModels, ModelConfig
from ..core.request import InferRequest, ParameterValue
from ..core.request_context import RequestContext
from ..core.tensor import Tensor
from .named_tensors import NamedTensors, to_tensor

ENDPOINT = "pipeline"
"""The endpoint that requests of pipelines come from, in metrics and traces."""

MAX_DEPTH = 16
"""Requests that may be made for one another: models that ask each other in a circle would do so for ever."""

Inherited: TypeAlias = bool | Collection[str]

_ALWAYS_INHERITED = ("priority", "timeout")
_SAMPLING = "sampling_parameters"
_STREAM = "stream"


class Lookup(Protocol):
    """The second argument of a pipeline's `run`."""

    def __call__(self, model: str, version: str = "", *, inherit: Inherited = True) -> "AskedModel":
        """A model that the pipeline's config declares, by default its latest version. `inherit`: the parameters of the
        pipeline's request that its requests have too: all, none but priority and timeout, or those named.

        Raises:
            Internal: the config does not declare it.
        """


class ModelRequests:
    """The requests that a pipeline makes for one of its own. `times`: theirs are added there; `last_error`: that one of
    them raised; `opened`: those that have not ended; `ended`: there are to be no more."""

    def __init__(
        self,
        name: str,
        declared: DeclaredModels,
        gateway: ModelLookup,
        request: InferRequest,
        context: RequestContext,
        times: RequestTimes,
    ) -> None:
        self.last_error: CharoniaError | None = None
        self.ended = False
        self._name = name
        self._declared = declared
        self._gateway = gateway
        self._request = request
        self._context = context
        self._times = times
        self.opened: set[_OpenRequest] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def lookup(self, model: str, version: str = "", *, inherit: Inherited = True) -> "AskedModel":
        if not self._declared.allows(model):
            message = f"pipeline '{self._name}' asks model '{model}', which its parameter 'models' does not name"
            raise Internal(message, field="models")
        return AskedModel(self, self._gateway, model, version, inherit)

    def open(
        self, model: "AskedModel", inputs: Mapping[str, Any], outputs: Collection[str] | None, stream: bool
    ) -> "ModelStream":
        opened = _OpenRequest(self, self._responses(model, inputs, outputs, stream))
        self.opened.add(opened)
        return ModelStream(opened, partial(self._drop, opened))

    async def _responses(
        self, model: "AskedModel", inputs: Mapping[str, Any], outputs: Collection[str] | None, stream: bool
    ) -> AsyncGenerator[NamedTensors, None]:
        context = self._context.child(ENDPOINT)
        try:
            with context:
                if context.depth > MAX_DEPTH:
                    raise Internal(f"model '{model.name}' is asked at the end of {MAX_DEPTH} requests for one another")
                handle = await self._gateway.acquire(context, model.name, model.version)
                request = self._make_request(model, handle.config, inputs, outputs, stream)
                async with aclosing(handle.infer(request)) as responses:
                    async for response in responses:
                        if response.outputs or not handle.config.decoupled:
                            yield NamedTensors(response.outputs, response.parameters, request.id)
        except CharoniaError as error:
            self.last_error = error
            raise
        finally:
            self._times.add(context)

    def _make_request(
        self,
        model: "AskedModel",
        config: ModelConfig,
        inputs: Mapping[str, Any],
        outputs: Collection[str] | None,
        stream: bool,
    ) -> InferRequest:
        specs = {spec.name: spec for spec in config.inputs}
        batched = config.max_batch_size > 0
        tensors: dict[str, Tensor] = {}
        parameters: dict[str, ParameterValue] = {}
        lists: dict[str, Any] = {}
        if _STREAM in specs and specs[_STREAM].datatype == "BOOL":
            inputs = {_STREAM: stream, **inputs}
        for name, value in inputs.items():
            if name in specs and value is not None:
                try:
                    tensors[name] = to_tensor(specs[name], value, batched)
                except ValueError as error:
                    message = f"input '{name}' of model '{model.name}' {error}"
                    raise InvalidArgument(message, field=name) from None
            elif isinstance(value, str | int | float):
                parameters[name] = value
            elif isinstance(value, list | tuple) and _SAMPLING in specs and _SAMPLING not in inputs:
                lists[name] = value
            elif value is not None:
                message = f"model '{model.name}' has no input '{name}', only {sorted(specs)}"
                raise InvalidArgument(f"{message}, and a parameter is a plain value", field=name)
        parameters = self._inherited(model.inherit, parameters)
        if lists:
            tensors[_SAMPLING] = to_tensor(specs[_SAMPLING], json.dumps({**parameters, **lists}), batched)
        return InferRequest(self._request.id, tensors, None if outputs is None else tuple(outputs), parameters)

    def _inherited(self, inherit: Inherited, own: dict[str, ParameterValue]) -> dict[str, ParameterValue]:
        """The parameters of a request: those inherited, and its own, which win; the time that is left is the least."""
        wanted = () if isinstance(inherit, bool) else inherit
        parameters = {
            name: value
            for name, value in self._request.parameters.items()
            if inherit is True or name in wanted or name in _ALWAYS_INHERITED
        }
        timeout = parameters.get("timeout")
        parameters |= own
        if isinstance(timeout, int) and timeout > 0:
            left = timeout - int(1e6 * (time.monotonic() - self._context.arrived_at))
            if left <= 0:
                raise RequestTimeout
            shorter = own.get("timeout")
            parameters["timeout"] = min(left, shorter) if isinstance(shorter, int) and shorter > 0 else left
        return parameters

    def _drop(self, opened: "_OpenRequest") -> None:
        """Close a request whose stream nobody holds any more; called wherever objects are freed."""
        if opened in self.opened:
            with suppress(RuntimeError):  # the loop is gone
                self._loop.call_soon_threadsafe(self._close_dropped, opened)

    def _close_dropped(self, opened: "_OpenRequest") -> None:
        closing = self._loop.create_task(opened.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End all requests that are still open, and refuse further ones."""
        self.ended = True
        closing = (*self._closing, *(opened.close() for opened in tuple(self.opened)))
        await asyncio.gather(*closing, return_exceptions=True)


class AskedModel:
    """A model of the server, as a pipeline's code sees it.

    `inputs` are tensors by name: arrays, or plain values (str, bytes, numbers, bools, lists) whose missing dimensions
    are 1. A plain value by another name is a parameter of the request; None is nothing. `outputs` are those to ask for,
    if not all. Errors are those of clients: `charonia.core.errors`.
    """

    def __init__(
        self, requests: ModelRequests, gateway: ModelLookup, name: str, version: str = "", inherit: Inherited = True
    ) -> None:
        self.name = name
        self.version = version
        self.inherit = inherit
        self._requests = requests
        self._gateway = gateway

    @property
    def config(self) -> ModelConfig:
        """Raises `NotFound` or `Unavailable` where there is no such model."""
        return self._gateway.model_config(self.name, self.version)

    @property
    def ready(self) -> bool:
        """Whether it can be asked now."""
        return self._gateway.is_model_ready(self.name, self.version)

    async def infer(self, inputs: Mapping[str, Any], *, outputs: Collection[str] | None = None) -> NamedTensors:
        """Its one response; of a language model the whole text."""
        answer: NamedTensors | None = None
        async with self._requests.open(self, inputs, outputs, stream=False) as responses:
            async for response in responses:
                if answer is not None:
                    raise Internal(f"model '{self.name}' has answered more than once: ask it by 'stream'")
                answer = response
        if answer is None:
            raise Internal(f"model '{self.name}' has not answered")
        return answer

    def stream(self, inputs: Mapping[str, Any], *, outputs: Collection[str] | None = None) -> "ModelStream":
        """Its responses, as they come; of a language model the text piece by piece."""
        return self._requests.open(self, inputs, outputs, stream=True)


class ModelStream:
    """The responses of a model: an async iterator, and an async context manager that closes it. One that a loop has
    left is closed too, at once if nothing else holds it, and else with the pipeline's request."""

    __slots__ = ("_drop", "_opened")

    def __init__(self, opened: "_OpenRequest", drop: Callable[[], None]) -> None:
        self._opened = opened
        self._drop = drop

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> NamedTensors:
        return await self._opened.next()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._opened.close()

    def __del__(self) -> None:
        self._drop()


class _OpenRequest:
    """A request that has not ended. `_reader`: the task that waits for its next response, `_idle`: set while none."""

    def __init__(self, requests: ModelRequests, responses: AsyncGenerator[NamedTensors, None]) -> None:
        self._requests = requests
        self._responses = responses
        self._reader: asyncio.Task[Any] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def next(self) -> NamedTensors:
        if self._requests.ended:
            await asyncio.sleep(_PAUSE)
            raise asyncio.CancelledError(_ENDED)
        if self._reader is not None:
            raise RuntimeError("two tasks read one stream of responses")
        self._reader = asyncio.current_task()
        self._idle.clear()
        try:
            return await anext(self._responses)
        except BaseException:
            self._requests.opened.discard(self)
            raise
        finally:
            self._reader = None
            self._idle.set()

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await self._idle.wait()
        self._requests.opened.discard(self)
        await self._responses.aclose()


_ENDED = "the pipeline's request has ended"
_PAUSE = 0.1
"""Seconds that a request waits before it fails because the pipeline's has ended: code that tries again and again, and
does not let itself be cancelled, must not hold the event loop."""
