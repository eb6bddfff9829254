"""The answers of a language model to a program's prompts, in the server's event loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from ..core.direct_stream import DirectStream
from ..core.errors import QueueFull
from ..core.gateway import ResponseStream
from ..core.request import GenerateChunk, join_chunks
from ..core.tasks import RequestTaskGroup, merge_streams
from ..repository.gateway import InProcessGateway
from .outputs import RequestOutput, all_finished, completion, prompt_logprobs
from .prompts import AskedPrompt
from .requests import ENDPOINT

T = TypeVar("T")

_FIRST_RETRY, _LAST_RETRY = 0.02, 1.0
"""Seconds that a prompt waits which found the queue before its engine full, of those who read images or compile
constraints, before it tries again; each time twice as many."""


class Generator:
    """Asks one model of a gateway. `most_at_once`: sequences that it has in hand, of those that a program asks for:
    enough for the engine to choose from."""

    def __init__(self, gateway: InProcessGateway, model: str, most_at_once: int) -> None:
        self._gateway, self._model = gateway, model
        self._most_at_once = most_at_once

    async def answer_all(
        self, prompts: Sequence[AskedPrompt], on_answer: Callable[[], object] | None
    ) -> list[RequestOutput]:
        """The answers, in the order of the prompts. `on_answer` is called after each. The first error ends the
        others."""
        places, turn = asyncio.Semaphore(self._most_at_once), asyncio.Lock()

        async def answer(prompt: AskedPrompt) -> RequestOutput:
            taken = min(len(prompt.requests), self._most_at_once)
            async with turn:  # two that had half of their places would wait for each other
                for _ in range(taken):
                    await places.acquire()
            output = await self._answer_when_admitted(prompt)
            for _ in range(taken):
                places.release()
            if on_answer is not None:
                on_answer()
            return output

        order = sorted(range(len(prompts)), key=lambda place: prompts[place].given.priority)
        answers = dict(zip(order, await _together(answer(prompts[place]) for place in order), strict=True))
        return [answers[place] for place in range(len(prompts))]

    async def _answer_when_admitted(self, prompt: AskedPrompt) -> RequestOutput:
        pause = _FIRST_RETRY
        while True:
            try:
                return await self._answer(prompt)
            except QueueFull:  # its program's other requests are in it: they end
                await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_RETRY)

    async def _answer(self, prompt: AskedPrompt) -> RequestOutput:
        with self._gateway.open_request(ENDPOINT) as context:
            context.waits_for_room = True
            handle = await self._gateway.acquire(context, self._model)
            streams = [handle.generate(request) for request in prompt.requests]
            if len(streams) == 1:
                chunks = [await _read_all(streams[0])]
            else:
                chunks = await _together(map(_read_all, streams))
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


async def _together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them give; the first error ends the others, and is raised as it is."""
    try:
        async with RequestTaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


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
