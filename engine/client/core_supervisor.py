"""Keeps one engine core alive, in the server's event loop: spawns it, watches its heartbeat, restarts it when it dies
or hangs.

Knows nothing of requests: the listener that has them hears when the core is lost.
"""

import asyncio
import atexit
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple, Protocol

import msgspec
import zmq

from ...core.errors import CharoniaError, NotReady, Unavailable
from ...processes.child_process import RestartBackoff, python_child
from ...processes.log_forwarding import LogRecordMessage
from ...processes.scratch import ScratchDirectory
from ..config import EngineConfig
from ..core.messages import (
    AdapterLoaded,
    AdapterRefused,
    AdapterReply,
    CoreFailed,
    CoreLoading,
    CoreReady,
    EngineLoad,
    FromCore,
    RequestRejected,
    RequestUpdates,
    Shutdown,
    ToCore,
    encode_tokens,
)
from ..core.prepared_core import CORE_NAME
from ..core.process import main
from ..core.sockets import CoreEndpoints

log = logging.getLogger(__name__)

_SILENT_DEATHS = 3
"""A first load is given up after this many cores that died without a word."""

_DRAIN_SECONDS = 0.1
"""For the sockets to deliver the last messages of a core that died."""

_CONNECT_SECONDS = 0.01
"""Between two attempts to send to a core that has not connected yet."""


class CoreTimeouts(NamedTuple):
    """Times of a core, in seconds unless the field says otherwise."""

    turn: float = 5.0
    """A core is not ready when the last turn of its loop is older than this, and than `turn_steps` steps."""
    turn_steps: float = 10.0
    """In recent step times."""
    hung: float = 60.0
    """The core is killed at so many times the age at which it is not ready."""
    watch: float = 1.0
    """Between two checks."""
    first_retry: float = 0.1
    """Until the first restart; each later one waits twice as long."""
    last_retry: float = 30.0
    """The longest wait before a restart."""
    stable: float = 5.0
    """A core that has served for so long is next restarted after `first_retry`."""
    stop: float = 5.0
    """A core may take so long to exit by itself."""


DEFAULT_TIMEOUTS = CoreTimeouts()


class CoreListener(Protocol):
    """Receives the messages of a core."""

    def on_progress(self, loading: CoreLoading) -> None: ...

    def on_updates(self, message: RequestUpdates) -> None: ...

    def on_refused(self, refused: RequestRejected) -> None: ...

    def on_adapter(self, reply: AdapterReply) -> None: ...

    def on_serving(self) -> None:
        """A core serves, the first or a restarted one: it has received nothing yet."""

    def on_loss(self, error: CharoniaError) -> None:
        """The core is gone, with everything that it received."""


class CoreSupervisor:
    """Keeps one core alive from `start` to `close`. `info`: the engine's sizes while a core serves, otherwise None.
    `load`: the load after its last step."""

    def __init__(self, config: EngineConfig, listener: CoreListener, timeouts: CoreTimeouts) -> None:
        self._config = config
        self._name = "the engine core"
        if config.data_parallel_size > 1:
            self._name += f" of replica {config.replica}"
        self._listener = listener
        self._timeouts = timeouts
        self._core: CoreProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._first: asyncio.Future[CoreReady] | None = None
        self._failure: CharoniaError | None = None
        self._backoff = RestartBackoff(timeouts.first_retry, timeouts.last_retry, timeouts.stable)
        self._deaths = 0
        self._served_since = 0.0
        self._last_turn = 0.0
        self.info: CoreReady | None = None
        self.load = EngineLoad()

    @property
    def ready(self) -> bool:
        """Whether warm-up generated a token, and the step loop turned not long ago."""
        alive = self._core is not None and not self._core.dying
        return alive and self.info is not None and self._lateness() < 1

    @property
    def pid(self) -> int | None:
        return None if self._core is None else self._core.pid

    def send(self, message: ToCore) -> bool:
        """Send a message without waiting. It is dropped, and False, when there is no core."""
        if self._core is None:
            return False
        self._core.send(message)
        return True

    async def start(self) -> CoreReady:
        """Return when a core serves for the first time. Raises a `CharoniaError`: the core's own, or that it died
        repeatedly without one."""
        if self._first is None:
            self._first = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._keep_alive(self._first), name="engine-supervisor")
        return await asyncio.shield(self._first)

    async def close(self) -> None:
        """Stop the core and return when nothing of it is left."""
        if self._task is not None and self._first is not None:
            self._first.cancel()
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._core is not None:
            await self._core.stop(self._timeouts.stop if self.info else 0.0)
            self._drop_core(Unavailable("the engine was stopped"))

    async def _keep_alive(self, first: asyncio.Future[CoreReady]) -> None:
        while True:
            self._failure = None
            try:
                delay = self._on_exit(await self._run_core())
            except (OSError, zmq.ZMQError) as error:
                self._failure = Unavailable(f"{self._name} cannot be spawned: {error}")
                delay = self._on_exit(-1)
            # A first load is tried again only if the core died without a word.
            if not first.done() and self._failure is None and self._deaths >= _SILENT_DEATHS:
                self._failure = Unavailable(f"{self._name} died {self._deaths} times while it was loading")
            if not first.done() and self._failure is not None:
                first.set_exception(self._failure)
                return
            await asyncio.sleep(delay)

    async def _run_core(self) -> int:
        """Spawn a core and return its exit code when it is gone."""
        core = self._core = CoreProcess(self._config, self._on_message)
        overdue = 0
        while not (await asyncio.wait({core.ended}, timeout=self._timeouts.watch))[0]:
            # Twice in a row: the first time, it may be this loop that was stuck and has messages to read.
            overdue = overdue + 1 if self.info is not None and self._lateness() > self._timeouts.hung else 0
            if overdue > 1:
                log.error("%s does not turn any more; killing it", self._name)
                core.kill()
        return core.ended.result()

    def _on_exit(self, exit_code: int) -> float:
        """Log the end of a core and tell the listener; seconds until the next one is to start."""
        why = self._failure.message if self._failure else f"{self._name} died (exit code {exit_code})"
        if self._failure is None or self._first is None or self._first.done():  # else `start` raises it
            log.error("%s", why)
        served = 0.0 if self.info is None else time.monotonic() - self._served_since
        self._deaths += 1
        self._drop_core(NotReady(f"{why}; it is being restarted"))
        return self._backoff.next_delay(served)

    def _drop_core(self, error: CharoniaError) -> None:
        self._core = None
        self.info = None
        self.load = EngineLoad()
        self._listener.on_loss(error)

    def _lateness(self) -> float:
        """The age of the last step, in times of the age at which the loop is no longer ready."""
        allowed = max(self._timeouts.turn, self._timeouts.turn_steps * self.load.step_seconds)
        return (time.monotonic() - self._last_turn) / allowed

    def _on_message(self, message: FromCore) -> None:
        match message:
            case RequestUpdates():
                self._last_turn = time.monotonic()
                self.load = message.load
                self._listener.on_updates(message)
            case RequestRejected():
                self._listener.on_refused(message)
            case AdapterLoaded() | AdapterRefused():
                self._listener.on_adapter(message)
            case CoreLoading():
                self._listener.on_progress(message)
            case LogRecordMessage():
                message.log_here(self._name)
            case CoreReady():
                self.info = message
                self._served_since = self._last_turn = time.monotonic()
                self._listener.on_serving()
                if self._first is not None and not self._first.done():
                    self._first.set_result(message)
                else:
                    log.info("%s serves again", self._name)
            case CoreFailed():
                self._failure = message.error.error()


