"""Keeps one engine core alive: loads it, hears its heartbeat, restarts it when it dies or hangs.

Knows nothing of requests: whoever has some is told when the core that held them is lost.
"""

import asyncio
import logging
import time
from typing import NamedTuple, Protocol

import zmq

from ...core.errors import CharoniaError, NotReady, Unavailable, error_from_code
from ...processes.log_forwarding import LogRecordMessage
from ...processes.restart_backoff import RestartBackoff
from ..config import EngineConfig
from ..core.messages import (
    CoreFailed,
    CoreLoading,
    CoreReady,
    EngineLoad,
    FromCore,
    RequestRejected,
    RequestUpdates,
    ToCore,
)
from .core_process import CoreProcess

log = logging.getLogger(__name__)

_SILENT_DEATHS = 3
"""A first load is given up after this many cores that died without a word."""


class CoreTimeouts(NamedTuple):
    """How long things may take, in seconds.

    A loop whose last turn is older than max(`turn`, `turn_steps` recent steps) is not ready; `hung` times that old,
    it is killed. A dead core is restarted after `first_retry`, then twice as long each time up to `last_retry`,
    until one has served for `stable`. `stop`: what a core gets to leave by itself. `watch`: how often to look.
    """

    turn: float = 5.0
    turn_steps: float = 10.0
    hung: float = 60.0
    watch: float = 1.0
    first_retry: float = 0.1
    last_retry: float = 30.0
    stable: float = 5.0
    stop: float = 5.0


DEFAULT_TIMEOUTS = CoreTimeouts()


class CoreListener(Protocol):
    """Who is told what the core says."""

    def on_progress(self, loading: CoreLoading) -> None: ...

    def on_updates(self, updates: RequestUpdates) -> None: ...

    def on_refused(self, refused: RequestRejected) -> None: ...

    def on_loss(self, error: CharoniaError) -> None:
        """The core is gone, with everything it was told."""


class CoreSupervisor:
    """`info` says what the engine is while one serves, otherwise None; `load` is its last turn's.

    Once closed, it is not started again.
    """

    def __init__(self, config: EngineConfig, listener: CoreListener, patience: CoreTimeouts) -> None:
        self._config = config
        self._name = "the engine core"
        if config.data_parallel_size > 1:
            self._name += f" of replica {config.replica}"
        self._listener = listener
        self._patience = patience
        self._link: CoreProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._first: asyncio.Future[CoreReady] | None = None
        self._failure: CharoniaError | None = None
        self._backoff = RestartBackoff(patience.first_retry, patience.last_retry, patience.stable)
        self._deaths = 0
        self._born = 0.0
        self._last_turn = 0.0
        self.info: CoreReady | None = None
        self.load = EngineLoad()

    @property
    def ready(self) -> bool:
        """Warm-up generated a token, and the loop turned not long ago."""
        alive = self._link is not None and not self._link.dying
        return alive and self.info is not None and self._silence() < self._overdue()

    @property
    def pid(self) -> int | None:
        return None if self._link is None else self._link.pid

    def send(self, message: ToCore) -> None:
        """Never waits; dropped when no core serves."""
        if self._link is not None:
            self._link.send(message)

    async def start(self) -> CoreReady:
        """Return when a core serves for the first time.

        Raises:
            CharoniaError: the core says why it cannot, or dies again and again without a word.
        """
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
        if self._link is not None:
            await self._link.stop(self._patience.stop if self.info else 0.0)
            self._lose(Unavailable("the engine was stopped"))

    async def _keep_alive(self, first: asyncio.Future[CoreReady]) -> None:
        while True:
            self._failure = None
            try:
                delay = self._mourn(await self._live())
            except (OSError, zmq.ZMQError) as error:
                self._failure = Unavailable(f"{self._name} cannot be spawned: {error}")
                delay = self._mourn(-1)
            if not first.done() and (hopeless := self._hopeless()):
                first.set_exception(hopeless)
                return
            await asyncio.sleep(delay)

    async def _live(self) -> int:
        """Spawn a core and see it to its end; its exit code."""
        link = self._link = CoreProcess(self._config, self._on_message)
        looks = 0
        while not (await asyncio.wait({link.ended}, timeout=self._patience.watch))[0]:
            # Twice in a row: the first time, it may be this loop that was stuck and has messages to read.
            looks = looks + 1 if self._hung() else 0
            if looks > 1:
                log.error("%s does not turn any more; killing it", self._name)
                link.kill()
        return link.ended.result()

    def _mourn(self, exit_code: int) -> float:
        """Tell that the core has ended; seconds until the next one is to start."""
        why = self._failure.message if self._failure else f"{self._name} died (exit code {exit_code})"
        if self._failure is None or self._first is None or self._first.done():  # else who waits for the start says it
            log.error("%s", why)
        served = 0.0 if self.info is None else time.monotonic() - self._born
        self._deaths += 1
        self._lose(NotReady(f"{why}; it is being restarted"))
        return self._backoff.next_delay(served)

    def _lose(self, error: CharoniaError) -> None:
        self._link = None
        self.info = None
        self.load = EngineLoad()
        self._listener.on_loss(error)

    def _hopeless(self) -> CharoniaError | None:
        """Why a first load is not tried again, if so."""
        if self._failure is not None:
            return self._failure
        if self._deaths >= _SILENT_DEATHS:
            return Unavailable(f"{self._name} died {self._deaths} times while it was loading")
        return None

    def _silence(self) -> float:
        return time.monotonic() - self._last_turn

    def _overdue(self) -> float:
        return max(self._patience.turn, self._patience.turn_steps * self.load.step_seconds)

    def _hung(self) -> bool:
        return self.info is not None and self._silence() > self._patience.hung * self._overdue()

    def _on_message(self, message: FromCore) -> None:
        match message:
            case RequestUpdates():
                self._last_turn = time.monotonic()
                self.load = message.load
                self._listener.on_updates(message)
            case RequestRejected():
                self._listener.on_refused(message)
            case CoreLoading():
                self._listener.on_progress(message)
            case LogRecordMessage():
                message.log_here(self._name)
            case CoreReady():
                self._serve(message)
            case CoreFailed():
                self._failure = error_from_code(message.code, message.message, message.field or None)

    def _serve(self, info: CoreReady) -> None:
        self.info = info
        self._born = self._last_turn = time.monotonic()
        if self._first is not None and not self._first.done():
            self._first.set_result(info)
        else:
            log.info("%s serves again", self._name)
