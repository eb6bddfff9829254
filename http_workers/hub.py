"""The hub: what all workers of a gateway share in the control process, and what they are told of it."""

import asyncio
import logging
import time
from functools import partial
from typing import Protocol

import msgspec
from starlette.types import ASGIApp

from ..engine.client.llm import LlmModel
from ..repository.gateway import InProcessGateway
from ..repository.model_registry import LoadedModel
from .control_calls import RpcAnswerer
from .hub_link import HubLink
from .sequence_messages import CancelRequests
from .snapshot import ModelCensus
from .state_messages import BEAT_SECONDS, HubSnapshot, LogLevels

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
"""Seconds between two looks at what is served; calls that change something look by themselves."""

_LOOKS_PER_BEAT = round(BEAT_SECONDS / _LOOK_SECONDS)

_SETTLE_SECONDS = 30.0
"""Seconds that a change waits, at most, until every worker knows of it."""


class ConnectedWorker(Protocol):
    """A worker, as far as the hub tells it things."""

    @property
    def link(self) -> HubLink: ...

    @property
    def listening(self) -> asyncio.Event:
        """Its sockets take connections."""

    @property
    def acknowledged(self) -> int:
        """The number of the last snapshot that it goes by."""

    def beat(self) -> None:
        """Tell it that this loop turns."""


class ControlHub:
    """The state that the workers of one gateway share. `app` and `control_rpc` answer what is not inference."""

    def __init__(self, gateway: InProcessGateway, app: ASGIApp, control_rpc: RpcAnswerer) -> None:
        self.gateway = gateway
        self.app = app
        self.control_rpc = control_rpc
        self.census = ModelCensus(gateway, self._share)
        self.sessions: set[ConnectedWorker] = set()
        self._snapshot: HubSnapshot | None = None
        self._announced: frozenset[int] = frozenset()
        self._models: tuple[object, ...] = ()
        self._looking: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()

    def start(self) -> None:
        """Look at what is served from now on."""
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})

    @property
    def announced(self) -> frozenset[int]:
        """The numbers of the loaded models that workers were told of."""
        return self._announced

    def push(self) -> HubSnapshot:
        """Tell all workers what changed since they were told."""
        gateway, before = self.gateway, self._snapshot
        served = self.census.take()
        # Configs are compared by identity: they are never changed, and may be large. A loaded ensemble gets another one
        # where it becomes decoupled, or stops to be.
        models = ((model.number, model.latest, model.names, model.config.decoupled) for model in served.models)
        mark = *models, *map(id, served.listed)
        pickled = served.pickled() if before is None or mark != self._models else before.models
        self._models = mark
        self._announced = frozenset(model.number for model in served.models)
        snapshot = HubSnapshot(
            0 if before is None else before.number,
            gateway.ready(),
            gateway.exiting(),
            gateway.draining,
            bool(gateway.routes.served),
            gateway.shared_state.traces.may_trace,
            pickled,
            LogLevels.of(gateway.shared_state.logs.settings),
            gateway.shared_state.shared_memory.registered(),
            gateway.shared_state.shared_memory.registered_cuda(),
        )
        if before is None or snapshot != before:
            self._snapshot = before = msgspec.structs.replace(snapshot, number=snapshot.number + 1)
            for session in self.sessions:
                session.link.send(before)
        return before

    async def settle(self) -> None:
        """Return when every worker answers by what holds now, or does not answer: one that begins reads what it is sent
        before it takes connections."""
        if not self.sessions:
            return
        number = self.push().number
        deadline = time.monotonic() + _SETTLE_SECONDS
        while any(session.listening.is_set() and session.acknowledged < number for session in self.sessions):
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._progress.wait()
            except TimeoutError:
                log.warning("a frontend does not take what has changed")
                return

    def on_progress(self) -> None:
        """Wake what waits for workers: one took a snapshot, or is gone."""
        waited, self._progress = self._progress, asyncio.Event()
        waited.set()

    def cancel_elsewhere(self, model: int, request_id: str, asker: ConnectedWorker | None) -> None:
        """End a model's generations of requests with this id, but for those of `asker`; None: of the hub itself."""
        for session in self.sessions:
            if session is not asker:
                session.link.send(CancelRequests(model, request_id))
        loaded = None if asker is None else self.census.model(model)
        if loaded is not None and isinstance(loaded.model, LlmModel):
            loaded.model.cancel_here(request_id)

    def _share(self, number: int, loaded: LoadedModel) -> None:
        if isinstance(loaded.model, LlmModel):
            loaded.model.cancel_elsewhere = partial(self.cancel_elsewhere, number, asker=None)

    async def _look(self) -> None:
        looks = 0
        while True:
            try:
                self.push()
            except Exception:
                log.exception("frontends could not be told what is served")
            looks += 1
            if looks % _LOOKS_PER_BEAT == 0:
                for session in self.sessions:
                    session.beat()
            await asyncio.sleep(_LOOK_SECONDS)