class CoreProcess:
    """A core's process and the two sockets to it, in a private directory. A restart makes a new one, so no message of a
    dead core is ever read. `dying`: the process exited. `ended` gets the exit code when all messages were read.

    Raises:
        OSError, zmq.ZMQError: directory, sockets or process cannot be made; nothing is left of them.
    """

    def __init__(self, config: EngineConfig, on_message: Callable[[FromCore], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._encode = msgspec.msgpack.Encoder(enc_hook=encode_tokens).encode
        self._decode = msgspec.msgpack.Decoder[FromCore](FromCore).decode
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self.dying = False
        self._unsent: deque[bytes] = deque()
        with ExitStack() as resources:
            directory = str(resources.enter_context(ScratchDirectory()))
            endpoints = CoreEndpoints.in_directory(directory)
            context = resources.enter_context(zmq.Context())
            self._outbox = resources.enter_context(context.socket(zmq.PUSH))
            self._inbox = resources.enter_context(context.socket(zmq.PULL))
            for socket, endpoint in ((self._outbox, endpoints.to_core), (self._inbox, endpoints.from_core)):
                socket.set_hwm(0)
                socket.setsockopt(zmq.LINGER, 0)
                socket.bind(endpoint)
            self._process = python_child(CORE_NAME, main, config, directory)
            self._resources = resources.pop_all()
        self._parent = os.getpid()
        atexit.register(self._close_resources)
        self._loop.add_reader(self._inbox.FD, self._receive_all)
        self._loop.add_reader(self._process.sentinel, self._on_exit)
        self._receive_all()

    def _close_resources(self) -> None:
        if os.getpid() == self._parent:  # a process that was forked from this one would take them away from it
            self._resources.close()

    @property
    def pid(self) -> int | None:
        return None if self.ended.done() else self._process.pid

    def send(self, message: ToCore) -> None:
        """Send without waiting; a dying core gets nothing more."""
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
        """Kill the process; `ended` follows soon."""
        if not self.ended.done():
            self._process.kill()

    async def stop(self, seconds: float) -> None:
        """Ask it to exit, kill it after `seconds`, and return when it has `ended`."""
        self.send(Shutdown())
        await asyncio.wait({self.ended}, timeout=seconds)
        self.kill()
        await self.ended

    def _receive_all(self) -> None:
        # ZeroMQ's descriptor is edge-triggered: everything must be read each time, whatever a listener raises.
        while True:
            try:
                message = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(self._decode(message))
            except Exception:
                log.exception("a message of %s could not be taken", CORE_NAME)

    def _on_exit(self) -> None:
        self.dying = True
        self._loop.remove_reader(self._process.sentinel)
        self._loop.call_later(_DRAIN_SECONDS, self._finish)

    def _finish(self) -> None:
        try:
            self._receive_all()
        finally:
            self._loop.remove_reader(self._inbox.FD)
            exit_code = self._process.close()
            self._resources.close()
            atexit.unregister(self._close_resources)
            self.ended.set_result(exit_code)
