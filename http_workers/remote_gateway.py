"""The gateway of a worker: endpoints ask it as they ask the hub's own, and it asks the hub.

Models of tensors in the last snapshot are found here. For any other name the hub is asked who serves it, and refuses
with its own errors. Text is read and written here, by the same `LlmModel` over another engine.
"""

import asyncio
import logging
import pickle
import time
from functools import lru_cache, partial
from typing import NamedTuple

from ..api.http.error_responses import printable
from ..core.errors import CharoniaError, NotFound
from ..core.model import ModelConfig, ModelStats
from ..core.request_context import Headers, RequestContext
from ..telemetry.logging_setup import apply_log_settings
from ..telemetry.loop_lag import LoopLag
from ..telemetry.shared_state import SharedState
from .hub_connection import HubConnection
from .messages import AcquireCall, AcquiredModel
from .remote_engine import RemoteEngine
from .remote_models import ObservedTextHandle, RemoteModelHandle, RemoteTextHandle, TextModelHere
from .sequence_messages import CancelRequests
from .snapshot import ServedModel, ServedModels
from .state_messages import (
    BEAT_SECONDS,
    HUNG_SECONDS,
    Heartbeat,
    HubSnapshot,
    SnapshotAcknowledged,
    StopWorker,
    WorkerState,
)

log = logging.getLogger(__name__)


class AcquiredHere(NamedTuple):
    """A model that the hub has acquired for a request. `text`: the language model here, with one user more."""

    answer: AcquiredModel
    config: ModelConfig
    text: TextModelHere | None

    def give_back(self) -> None:
        """Release it: nobody is there to use it."""
        if self.text is not None:
            self.text.release()


