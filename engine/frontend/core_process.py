"""One engine core process, seen from the frontend's event loop: spawned, heard, and buried with all it leaves.

Knows nothing of requests. Used once; a restart makes a new link, so no message of a dead core is ever read.
"""

import asyncio
import atexit
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import zmq

from ...processes.child_process import python_child
from ...processes.scratch import ScratchDirectory
from ..config import EngineConfig
from ..core.messages import FromCore, Shutdown, ToCore
from ..core.process import main
from ..core.sockets import CoreEndpoints

_LAST_WORDS_SECONDS = 0.1
"""After a death, how long the sockets may still take to deliver what was said."""

_CONNECT_SECONDS = 0.01
"""How long what was said waits, again and again, for a core that has not connected yet."""


class CoreProcess:
    """Hands everything the core says to `on_message`; `ended` gets its exit code when it is gone and buried.

    Owns the process and a private directory with two sockets. Belongs to the running event loop.

    Raises:
        OSError, zmq.ZMQError: directory, sockets or process cannot be made; nothing is left of them.
    """

    def __init__(self, config: EngineConfig, on_message: Callable[[FromCore], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder[FromCore](FromCore).decode
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self.dying = False
        self._unsent: deque[bytes] = deque()
        with ExitStack() as belongings:
            directory = str(belongings.enter_context(ScratchDirectory()))
            self._context = belongings.enter_context(zmq.Context())
            self._outbox = belongings.enter_context(
                self._bound(zmq.PUSH, CoreEndpoints.in_directory(directory).to_core)
            )
            self._inbox = belongings.enter_context(
                self._bound(zmq.PULL, CoreEndpoints.in_directory(directory).from_core)
            )
            self._process = python_child("charonia-core", main, config, directory)
            self._belongings = belongings.pop_all()
        atexit.register(self._belongings.close)
        self._listen()

    @property
    def pid(self) -> int | None:
        return None if self.ended.done() else self._process.pid

    def send(self, message: ToCore) -> None:
        """Never waits. What a dying core no longer takes is dropped: its streams end when it is buried."""
        self._unsent.append(self._encode(message))
        if len(self._unsent) == 1:
            self._send_all()

    def _send_all(self) -> None:
        try:
            while self._unsent:
                self._outbox.send(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()
        except zmq.Again:  # its first words may be here before it is connected to hear ours
            self._loop.call_later(_CONNECT_SECONDS, self._send_all)
        except zmq.ZMQError:
            self._unsent.clear()

    def kill(self) -> None:
        """End it as kill -9 would; it is buried soon after."""
        if not self.ended.done():
            self._process.kill()

    async def stop(self, patience: float) -> None:
        """Ask, and after `patience` seconds kill. Returns when it is buried."""
        self.send(Shutdown())
        await asyncio.wait({self.ended}, timeout=patience)
        self.kill()
        await self.ended

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def _listen(self) -> None:
        self._loop.add_reader(self._inbox.FD, self._hear)
        self._loop.add_reader(self._process.sentinel, self._on_death)
        self._hear()

    def _hear(self) -> None:
        # The descriptor tells of changes only: everything must be read each time.
        try:
            while True:
                self._on_message(self._decode(self._inbox.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return

    def _on_death(self) -> None:
        self.dying = True
        self._loop.remove_reader(self._process.sentinel)
        self._loop.call_later(_LAST_WORDS_SECONDS, self._bury)

    def _bury(self) -> None:
        try:
            self._hear()
        finally:  # whatever it said, and whatever came of that
            self._loop.remove_reader(self._inbox.FD)
            exit_code = self._process.close()
            self._belongings.close()
            atexit.unregister(self._belongings.close)
            self.ended.set_result(exit_code)
