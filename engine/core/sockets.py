"""The core's end of the sockets to the server. Knows nothing of what the messages mean.

The server binds two ipc sockets in a directory: `to` carries messages to the core, `from` brings them back.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from .messages import FromCore, ToCore, decode_tokens

_CLOSE_MILLISECONDS = 1000
"""How long a closing socket may take to hand over the messages sent."""


class CoreEndpoints(NamedTuple):
    """The addresses of the two sockets."""

    to_core: str
    from_core: str

    @classmethod
    def in_directory(cls, directory: str | Path) -> "CoreEndpoints":
        return cls(f"ipc://{directory}/to", f"ipc://{directory}/from")


class CoreSockets:
    """The core's two sockets. `send` is for any thread; the callback of `listen` has a thread of its own."""

    def __init__(self, endpoints: CoreEndpoints) -> None:
        self._context = zmq.Context()
        self._inbox, self._outbox = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._encode = msgspec.msgpack.Encoder().encode
        self._sending = threading.RLock()  # a log record may be sent by a finaliser in the midst of sending
        self._listener: threading.Thread | None = None
        self._outbox.set_hwm(0)
        self._outbox.setsockopt(zmq.LINGER, _CLOSE_MILLISECONDS)
        self._outbox.connect(endpoints.from_core)
        self._inbox.connect(endpoints.to_core)

    def send(self, message: FromCore) -> None:
        """Send a message without waiting for its reader."""
        with self._sending:  # a socket may be used by several threads, but by one at a time
            self._outbox.send(self._encode(message))

    def listen(self, receive: Callable[[ToCore], None]) -> None:
        """Call `receive` with every message, from a thread of its own."""
        self._listener = threading.Thread(target=self._listen, args=(receive,), name="inbox", daemon=True)
        self._listener.start()

    def close(self) -> None:
        """Flush what is to be sent, and stop listening."""
        with self._sending:
            self._outbox.close()
        if self._listener is None:
            self._inbox.close(linger=0)
        self._context.term()  # ends the listener, which closes its socket

    def _listen(self, receive: Callable[[ToCore], None]) -> None:
        decode = msgspec.msgpack.Decoder[ToCore](ToCore, dec_hook=decode_tokens).decode
        try:
            while True:
                receive(decode(self._inbox.recv()))
        except zmq.ContextTerminated:
            return
        finally:
            self._inbox.close(linger=0)
