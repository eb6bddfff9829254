"""Answers of one turn of the event loop, sent one right after the other.

A send that wakes its reader costs several times what one does that finds him awake, and between answers that are sent
as they are made he falls asleep again. Knows nothing of what is sent.
"""

import asyncio

_MOST = 16
"""Answers that wait for each other: the first of them for as long as it takes to make the rest."""


class WriteCoalescer:
    """Of the connections of one event loop: of each the last answer, until this turn of the loop ends."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Transport, bytes] = {}
        self._turn: asyncio.Handle | None = None

    def __contains__(self, transport: asyncio.Transport) -> bool:
        return transport in self._waiting

    def write_soon(self, transport: asyncio.Transport, answer: bytes) -> None:
        """Write it there soon. Who writes there himself, or closes it, must `flush` before."""
        if transport in self._waiting:
            self.flush()
        self._waiting[transport] = answer
        if len(self._waiting) >= _MOST:
            self.flush()
        elif self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)

    def flush(self) -> None:
        """Write everything that waits."""
        waiting, self._waiting = self._waiting, {}
        for transport, answer in waiting.items():
            if not transport.is_closing():
                transport.write(answer)

    def _end_turn(self) -> None:
        self._turn = None
        self.flush()
