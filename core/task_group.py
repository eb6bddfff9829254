"""A task group that leaves no cycles of references behind when it is cancelled or fails."""

import asyncio
from types import TracebackType
from typing import Any


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
