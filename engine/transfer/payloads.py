"""How the bytes of a piece travel: the one seam of transports. Its frame says how many there are.

A transport is chosen in the handshake: `tcp_payloads.py` has them behind the frame, `shared_memory_payloads.py` in
memory that both servers map.
"""

from collections.abc import Sequence
from typing import Protocol

from .wire import Piece


class PayloadSender(Protocol):
    """The prefilling server's end."""

    name: str

    def send(self, piece: Piece, parts: Sequence[bytes]) -> None:
        """Send the frame, and the parts one after the other; what was sent before has been taken. Raises
        `TransferError`."""

    def close(self) -> None: ...


class PayloadReceiver(Protocol):
    """The decoding server's end."""

    def receive(self, size: int) -> memoryview:
        """The bytes of the piece whose frame has come, which stay as they are until the next call. Raises
        `TransferError`."""

    def close(self) -> None: ...
