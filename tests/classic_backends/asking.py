"""A classic model that serves for a while, and those who ask it."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from charonia.classic_backends.batching.inference_job import InferenceJob
from charonia.classic_backends.batching.queued_request import QueuedRequest
from charonia.classic_backends.model import ClassicModel
from charonia.core.model import ModelConfig
from charonia.core.request import InferRequest, InferResponse
from charonia.core.request_context import RequestContext

HERE = Path()


@asynccontextmanager
async def serving(
    loader: Any, settings: ModelConfig, directory: Path = HERE, **fields: Any
) -> AsyncIterator[ClassicModel]:
    model = ClassicModel(settings, loader, directory, **fields)
    await model.load()
    try:
        yield model
    finally:
        await model.unload()


async def answers(
    model: ClassicModel, request: InferRequest, context: RequestContext | None = None
) -> list[InferResponse]:
    async with aclosing(model.infer(request, context or RequestContext("test"))) as responses:
        return [response async for response in responses]


class UnreadChannel:
    """The channel of a request whose responses nobody reads."""

    ended = False
    unread_slots = None

    def put(self, response: InferResponse) -> None:
        pass

    def end(self, error: Exception | None = None) -> None:
        pass


def queued_request(name: str = "", job: InferenceJob | None = None, **fields: Any) -> QueuedRequest:
    return QueuedRequest(job or InferenceJob({}), UnreadChannel(), RequestContext("test"), name, **fields)


def waiting(model: ClassicModel) -> int:
    """Requests that no instance has yet."""
    [count] = [r.value for r in model.readings() if r.family == "nv_inference_pending_request_count"]
    return int(count)  # type: ignore[arg-type]
