"""One engine core's process and sockets, in the frontend's event loop.

Knows nothing of requests. Used once: a restart makes a new one, so no message of a dead core is ever read.
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

_DRAIN_SECONDS = 0.1
"""For the sockets to deliver the last messages of a core that died."""

_CONNECT_SECONDS = 0.01
"""Between two attempts to send to a core that has not connected yet."""


class CoreProcess:
    """Spawns a core and calls `on_message` with each of its messages. `dying`: it exited. `ended` gets the exit code
    when all messages were read and nothing of it is left.

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
        with ExitStack() as resources:
            directory = str(resources.enter_context(ScratchDirectory()))
            self._context = resources.enter_context(zmq.Context())
            endpoints = CoreEndpoints.in_directory(directory)
            self._outbox = resources.enter_context(self._bind(zmq.PUSH, endpoints.to_core))
            self._inbox = resources.enter_context(self._bind(zmq.PULL, endpoints.from_core))
            self._process = python_child("charonia-core", main, config, directory)
            self._resources = resources.pop_all()
        atexit.register(self._resources.close)
        self._loop.add_reader(self._inbox.FD, self._receive_all)
        self._loop.add_reader(self._process.sentinel, self._on_exit)
        self._receive_all()

    @property
    def pid(self) -> int | None:
        return None if self.ended.done() else self._process.pid

    def send(self, message: ToCore) -> None:
        """Send without waiting. A dying core takes nothing more: its streams end with it."""
        self._unsent.append(self._encode(message))
        if len(self._unsent) == 1:
            self._send_all()

    def _send_all(self) -> None:
        try:
            while self._unsent:
                self._outbox.send(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()
        except zmq.Again:  # its first messages may be here before it has connected to our other socket
            self._loop.call_later(_CONNECT_SECONDS, self._send_all)
        except zmq.ZMQError:
            self._unsent.clear()

    def kill(self) -> None:
        """End it as kill -9 does; `ended` follows soon."""
        if not self.ended.done():
            self._process.kill()

    async def stop(self, seconds: float) -> None:
        """Ask it to exit, kill it after `seconds`, and return when it has `ended`."""
        self.send(Shutdown())
        await asyncio.wait({self.ended}, timeout=seconds)
        self.kill()
        await self.ended

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def _receive_all(self) -> None:
        # ZeroMQ's descriptor is edge-triggered: everything must be read each time.
        try:
            while True:
                self._on_message(self._decode(self._inbox.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return

    def _on_exit(self) -> None:
        self.dying = True
        self._loop.remove_reader(self._process.sentinel)
        self._loop.call_later(_DRAIN_SECONDS, self._finish)

    def _finish(self) -> None:
        try:
            self._receive_all()
        finally:  # whatever a message's listener raised
            self._loop.remove_reader(self._inbox.FD)
            exit_code = self._process.close()
            self._resources.close()
            atexit.unregister(self._resources.close)
            self.ended.set_result(exit_code)
