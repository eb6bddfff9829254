"""Coroutines that start in the caller's turn of the event loop: a request that never waits needs no task of its own.

Python 3.12 has tasks that start eagerly; this is the same for 3.11. Knows nothing of HTTP.
"""

import asyncio
import contextvars
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class EagerAwaitable(Generic[T]):
    """A coroutine, run until it waits for the first time, or to its end. Raises what it raises. Unless it is `done` it
    must be awaited, by one task."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._result: T | None = None
        self.done = False
        try:
            self._waits_for = _parked(work.send(None))
        except StopIteration as end:
            self._result, self.done = end.value, True

    def __await__(self) -> Generator[Any, Any, T]:
        while not self.done:
            try:
                sent = yield _awaited(self._waits_for)
            except BaseException as error:
                self._step(self._work.throw, error)
            else:
                self._step(self._work.send, sent)
        return self._result  # type: ignore[return-value]

    def _step(self, resume: Any, value: Any) -> None:
        try:
            self._waits_for = resume(value)
        except StopIteration as end:
            self._result, self.done = end.value, True


def start_eagerly(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None] | None":
    """Run `work` until it waits for the first time; the task that goes on with it, None if it has ended.

    `work` has a current task from the beginning, a stand-in, so timeouts and task groups work in it. Called from within
    a task, it starts later, as any new task does.
    """
    loop = asyncio.get_running_loop()
    if asyncio.current_task(loop) is not None:
        return loop.create_task(work)
    stand_in: Any = _StandIn()
    context = contextvars.copy_context()
    _enter_task(loop, stand_in)  # asyncio has it for other implementations of tasks
    try:
        waits_for = _parked(context.run(work.send, None))
    except StopIteration:
        return None
    finally:
        _leave_task(loop, stand_in)
    task = loop.create_task(_BegunCoroutine(work, waits_for), context=context)
    stand_in.replace(task)
    return task


def run_without_task(
    work: Coroutine[Any, Any, None], on_end: Callable[[BaseException | None], None], _: object = None
) -> None:
    """Run `work` in this turn of the event loop, and in those in which what it waits for is done; `on_end` gets the
    error that it ended with. It has no task, so nothing cancels it, and it may use nothing that needs a current one."""
    try:
        waits_for = work.send(None)
    except StopIteration:
        on_end(None)
    except (Exception, asyncio.CancelledError) as error:
        on_end(error)
    else:
        go_on = partial(run_without_task, work, on_end)
        if waits_for is None:  # as `asyncio.sleep(0)` waits for the next turn
            asyncio.get_running_loop().call_soon(go_on)
        else:
            waits_for._asyncio_future_blocking = False  # as a task does with what it waits for
            waits_for.add_done_callback(go_on)


def _parked(future: Any) -> Any:
    """What something begun waits for, until a task has it. The future is marked for a task, and refuses all that await
    it before one has taken back the mark; None is a wait for the next turn."""
    if future is not None:
        future._asyncio_future_blocking = False
    return future


def _awaited(future: Any) -> Any:
    """What was parked, marked for the task that gets it now."""
    if future is not None:
        future._asyncio_future_blocking = True
    return future


class _BegunCoroutine(Coroutine[Any, Any, None]):
    """The rest of what has begun, for a task. A task that is cancelled before its first step ends any other coroutine
    where that begins; here it reaches what has begun, which has things to free."""

    def __init__(self, work: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._work, self._waits_for = work, waits_for
        self._resumed = False

    def send(self, value: Any) -> Any:
        if self._resumed:
            return self._work.send(value)
        self._resumed = True
        return _awaited(self._waits_for)

    def throw(self, error: Any, *_: Any) -> Any:
        resumed, self._resumed = self._resumed, True
        waits_for = None if resumed or not isinstance(error, asyncio.CancelledError) else self._waits_for
        # As a task does that waits already: what it waits for is cancelled, and tells it.
        if waits_for is not None and waits_for.cancel():
            return _awaited(waits_for)
        return self._work.throw(error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, None]:
        return self._work.__await__()


class _StandIn:
    """asyncio's current task before there is one. Code that keeps it reaches the real task through it later."""

    _task: "asyncio.Task[None] | None" = None
    _cancellations: tuple[Any, ...] = ()

    def replace(self, task: "asyncio.Task[None]") -> None:
        self._task = task
        for message in self._cancellations:
            task.cancel(message)

    def cancel(self, msg: Any = None) -> bool:
        if self._task is not None:
            return self._task.cancel(msg)
        self._cancellations = (*self._cancellations, msg)
        return True

    def uncancel(self) -> int:
        if self._task is not None:
            return self._task.uncancel()
        self._cancellations = self._cancellations[:-1]
        return len(self._cancellations)

    def cancelling(self) -> int:
        return len(self._cancellations) if self._task is None else self._task.cancelling()

    def done(self) -> bool:
        return self._task is not None and self._task.done()

    def get_name(self) -> str:
        return "eager start" if self._task is None else self._task.get_name()
