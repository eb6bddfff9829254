"""Responses of one turn of the event loop, written one right after the other.

A write that wakes the process of its reader costs several times as much as one that finds it awake, and between
responses that are written as they are made it falls asleep again. Knows nothing of what is written.
"""

import asyncio

_MOST = 16
"""Responses that wait for each other: the first for as long as it takes to make the others."""


class WriteCoalescer:
    """The last response of each connection of an event loop, until the turn of the loop ends."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Transport, bytes] = {}
        self._turn: asyncio.Handle | None = None

    def __contains__(self, transport: asyncio.Transport) -> bool:
        return transport in self._waiting

    def write_soon(self, transport: asyncio.Transport, answer: bytes) -> None:
        """Write `answer` when the turn ends. Whatever else writes to the transport, or closes it, flushes before."""
        if transport in self._waiting:
            self.flush()
        self._waiting[transport] = answer
        if len(self._waiting) >= _MOST:
            self.flush()
        elif self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)

    def flush(self) -> None:
        """Write every response that waits."""
        waiting, self._waiting = self._waiting, {}
        for transport, answer in waiting.items():
            if not transport.is_closing():
                transport.write(answer)

    def _end_turn(self) -> None:
        self._turn = None
        self.flush()
