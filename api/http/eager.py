"""Awaitables that are begun at once, without the event loop: what needs not wait needs no task, and not to be watched.

Knows nothing of what is awaited.
"""

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_TASK = object()
"""What one waits for who waits for a task."""


class EagerAwaitable(Generic[T]):
    """A coroutine, run until it waits for the first time, or to its end. Raises what it raises.

    Unless it is `done` it must be awaited: by the same task, or by a new one if it was begun in none.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._result: T | None = None
        self.done = False
        try:
            self._waits_for = work.send(None)
        except StopIteration as end:
            self._result, self.done = end.value, True

    def __await__(self) -> Generator[Any, Any, T]:
        if not self.done and self._waits_for is _TASK:
            self._step(self._work.send, None)
        while not self.done:
            try:
                sent = yield self._waits_for
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


async def ensure_task() -> None:
    """Return in a task, for what needs one: who was begun in none gets it now, from whoever awaits the
    `EagerAwaitable`."""
    if asyncio.current_task() is None:
        await _ask_for_task()


@coroutine
def _ask_for_task() -> Generator[object, None, None]:
    yield _TASK
