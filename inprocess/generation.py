"""The answers of a language model to a program's prompts, in the server's event loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from ..core.direct_stream import DirectStream
from ..core.errors import CharoniaError, QueueFull
from ..core.gateway import ResponseStream
from ..core.request import GenerateChunk, join_chunks
from ..core.tasks import RequestTaskGroup, merge_streams
from ..repository.gateway import InProcessGateway
from .outputs import RequestOutput, all_finished, completion, prompt_logprobs
from .prompts import AskedPrompt
from .requests import ENDPOINT

_RETRY_SECONDS = 0.02
"""How long a prompt that found the engine's queue full waits before it tries again."""


class Generator:
    """Asks one model of a gateway. `most_at_once`: prompts that it has in hand, of those that a program gives: enough
    for the engine to choose from, and fewer than its queue takes."""

    def __init__(self, gateway: InProcessGateway, model: str, most_at_once: int) -> None:
        self._gateway, self._model = gateway, model
        self._most_at_once = most_at_once

    async def answer_all(
        self, prompts: Sequence[AskedPrompt], on_answer: Callable[[], object] | None
    ) -> list[RequestOutput]:
        """The answers, in the order of the prompts. `on_answer` is called after each. The first error ends the
        others."""
        room = asyncio.Semaphore(self._most_at_once)

        async def answer(prompt: AskedPrompt) -> RequestOutput:
            async with room:
                output = await self._answer_when_admitted(prompt)
            if on_answer is not None:
                on_answer()
            return output

        try:
            async with RequestTaskGroup() as group:
                tasks = [group.create_task(answer(prompt)) for prompt in prompts]
        except* CharoniaError as errors:
            raise _first(errors) from None
        return [task.result() for task in tasks]

    async def _answer_when_admitted(self, prompt: AskedPrompt) -> RequestOutput:
        while True:
            try:
                return await self._answer(prompt)
            except QueueFull:  # its program's other requests are in it: they end
                await asyncio.sleep(_RETRY_SECONDS)

    async def _answer(self, prompt: AskedPrompt) -> RequestOutput:
        with self._gateway.open_request(ENDPOINT) as context:
            handle = await self._gateway.acquire(context, self._model)
            streams = [handle.generate(request) for request in prompt.requests]
            if len(streams) == 1:
                chunks = [await _read_all(streams[0])]
            else:
                async with RequestTaskGroup() as group:
                    tasks = [group.create_task(_read_all(stream)) for stream in streams]
                chunks = [task.result() for task in tasks]
        return _output(prompt, list(enumerate(chunks)))

    async def stream(self, prompt: AskedPrompt) -> AsyncGenerator[RequestOutput, None]:
        """The answers to one prompt as they grow: each item has what is new."""
        with self._gateway.open_request(ENDPOINT) as context:
            handle = await self._gateway.acquire(context, self._model)
            streams = [handle.generate(request) for request in prompt.requests]
            prompt_ids: list[int] = []
            unfinished = len(streams)
            async with aclosing(merge_streams(streams)) as merged:
                async for index, chunk in merged:
                    output = _output(prompt, [(index, chunk)])
                    unfinished -= output.finished
                    output.finished = not unfinished
                    output.prompt_token_ids = prompt_ids = output.prompt_token_ids or prompt_ids
                    yield output


async def _read_all(stream: ResponseStream[GenerateChunk]) -> GenerateChunk:
    """The whole answer; its chunks wake nobody but for the last."""
    chunks: list[GenerateChunk] = []

    def take(chunk: GenerateChunk) -> bool:
        chunks.append(chunk)
        return True

    if isinstance(stream, DirectStream):
        stream.sink = take
    async with aclosing(stream):
        chunks.extend([chunk async for chunk in stream])
    return join_chunks(chunks)


def _output(prompt: AskedPrompt, chunks: Sequence[tuple[int, GenerateChunk]]) -> RequestOutput:
    wanted = prompt.requests[0].sampling.logprobs is not None
    outputs = [completion(index, chunk, wanted) for index, chunk in chunks]
    first = chunks[0][1]
    return RequestOutput(
        prompt.id,
        prompt.given.text,
        list(first.prompt_ids),
        prompt_logprobs(first.prompt_logprobs),
        outputs,
        all_finished(outputs),
        first.usage.cached_tokens,
    )


def _first(errors: BaseExceptionGroup[CharoniaError]) -> CharoniaError:
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
