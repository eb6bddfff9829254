"""The handle that a request has of the model it is for: `core.gateway.ModelHandle` in process."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import cast

from ..core.errors import InvalidArgument, ServerExiting
from ..core.gateway import ResponseStream
from ..core.model import ModelConfig, ModelStats, TextModel
from ..core.request import GenerateChunk, GenerateRequest, InferRequest, InferResponse, TokenizeRequest
from ..core.request_context import RequestContext
from ..telemetry.request_trace import request_trace, trace_tensors
from ..telemetry.trace_settings import TraceControl
from .model_entry import InFlightCounter, LoadedModel
from .request_validation import validate_request


class LoadedModelHandle:
    """A loaded model in use by the request of `context`, at whose end it is released.

    The model's counter has the request from the beginning, so that the model outlives it; the `server`'s from the first
    time that the model is asked something. `exiting`: the server takes no more requests.
    """

    __slots__ = ("_context", "_exiting", "_loaded", "_server", "_started", "_traces")

    def __init__(
        self,
        loaded: LoadedModel,
        context: RequestContext,
        server: InFlightCounter,
        exiting: Callable[[], bool],
        traces: TraceControl,
    ) -> None:
        self._loaded = loaded
        self._context = context
        self._server = server
        self._exiting = exiting
        self._traces = traces
        self._started = False
        loaded.in_flight.increment()
        context.on_end(self._release)

    @property
    def config(self) -> ModelConfig:
        return self._loaded.config

    def stats(self) -> ModelStats:
        return self._loaded.model.stats()

    def validate(self, request: InferRequest) -> None:
        validate_request(self._loaded.config, request)

    def infer(self, request: InferRequest) -> ResponseStream[InferResponse]:
        loaded, context = self._loaded, self._context
        if request.id:
            context.id = request.id
        self._start()
        validate_request(loaded.config, request)
        responses = loaded.model.infer(request, context)
        responses = trace_tensors(request_trace(context, self._traces), request.inputs.values(), responses)
        if loaded.text is not None:  # its sequences record how the request ended
            return cast("ResponseStream[InferResponse]", responses)
        return _finish_when_answered(responses, context)

    def generate(self, request: GenerateRequest) -> ResponseStream[GenerateChunk]:
        self._context.id = request.id
        # Models promise an AsyncIterator and write generators; only those can be closed.
        return cast("ResponseStream[GenerateChunk]", self._text_model().generate(request, self._context))

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        tokens = await self._text_model().tokenize(request)
        self._context.finish()
        return tokens

    async def detokenize(self, ids: list[int]) -> str:
        text = await self._text_model().detokenize(ids)
        self._context.finish()
        return text

    def _start(self) -> None:
        if self._exiting():
            raise ServerExiting
        if not self._started:
            self._started = True
            self._server.increment()

    def _release(self, context: RequestContext) -> None:
        if self._loaded.measured is not None and not context.counted:
            context.counted = True
            self._loaded.measured.count(context)
        self._loaded.in_flight.decrement()
        if self._started:
            self._server.decrement()

    def _text_model(self) -> TextModel:
        self._start()
        if self._loaded.text is None:
            raise InvalidArgument(f"model '{self._loaded.config.name}' does not generate text", field="model")
        return self._loaded.text


async def _finish_when_answered(
    responses: AsyncIterator[InferResponse], context: RequestContext
) -> AsyncGenerator[InferResponse, None]:
    """The responses as they are; the request is answered with the final one, or at their end."""
    async with aclosing(cast("ResponseStream[InferResponse]", responses)) as stream:
        async for response in stream:
            if response.final:
                context.finish()
            yield response
    context.finish()
