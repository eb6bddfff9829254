"""The core's end of the sockets to its clients. Knows nothing of what the messages mean.

A client binds two ipc sockets in a directory of its own: `to` carries messages to the core, `from` brings them back.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from .messages import FromCore, ToCore

_LAST_WORDS_MILLISECONDS = 1000
"""How long a closing socket may take to hand over what was sent."""


class CoreEndpoints(NamedTuple):
    """The endpoints of one client, which binds both."""

    to_core: str
    from_core: str

    @classmethod
    def in_directory(cls, directory: str | Path) -> "CoreEndpoints":
        return cls(f"ipc://{directory}/to", f"ipc://{directory}/from")


class CoreSockets:
    """Sockets to all clients; the index of an address is the client's number.

    `send` is for any thread. What arrives is handed to the `listen` callback in a thread of its own.
    """

    def __init__(self, clients: Sequence[CoreEndpoints]) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outboxes = [self._context.socket(zmq.PUSH) for _ in clients]
        self._encode = msgspec.msgpack.Encoder().encode
        self._sending = threading.RLock()  # garbage collected in the midst of it may have something to say
        self._listener: threading.Thread | None = None
        for address, outbox in zip(clients, self._outboxes, strict=True):
            outbox.set_hwm(0)
            outbox.setsockopt(zmq.LINGER, _LAST_WORDS_MILLISECONDS)
            outbox.connect(address.from_core)
            self._inbox.connect(address.to_core)

    @property
    def clients(self) -> int:
        return len(self._outboxes)

    def send(self, client: int, message: FromCore) -> None:
        """Hand over to the sockets' own thread; never waits for the reader."""
        with self._sending:  # a socket may go from thread to thread, but has to be handed over
            self._outboxes[client].send(self._encode(message))

    def broadcast(self, message: FromCore) -> None:
        for client in range(self.clients):
            self.send(client, message)

    def listen(self, receive: Callable[[ToCore], None]) -> None:
        """From now on call `receive` with every message, from a thread of its own."""
        self._listener = threading.Thread(target=self._listen, args=(receive,), name="inbox", daemon=True)
        self._listener.start()

    def close(self) -> None:
        """Send what is still to be sent and stop listening."""
        with self._sending:
            for outbox in self._outboxes:
                outbox.close()
        if self._listener is None:
            self._inbox.close(linger=0)
        self._context.term()  # ends the listener, which closes its socket

    def _listen(self, receive: Callable[[ToCore], None]) -> None:
        decode = msgspec.msgpack.Decoder[ToCore](ToCore).decode
        try:
            while True:
                receive(decode(self._inbox.recv()))
        except zmq.ContextTerminated:
            return
        finally:
            self._inbox.close(linger=0)
