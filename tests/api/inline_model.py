"""A server with a model that computes in the event loop, and what its requests leave behind."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

from charonia.core.errors import Internal
from charonia.core.model import Capabilities, ModelConfig, ModelStats
from charonia.core.request import InferRequest, InferResponse
from charonia.core.request_context import ExecutionTimes, RequestContext, RequestEnd
from charonia.core.tensor import TensorSpec
from charonia.repository.gateway import InProcessGateway
from charonia.repository.model_registry import LoadedModel

SPEC = TensorSpec("IN", "FP32", (2,))


class Inline:
    """Gives its input back, unless that is negative; counts what it is asked with and without a context."""

    def __init__(self) -> None:
        self.config = ModelConfig("inline", "1", "test", inputs=(SPEC,), outputs=(SPEC,))
        self.capabilities = Capabilities(inline=self, measured=self)
        self.ends: list[RequestEnd] = []
        self.counted = 0

    def stats(self) -> ModelStats:
        return ModelStats(True)

    def readings(self) -> Iterator[Any]:
        return iter(())

    async def load(self) -> None: ...

    async def unload(self) -> None: ...

    def answer_now(self, request: InferRequest) -> tuple[InferResponse, ExecutionTimes]:
        tensor = request.inputs["IN"]
        if tensor.data[0] < 0:
            raise Internal("negative")
        return InferResponse((tensor,), final=True), ExecutionTimes(1, 1, (1, 1, 1))

    def count_end(self, end: RequestEnd) -> None:
        self.ends.append(end)

    async def infer(self, request: InferRequest, context: RequestContext) -> AsyncIterator[InferResponse]:
        yield self.answer_now(request)[0]

    def count(self, context: RequestContext) -> None:
        self.counted += 1


class InlineServer:
    """A gateway with one such model, and the contexts of its requests that have ended."""

    def __init__(self) -> None:
        self.ended: list[RequestContext] = []
        self.model = Inline()
        self.gateway = InProcessGateway(end_listeners=(self.ended.append,))
        model: Any = self.model
        self.gateway.registry.get_or_add("inline").publish({"1": LoadedModel(model, self.model.config)})
