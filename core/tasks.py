"""Tasks of one request: waiting for the first of several, groups without reference cycles, streams read as one."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

from .gateway import ResponseStream
from .native_calls import CONTROL_FLOW


async def wait_for_first(*waits: Awaitable[Any], timeout: float | None = None) -> None:
    """Return when one of `waits` is done or after `timeout` seconds; the others are then cancelled and awaited.

    Raises what the first one raised.
    """
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def end_within(seconds: float | None, *endings: Awaitable[Any]) -> int:
    """Wait for all of `endings` at once, and cancel those that take longer than `seconds`; how many did. For what must
    come to an end, whatever a library below waits for; None: however long that is. Raises what one of them raised.
    """
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

    What a plain group raises leads by its traceback to the group's own frame, which has it in a variable, and the group
    keeps the task, which has it too: all that a request held, its tensors too, would stay until the cycle collector
    comes by, and it rarely does.
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
    """The items of all streams in the order of their arrival, each with its stream's index.

    The first error of a stream is raised here and ends all of them. Closing the generator cancels the tasks that read
    the streams, which closes these.
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
