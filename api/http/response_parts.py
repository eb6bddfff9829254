"""Parts of streamed responses: the server-sent events of a text, most of which are alike but for the text, and the
writes of a turn of the event loop, which leave together when it ends."""

import asyncio
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import TypeAlias

import orjson

from ...core.logprobs import TokenLogprob

TextEncoder: TypeAlias = Callable[[str, int, TokenLogprob | None], bytes | None]
"""Encodes what a `TextSink` takes as events, maybe none; None leaves it."""
EventTail: TypeAlias = Callable[[int, TokenLogprob | None], bytes]
"""Makes what stands behind the text of an event."""

MOST_TEXT = 4096
"""Characters of a text whose event is written as soon as it is made. A longer one is of many tokens."""

MOST_PARTS = 64
"""Parts of responses that wait for each other: they are made faster than whole ones."""

_MOST_RESPONSES = 16
"""Whole responses that wait for each other: the first for as long as it takes to make the others."""


@dataclass(frozen=True, slots=True)
class TextEvent:
    """A `TextEncoder` of events that are alike but for the text and, with a `tail`, what that makes: what stands before
    and behind the text's JSON. Only without one there is no event of no text."""

    before: bytes
    behind: bytes = b""
    tail: EventTail | None = None

    def __call__(self, text: str, tokens: int, logprob: TokenLogprob | None) -> bytes | None:
        if not text:
            return b"" if self.tail is None else None
        return self.before + orjson.dumps(text) + (self.behind if self.tail is None else self.tail(tokens, logprob))


class ChunkHeads(dict[int, bytes]):
    """What stands in an HTTP chunk with an `event` before the JSON of its text, by the bytes of that JSON."""

    def __init__(self, event: TextEvent) -> None:
        super().__init__()
        self._before = event.before
        self._around = len(event.before) + len(event.behind)

    def __missing__(self, size: int) -> bytes:
        head = self[size] = b"%x\r\n%b" % (size + self._around, self._before)
        return head


class WriteCoalescer:
    """Responses, and parts of them, of an event loop's connections, until the turn of the loop ends.

    A write that wakes its reader's process costs several times as much as the next ones, that find it awake.
    """

    def __init__(self, connections: Sized) -> None:
        """`connections`: those of the event loop that are open."""
        self._connections = connections
        self._responses: dict[asyncio.Transport, bytes] = {}
        self.parts: list[tuple[asyncio.Transport, bytes]] = []
        """Parts of responses, in their order; always this list. The first of a turn and the last are to be `bound`."""
        self._turn: asyncio.Handle | None = None

    def write_soon(self, transport: asyncio.Transport, response: bytes) -> None:
        """Write a response when the turn ends or enough wait. Whatever else writes to its connection flushes before."""
        is_alone = len(self._connections) < 2
        if is_alone or transport in self._responses:
            self.flush()
        if is_alone:  # nobody else's response could go with it
            transport.write(response)
            return
        self._responses[transport] = response
        self.bound(len(self._responses), _MOST_RESPONSES)

    def write_part(self, transport: asyncio.Transport, part: bytes) -> None:
        """As `write_soon`. A part behind one that waits flushes that: whether its client reads is then known."""
        if self.parts and self.parts[-1][0] is transport:
            self.flush()
        self.parts.append((transport, part))
        self.bound(len(self.parts), MOST_PARTS)

    def bound(self, waiting: int, most: int) -> None:
        """Have what waits written when the turn ends, or now if it is the `most` that may."""
        if waiting >= most:
            self.flush()
        elif self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)

    def flush_for(self, transport: asyncio.Transport) -> None:
        """Write what waits, if some of it may be this transport's."""
        if self.parts or transport in self._responses:
            self.flush()

    def flush(self) -> None:
        """Write all that waits."""
        waiting = [*self._responses.items(), *self.parts]
        self._responses.clear()
        self.parts.clear()
        for transport, response in waiting:
            if not transport.is_closing():
                transport.write(response)

    def _end_turn(self) -> None:
        self._turn = None
        self.flush()
