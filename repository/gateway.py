"""The hub: the gateway in process. Hands each request to the model that it is for.

Knows nothing of protocols, and of models only the contract.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from ..core.errors import InvalidArgument, ServerExiting
from ..core.gateway import NO_FILES, ModelState, RepositoryIndexEntry, ResponseStream
from ..core.metrics import Measurement, RequestEnd, ended_readings
from ..core.model import Model, ModelConfig, ModelStats, TextModel
from ..core.request import GenerateChunk, GenerateRequest, InferRequest, InferResponse, TokenizeRequest
from ..core.request_context import Headers, RequestContext, current_request, request_scope
from ..core.shared_state import SharedState
from ..core.statistics import ModelStatistics
from ..telemetry.request_log import log_request
from ..telemetry.request_trace import request_trace, trace_tensors
from .builder import ModelBuilder
from .in_flight import CountedStream, finish_current_request
from .lifecycle import LoadFailure, ModelLifecycle
from .model_control import ModelControl, NoModelControl
from .model_entry import LoadedModel
from .model_registry import ModelRegistry
from .request_validation import validate_request


class InProcessGateway:
    """Dispatch. With `strict`, the server is ready only when every known model is; and nothing is ready while the
    process that answers is not `healthy`. Each of `witnesses` is shown every exchange when it ended. `builder` builds
    what is loaded."""

    def __init__(
        self,
        strict: bool = True,
        healthy: Callable[[], bool] = lambda: True,
        witnesses: Sequence[Callable[[RequestContext], None]] = (log_request,),
        commons: SharedState | None = None,
        builder: ModelBuilder | None = None,
    ) -> None:
        self.shared_state = commons or SharedState()
        self.registry = ModelRegistry()
        builder = builder or ModelBuilder()
        self.lifecycle = ModelLifecycle(self.registry, builder)
        self.model_control: ModelControl = NoModelControl()
        self._strict = strict
        self._healthy = healthy
        self._end_listeners = witnesses
        self._budget = builder.budget
        self._ended_without_model: Counter[RequestEnd] = Counter()
        self._exiting = False

    # What doors ask

    def ready(self) -> bool:
        if self._exiting or not self._healthy():
            return False
        return not self._strict or self.registry.ready()

    def exiting(self) -> bool:
        return self._exiting

    def model_configs(self) -> list[ModelConfig]:
        latest = (entry.latest for entry in self.registry.entries.values())
        return [version.loaded.config for version in latest if version is not None and version.loaded is not None]

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        return self.registry.find_loaded(name, version).config

    def is_model_ready(self, name: str, version: str = "") -> bool:
        entry = self.registry.entries.get(name)
        found = None if entry is None else entry.find_version(version)
        return not self._exiting and self._healthy() and found is not None and found.ready

    def model_stats(self, name: str, version: str = "") -> ModelStats:
        return self.registry.find_loaded(name, version).model.stats()

    def served_versions(self, name: str) -> tuple[str, ...]:
        self.registry.find_loaded(name)
        return tuple(version.number for version in self.registry.entries[name].loaded_versions)

    def model_statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        return self.registry.statistics(name, version)

    def repository_index(self, ready_only: bool = False) -> list[RepositoryIndexEntry]:
        known = self.registry.index()
        names = {entry.name for entry in known}
        whole = [
            *known,
            *(RepositoryIndexEntry(name) for name in self.model_control.loadable_models() if name not in names),
        ]
        return [entry for entry in whole if not ready_only or entry.state is ModelState.READY]

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] = NO_FILES) -> None:
        self._refuse_when_exiting()
        await self.model_control.load(name, config, files)

    async def unload_model(self, name: str, dependents: bool = False) -> None:
        # No model has dependents yet: ensembles are not served.
        await self.model_control.unload(name)

    def open_request(self, door: str, headers: Headers = ()) -> AbstractContextManager[RequestContext]:
        return request_scope(RequestContext(door, headers), self._on_request_end)

    def infer(self, name: str, version: str, request: InferRequest) -> ResponseStream[InferResponse]:
        if request.id:
            _set_request_id(request.id)
        if self._exiting:
            self._refuse_when_exiting()
        serves = self.registry.find_loaded(name, version)
        validate_request(serves.config, request)
        answers, exchange = serves.model.infer(request), current_request()
        if exchange is not None:
            answers = trace_tensors(request_trace(exchange, self.shared_state.traces), request.inputs.values(), answers)
        return CountedStream(answers, serves.in_flight, accounted=serves.text is not None)

    def generate(self, name: str, request: GenerateRequest) -> ResponseStream[GenerateChunk]:
        _set_request_id(request.id)
        serves, text = self._find_text_model(name)
        return CountedStream(text.generate(request), serves.in_flight)

    async def tokenize(self, name: str, request: TokenizeRequest) -> list[int]:
        serves, text = self._find_text_model(name)
        with serves.in_flight.counted():
            tokens = await text.tokenize(request)
        finish_current_request()
        return tokens

    async def detokenize(self, name: str, ids: list[int]) -> str:
        serves, text = self._find_text_model(name)
        with serves.in_flight.counted():
            told = await text.detokenize(ids)
        finish_current_request()
        return told

    # What the composition root does

    async def load_built_model(self, name: str, version: str, build: Callable[[], Model]) -> Exception | None:
        """Serve a model that is made by hand; what goes wrong is this model's trouble alone, and is returned."""
        try:
            await self.lifecycle.serve_built_model(name, version, build)
        except LoadFailure as failure:
            return failure.cause
        return None

    def measurements(self) -> Iterator[Measurement]:
        """What there is to know of each model at a scrape, and of requests that were for none."""
        yield Measurement({}, tuple(ended_readings(self._ended_without_model)))
        yield from self.registry.measurements()
        for held in self._budget.measurements():
            yield held._replace(labels=self.registry.labels(held.labels["model"], held.labels["version"]))

    def begin_exit(self) -> None:
        """Refuse what is new from here on, and the loads and unloads that clients wait for."""
        self._exiting = True
        self.lifecycle.cancel_client_changes()

    @property
    def requests_in_flight(self) -> int:
        """Requests that are being answered."""
        return self.registry.in_flight.count

    async def wait_drained(self) -> None:
        """Return when no request runs."""
        await self.registry.in_flight.wait_drained()

    async def unload_all(self) -> None:
        """Unload every model, whatever one of them says."""
        await self.lifecycle.close()

    # Inside

    def _on_request_end(self, exchange: RequestContext) -> None:
        self._count_request(exchange)
        for witness in self._end_listeners:
            witness(exchange)

    def _count_request(self, exchange: RequestContext) -> None:
        """With the model that it was for, if that counts; any name a client makes up would be a series forever."""
        counts = self.registry.find_counting_model(exchange.model, exchange.version) if exchange.model_found else None
        if counts is not None and counts.measured is not None:
            counts.measured.count(exchange)
        elif exchange.end is not None:
            self._ended_without_model[exchange.end] += 1

    def _find_text_model(self, name: str) -> tuple[LoadedModel, TextModel]:
        self._refuse_when_exiting()
        serves = self.registry.find_loaded(name)
        if serves.text is None:
            raise InvalidArgument(f"model '{name}' does not generate text", field="model")
        return serves, serves.text

    def _refuse_when_exiting(self) -> None:
        if self._exiting:
            raise ServerExiting


def _set_request_id(request_id: str) -> None:
    exchange = current_request()
    if exchange is not None:
        exchange.id = request_id
