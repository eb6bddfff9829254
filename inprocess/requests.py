"""Requests of a program to its server's models, and their responses as iterators, in the shape of Triton's in-process
API."""

import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, Self, TypeAlias

import msgspec

from ..core.errors import CharoniaError
from ..core.model import ModelConfig
from ..core.request import InferRequest, InferResponse, ParameterValue
from ..repository.gateway import InProcessGateway
from .loop_thread import BridgedStream, LoopThread
from .tensor import Tensor, named_tensor

ENDPOINT = "in-process"
"""What requests of programs are counted as."""

SEQUENCE_START = 1
SEQUENCE_END = 2


class NamedModel(Protocol):
    """`server.Model`, as far as requests know it."""

    name: str
    version: str


class InferenceRequest(msgspec.Struct, eq=False, weakref=True):
    """What a model is asked. It may be asked again, and by several at once."""

    model: NamedModel
    inputs: Mapping[str, Any] = {}
    """By name: arrays of numpy, torch or another library, lists, or a `Tensor`; none is copied, nor to be written to
    before the answer is there."""
    parameters: Mapping[str, ParameterValue] = {}
    request_id: str = ""
    outputs: Sequence[str] | None = None
    """The wanted outputs; None is all."""
    correlation_id: int | str = 0
    """The sequence that it belongs to, of a stateful model."""
    flags: int = 0
    """SEQUENCE_START and SEQUENCE_END, added."""
    priority: int = 0
    timeout: int = 0
    """Microseconds; 0 is the model's."""
    _running: Any = None
    """The streams that `cancel` ends, a `weakref.WeakSet`; None before there are any."""

    def cancel(self) -> None:
        """Cancel all that was asked with it and is not answered: their iterators raise `Cancelled`."""
        for stream in list(self._running or ()):
            stream.interrupt()

    def follow(self, stream: BridgedStream[InferResponse]) -> None:
        """Have `cancel` end the stream."""
        if self._running is None:
            self._running = weakref.WeakSet()
        self._running.add(stream)

    def to_request(self, config: ModelConfig) -> InferRequest:
        """As the model of that config takes it. Raises `InvalidArgument` for inputs that are no tensors."""
        inputs = {}
        for name, value in self.inputs.items():
            inputs[name] = named_tensor(name, value, config)
        outputs = None if self.outputs is None else tuple(self.outputs)
        is_plain = not (self.correlation_id or self.priority or self.timeout)
        return InferRequest(self.request_id, inputs, outputs, self.parameters if is_plain else self._all_parameters())

    def _all_parameters(self) -> Mapping[str, ParameterValue]:
        own: dict[str, ParameterValue] = {"priority": self.priority, "timeout": self.timeout}
        if self.correlation_id:
            own["sequence_id"] = self.correlation_id
            own["sequence_start"] = bool(self.flags & SEQUENCE_START)
            own["sequence_end"] = bool(self.flags & SEQUENCE_END)
        return {**{name: value for name, value in own.items() if value != 0 or name in _FLAGS}, **self.parameters}


_FLAGS = ("sequence_start", "sequence_end")


class InferenceResponse(msgspec.Struct, eq=False):
    """One response of a model."""

    model: NamedModel
    request_id: str
    outputs: dict[str, Tensor]
    parameters: Mapping[str, ParameterValue]
    error: CharoniaError | None = None
    """Why there is none, where the request does not raise."""
    final: bool = False
    """Whether it is known to be the last."""


Answer: TypeAlias = tuple[BridgedStream[InferResponse] | None, InferResponse | None]
"""What a model gives: a stream, or the one response that there is already."""


class _Responses:
    """The responses to one request: those of `stream`, or the one that there is already."""

    def __init__(
        self,
        request: InferenceRequest,
        raises: bool,
        stream: BridgedStream[InferResponse] | None,
        ready: InferResponse | None,
    ) -> None:
        self._request, self._raises = request, raises
        self._stream, self._ready = stream, ready
        if stream is not None:
            request.follow(stream)

    def close(self) -> None:
        """Take no more responses; what the model does for them is cancelled."""
        self._ready = None
        if self._stream is not None:
            self._stream.close()

    def cancel(self) -> None:
        """Cancel the request: the next response is the error `Cancelled`."""
        if self._stream is not None:
            self._stream.interrupt()

    def _response(self, response: InferResponse) -> InferenceResponse:
        request = self._request
        outputs = {}
        for tensor in response.outputs:
            outputs[tensor.name] = Tensor(tensor.datatype, tensor.shape, tensor.data)
        return InferenceResponse(request.model, request.request_id, outputs, response.parameters, None, response.final)

    def _failure(self, error: CharoniaError) -> InferenceResponse:
        if self._raises:
            raise error
        return InferenceResponse(self._request.model, self._request.request_id, {}, {}, error, True)


class ResponseIterator(_Responses):
    """The responses, as a thread reads them: each is made when it is asked for. A block closes it."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> InferenceResponse:
        ready = self._ready
        if ready is not None:
            self._ready = None
            return self._response(ready)
        if self._stream is None:
            raise StopIteration
        try:
            return self._response(self._stream.next_item())
        except CharoniaError as error:
            return self._failure(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncResponseIterator(_Responses):
    """The responses, as a task of any event loop reads them; the task's cancellation closes it, and so does a block."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InferenceResponse:
        ready = self._ready
        if ready is not None:
            self._ready = None
            return self._response(ready)
        if self._stream is None:
            raise StopAsyncIteration
        try:
            return self._response(await self._stream.next_awaited())
        except CharoniaError as error:
            return self._failure(error)

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class RequestDoor:
    """Brings requests to the gateway: at once where the model computes without waiting, else by a stream."""

    def __init__(self, thread: LoopThread, gateway: InProcessGateway) -> None:
        self._thread, self._gateway = thread, gateway

    def ask(
        self, request: InferenceRequest, wait: bool
    ) -> tuple[BridgedStream[InferResponse] | None, InferResponse | None]:
        """The stream of responses, or the response that there is already. Without `wait` the calling thread is not kept
        by what the server computes. Raises `CharoniaError` as the model does."""
        model = request.model
        ready = self._thread.call_between_turns(
            wait, self._gateway.answer_now, model.name, model.version, request.to_request
        )
        return (
            (BridgedStream(self._thread, partial(self._responses, request)), None) if ready is None else (None, ready)
        )

    async def _responses(self, request: InferenceRequest) -> AsyncGenerator[InferResponse, None]:
        """Closed before the last response goes out, of a request whose last one is known."""
        last = None
        with self._gateway.open_request(ENDPOINT) as context:
            handle = await self._gateway.acquire(context, request.model.name, request.model.version)
            single = not handle.config.decoupled
            async with aclosing(handle.infer(request.to_request(handle.config))) as responses:
                async for response in responses:
                    if single or response.final:
                        last = response
                    else:
                        yield response
        if last is not None and (single or last.outputs or last.parameters):
            yield InferResponse(last.outputs, last.parameters, True)