class RemoteGateway:
    """A `ModelLookup` of one worker, by what the hub tells over `connection`.

    `max_silence`: seconds that a word of the hub may be overdue before nothing is ready. `lag`: of this process's loop.
    """

    def __init__(self, shared_state: SharedState, files: tuple[int, int], max_silence: float, lag: LoopLag) -> None:
        self.shared_state = shared_state
        """Mirrors the hub's, which logs requests where it sends spans."""
        self.stop_requested = asyncio.Event()
        """The hub wants this process to end."""
        self.stop_by_force = False
        """Whether it is to end at once."""
        self.informed = asyncio.Event()
        """There was a first snapshot, and its models can be asked here."""
        self._hub_logs = shared_state.traces.sends_spans
        self.connection = HubConnection(
            files,
            self._hub_logs,
            {
                AcquiredModel: self._on_acquired,
                CancelRequests: self._on_cancel_requests,
                HubSnapshot: self._on_snapshot,
                Heartbeat: self._on_heartbeat,
                StopWorker: self._on_stop,
            },
        )
        self._max_silence, self._lag = max_silence, lag
        self._heard = time.monotonic()
        self._snapshot: HubSnapshot | None = None
        self._served = ServedModels()
        self._by_name: dict[str, dict[str, ServedModel]] = {}
        self._texts: dict[int, TextModelHere] = {}
        self._opening_regions = asyncio.Lock()

    # For endpoints

    def open_request(self, endpoint: str, headers: Headers = ()) -> RequestContext:
        context = RequestContext(endpoint, headers)
        context.on_end(self.connection.on_request_end)
        return context

    def find_inline(self, name: str, version: str = "") -> None:
        """None: the hub answers."""

    async def acquire(self, context: RequestContext, name: str, version: str = "") -> RemoteModelHandle:
        versions = self._by_name.get(name)
        served = None if versions is None else versions.get(version)
        if served is not None and served.parts is None:
            config, context.body = served.config, None
            context.model = config.name
            context.version = config.version
            context.model_found = True
            number = served.number if served.inline else 0
            return RemoteModelHandle(self.connection, self.find, config, context, version, number)
        context.model, context.version = name, version
        # A name that the snapshot has is that of no route: only those go by bodies.
        body = context.body if served is None and self._snapshot is not None and self._snapshot.has_routes else None
        hub = self.connection
        counts = (context.prompt_count, context.choice_count)
        key = hub.key_of(context)
        call = AcquireCall(key, hub.origin_of(context), printable(name), version, *counts, body)
        acquired: AcquiredHere = await hub.ask(key, call, AcquiredHere.give_back)
        context.body = None
        answer = acquired.answer
        text = acquired.text
        if text is not None:
            context.on_end(text.release)
        context.model = answer.model
        context.version = answer.version
        context.model_found = True
        context.adapter, context.route = answer.adapter, answer.route
        used, capacity = answer.kv_tokens
        stats = ModelStats(True, kv_tokens=used, kv_token_capacity=capacity)
        if text is None:
            return RemoteModelHandle(hub, self.find, acquired.config, context, answer.version, stats=stats)
        await asyncio.shield(text.building)
        if answer.follows:
            context.logged = True
            return ObservedTextHandle(hub, self.find, acquired.config, context, text.model, stats)
        model = text.model.with_engine(text.engine.for_request(key, answer.refusal))
        return RemoteTextHandle(hub, self.find, acquired.config, context, model, stats)

    def check_room(self, context: RequestContext) -> None:
        """Do nothing: the hub knows, and is asked with the body."""

    def alive(self) -> bool:
        return self._silence < HUNG_SECONDS

    def ready(self) -> bool:
        return self._snapshot is not None and self._snapshot.ready and self._heard_lately and not self._lag.stuck

    @property
    def _heard_lately(self) -> bool:
        return self._silence < self._max_silence

    @property
    def _silence(self) -> float:
        """Seconds for which a word of the hub is overdue."""
        return time.monotonic() - self._heard - BEAT_SECONDS

    def exiting(self) -> bool:
        return self._snapshot is not None and self._snapshot.exiting

    def model_configs(self) -> list[ModelConfig]:
        return list(self._served.listed)

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        if (model := self.find(name, version)) is not None:
            return model.config
        for config in self._served.listed:  # routes, and models that requests load
            if name in (config.name, *config.aliases) and version in ("", config.version):
                return config
        raise NotFound(f"Request for unknown model: '{name}' is not found")

    def served_versions(self, name: str) -> tuple[str, ...]:
        versions = set(self._by_name.get(name, ())) - {""} or {self.model_config(name).version}
        return tuple(sorted(versions, key=int))

    def is_model_ready(self, name: str, version: str = "") -> bool:
        draining = self._snapshot is not None and self._snapshot.draining
        return not draining and self._heard_lately and self.find(name, version) is not None

    async def unready_reason(self, name: str, version: str = "") -> str:
        """The reason by the last snapshot; only the hub can ask the model itself."""
        return "" if self.is_model_ready(name, version) else "Model version not ready"

    # For handles

    def find(self, model: str, version: str) -> ServedModel | None:
        """The loaded version of the last snapshot."""
        return self._by_name.get(model, {}).get(version)

    # Messages

    def _on_acquired(self, message: AcquiredModel) -> None:
        """Looked up at once: the next snapshot may not have it any more."""
        if not self.connection.is_awaited(message.key):
            return
        text = self._texts.get(message.number)
        config = message.config
        known = next((model.config for model in self._served.models if model.number == message.number), None)
        if text is not None:
            text.users += 1
        served = _unpickled_config(config) if config or known is None else known
        self.connection.resolve(message.key, AcquiredHere(message, served, text))

    def _on_cancel_requests(self, message: CancelRequests) -> None:
        text = self._texts.get(message.model)
        if text is not None:
            text.model.cancel_here(message.request_id)

    def _on_heartbeat(self, message: Heartbeat) -> None:
        self._heard = time.monotonic()
        readers = [text.reader_delays() for text in self._texts.values()]
        self.connection.send(WorkerState(self._lag.state(), [delays for delays in readers if delays.seconds]))

    def _on_stop(self, message: StopWorker) -> None:
        self.stop_by_force = message.force
        self.stop_requested.set()

    def _on_snapshot(self, snapshot: HubSnapshot) -> None:
        before, self._snapshot, self._heard = self._snapshot, snapshot, time.monotonic()
        self.connection.wants_headers = snapshot.has_routes or self._hub_logs
        self.connection.has_traces = snapshot.has_traces
        if before is None or snapshot.models != before.models:
            self._serve(ServedModels.of_pickle(snapshot.models))
        if before is None or snapshot.logs != before.logs:
            apply_log_settings(snapshot.logs.settings())
        self._drop_regions(snapshot)
        self._map_regions(snapshot)
        waited = [text.building for text in self._texts.values() if not text.building.done()]
        if snapshot.cuda_regions:
            waited.append(asyncio.create_task(self._open_cuda_regions()))
        if waited:
            asyncio.gather(*waited, return_exceptions=True).add_done_callback(lambda _: self._goes_by(snapshot))
        else:
            self._goes_by(snapshot)

    def _goes_by(self, snapshot: HubSnapshot) -> None:
        self.informed.set()
        self.connection.send(SnapshotAcknowledged(snapshot.number))

    def _serve(self, served: ServedModels) -> None:
        by_name: dict[str, dict[str, ServedModel]] = {}
        for model in served.models:
            for name in model.names:
                versions = by_name.setdefault(name, {})
                versions[model.config.version] = model
                if model.latest:
                    versions[""] = model
        self._served, self._by_name = served, by_name
        texts = {model.number: model for model in served.models if model.parts is not None}
        for number in [number for number in self._texts if number not in texts]:
            self._texts.pop(number).drop()
        for number, model in texts.items():
            if number not in self._texts:
                assert model.parts is not None
                engine = RemoteEngine(self.connection, number, model.parts.info)
                self._texts[number] = text = TextModelHere(model, engine)
                text.building.add_done_callback(partial(_report, model.config.name))

    def _drop_regions(self, snapshot: HubSnapshot) -> None:
        mirror = self.shared_state.shared_memory
        for mapped in mirror.registered():
            if mapped not in snapshot.regions:
                mirror.unregister(mapped.name)
        for opened in mirror.registered_cuda():
            if opened not in snapshot.cuda_regions:
                mirror.unregister_cuda(opened.name)

    def _map_regions(self, snapshot: HubSnapshot) -> None:
        mirror = self.shared_state.shared_memory
        for region in snapshot.regions:
            if region not in mirror.registered():
                try:
                    mirror.register(*region)
                except CharoniaError as error:
                    _report_region(region.name, error)

    async def _open_cuda_regions(self) -> None:
        """Open those of the last snapshot, which takes long: another may come meanwhile, and waits here."""
        mirror = self.shared_state.shared_memory
        async with self._opening_regions:
            assert self._snapshot is not None
            for region in self._snapshot.cuda_regions:
                if region not in mirror.registered_cuda():
                    try:
                        await mirror.register_cuda(region)
                    except CharoniaError as error:
                        _report_region(region.name, error)
                    self._drop_regions(self._snapshot)


def _report_region(name: str, error: CharoniaError) -> None:
    log.error("shared memory region '%s' cannot be used here: %s", name, error.message)


def _report(name: str, building: "asyncio.Task[None]") -> None:
    if not building.cancelled() and (error := building.exception()) is not None:
        log.error("model '%s' cannot be read: %s", name, error)


@lru_cache(64)
def _unpickled_config(data: bytes) -> ModelConfig:
    config = pickle.loads(data)
    assert isinstance(config, ModelConfig)
    return config
