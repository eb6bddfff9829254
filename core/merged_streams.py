"""Several streams of responses, read as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from .gateway import ResponseStream

T = TypeVar("T")


async def merge_streams(streams: Sequence[ResponseStream[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams in the order of their arrival, each with its stream's index.

    The first error of a stream is raised here and ends all of them. Closing the generator cancels the tasks that read
    the streams, which closes these.
    """
    queue: asyncio.Queue[tuple[int, T | None, Exception | None]] = asyncio.Queue(len(streams))

    async def forward(index: int, stream: ResponseStream[T]) -> None:
        end = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((index, item, None))
        except Exception as error:
            end = error
        await queue.put((index, None, end))

    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            index, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
