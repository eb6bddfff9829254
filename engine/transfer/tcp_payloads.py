"""Payloads behind their frames, over the same connection."""

from collections.abc import Sequence

from .wire import Link, Piece


class TcpSender:
    """A `PayloadSender`."""

    name = "tcp"

    def __init__(self, link: Link) -> None:
        self._link = link

    def send(self, piece: Piece, parts: Sequence[bytes]) -> None:
        self._link.send(piece)
        for part in parts:
            self._link.send_bytes(part)

    def close(self) -> None:
        """Nothing: the connection is closed by who opened it."""


class TcpReceiver:
    """A `PayloadReceiver`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._buffer = bytearray()

    def receive(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        payload = memoryview(self._buffer)[:size]
        self._link.receive_bytes(payload)
        return payload

    def close(self) -> None:
        """Nothing: the connection is closed by who opened it."""
