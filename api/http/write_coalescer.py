"""Responses, and parts of them, that wait for each other until a turn of the event loop ends."""

import asyncio
from collections.abc import Sized

_MOST_WAITING = 16
"""Responses that wait for each other: the first for as long as it takes to make the others."""

MOST_PARTS = 64
"""Parts of responses that wait for each other: they are made faster."""


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
        self.bound(len(self._responses), _MOST_WAITING)

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
