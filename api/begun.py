"""Awaitables that are begun at once, without the event loop: what needs not wait needs no task, and not to be watched.

Knows nothing of what is awaited.
"""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Begun(Generic[T]):
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


async def in_task() -> None:
    """Return in a task of its own, for what needs one: who was begun in none gets it when he waits."""
    if asyncio.current_task() is None:
        await asyncio.sleep(0)
