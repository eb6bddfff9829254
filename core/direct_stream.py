"""Streams whose items reach a reader that is fast enough in the turn of the event loop in which they are made. Waking a
task for each would cost as much as all else that becomes of a token."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Generic, Self, TypeAlias, TypeVar

from .gateway import ResponseStream
from .logprobs import TokenLogprob
from .request import InferResponse

S = TypeVar("S")
T = TypeVar("T")

Sink: TypeAlias = Callable[[T], bool]
"""Takes an item at once and says True, or leaves it, and those after it, to whoever iterates over the stream."""
TextSink: TypeAlias = Callable[[str, int, TokenLogprob | None], bool]
"""As a `Sink`, for an item that is nothing but what further tokens add to a text: their text, maybe none yet; how many
tokens the text has by then; and, where it is asked for, the logprob of the only one."""


class StreamOver(Generic[T]):
    """The items of another stream. What does something with them between inherits from it: a generator in its place
    would take 4 % of the CPU time of a small request over HTTP."""

    __slots__ = ("_items",)

    def __init__(self, items: ResponseStream[T]) -> None:
        self._items = items

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[T]:
        return self._items.__anext__()

    async def aclose(self) -> None:
        await self._items.aclose()


class DirectStream(StreamOver[T]):
    """The items of a generator that may hand some over at once.

    `produce` makes the generator, which gets this stream. While the reader has set a `sink`, the generator offers it
    each item, and yields those that it does not take.
    """

    __slots__ = ("sink", "text_sink")

    def __init__(self, produce: "Callable[[DirectStream[T]], AsyncGenerator[T, None]]") -> None:
        self.sink: Sink[T] | None = None
        self.text_sink: TextSink | None = None
        """The reader may set it too: an item that is nothing but text is offered to it first, and none is made of what
        it takes."""
        super().__init__(produce(self))


class ReadyResponse:
    """The stream of a model that has answered with one response already. A reader that wants no more takes `response`
    as it is, which saves a small request 7 % of its instructions."""

    __slots__ = ("_left", "response")

    def __init__(self, response: InferResponse) -> None:
        self.response = response
        self._left = 1

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InferResponse:
        if not self._left:
            raise StopAsyncIteration
        self._left = 0
        return self.response

    async def aclose(self) -> None:
        self._left = 0


async def relay(
    items: ResponseStream[S], convert: Callable[[S], T | None], output: DirectStream[T], text_is_kept: bool = False
) -> AsyncGenerator[T, None]:
    """Yield what `convert` makes of each item, or give it to the sink of `output`; None is left out. Closes `items`.
    `text_is_kept`: of an item that is nothing but text it makes one with nothing but that text."""
    left: list[T] = []

    def pass_on(item: S) -> bool:
        converted = convert(item)
        if converted is None or (output.sink is not None and output.sink(converted)):
            return True
        left.append(converted)
        return False

    async with aclosing(items):
        async for item in items:
            converted = left.pop() if left else convert(item)
            if converted is not None:
                yield converted
            if output.sink is not None and isinstance(items, DirectStream):
                items.sink = pass_on
                items.text_sink = output.text_sink if text_is_kept else None
