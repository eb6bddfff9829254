"""Several streams read as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from ...core.gateway import ResponseStream

T = TypeVar("T")


async def merge_streams(streams: Sequence[ResponseStream[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams as they come, each with its stream's index; the first error ends all of them.

    Closing it cancels the tasks that read the streams, which closes these.
    """
    queue: asyncio.Queue[tuple[int, T | None, Exception | None]] = asyncio.Queue(len(streams))
    tasks = [asyncio.create_task(_forward(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
        async for index, item in _until_all_ended(queue, len(tasks)):
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    index: int, stream: ResponseStream[T], queue: "asyncio.Queue[tuple[int, T | None, Exception | None]]"
) -> None:
    error = None
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((index, item, None))
    except Exception as raised:
        error = raised
    await queue.put((index, None, error))


async def _until_all_ended(
    queue: "asyncio.Queue[tuple[int, T | None, Exception | None]]", running: int
) -> AsyncGenerator[tuple[int, T], None]:
    while running:
        index, item, error = await queue.get()
        if error is not None:
            raise error
        if item is None:
            running -= 1
        else:
            yield index, item
