"""Tasks of one request: waiting for the first of several, groups without reference cycles, merged streams."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

from .gateway import ResponseStream
from .native_calls import CONTROL_FLOW


async def wait_for_first(*waits: Awaitable[Any], timeout: float | None = None) -> None:
    """Return when one of `waits` is done or after `timeout` seconds; cancel and await the others. Raises what the first
    one raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def end_within(seconds: float | None, *endings: Awaitable[Any]) -> int:
    """Wait for all of `endings` together, cancel those that take longer than `seconds`, and return how many did. Raises
    what one of them raised."""
    tasks = [asyncio.ensure_future(ending) for ending in endings]
    try:
        if not tasks:
            return 0
        done, late = await asyncio.wait(tasks, timeout=seconds)
        for task in done:
            task.result()
        return len(late)
    finally:
        for task in tasks:
            task.cancel()


class RequestTaskGroup(asyncio.TaskGroup):
    """The tasks of one request.

    A plain group and the error that it raises refer to each other, by its frame and its parent task. They would keep
    the request's tensors until a garbage collection, which is rare.
    """

    _parent_task: asyncio.Task[Any] | None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except (asyncio.CancelledError, BaseExceptionGroup) as raised:
            raised.__traceback__ = None  # those of a group's errors stay
            raise
        finally:
            self._parent_task = None
            del error, trace


T = TypeVar("T")


async def merge_streams(streams: Sequence[ResponseStream[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as they arrive, each with its stream's index.

    The first error is raised here and ends all streams. Closing the generator closes them too.
    """
    queue: asyncio.Queue[tuple[int, T | None, BaseException | None]] = asyncio.Queue(len(streams))

    async def forward(index: int, stream: ResponseStream[T]) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((index, item, None))
        except CONTROL_FLOW:
            raise
        except BaseException as error:
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
