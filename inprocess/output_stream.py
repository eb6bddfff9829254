"""An answer of a program's model as it grows."""

from typing import Self

from .loop_thread import BridgedStream
from .outputs import RequestOutput


class OutputStream:
    """An answer as it grows, for a thread or a task. The end of its block, `close`, and the last reference to it cancel
    what is left; so does the cancellation of the task that reads it."""

    def __init__(self, model: object, stream: BridgedStream[RequestOutput]) -> None:
        self._model = model  # which ends with the last reference to it
        self._stream = stream

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        self._stream.close()

    def cancel(self) -> None:
        """End it: its reader gets `Cancelled`."""
        self._stream.interrupt()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestOutput:
        return self._stream.next_item()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        return await self._stream.next_awaited()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
