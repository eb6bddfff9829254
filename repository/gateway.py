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
        self.commons = commons or SharedState()
        self.registry = ModelRegistry()
        builder = builder or ModelBuilder()
        self.lifecycle = ModelLifecycle(self.registry, builder)
        self.control: ModelControl = NoModelControl()
        self._strict = strict
        self._healthy = healthy
        self._witnesses = witnesses
        self._budget = builder.budget
        self._homeless: Counter[RequestEnd] = Counter()
        self._exiting = False

    # What doors ask

    def ready(self) -> bool:
        if self._exiting or not self._healthy():
            return False
        return not self._strict or self.registry.ready()

    def exiting(self) -> bool:
        return self._exiting

    def models(self) -> list[ModelConfig]:
        latest = (entry.latest for entry in self.registry.entries.values())
        return [version.serving.config for version in latest if version is not None and version.serving is not None]

    def model(self, name: str, version: str = "") -> ModelConfig:
        return self.registry.serving(name, version).config

    def model_ready(self, name: str, version: str = "") -> bool:
        entry = self.registry.entries.get(name)
        found = None if entry is None else entry.find(version)
        return not self._exiting and self._healthy() and found is not None and found.ready

    def stats(self, name: str, version: str = "") -> ModelStats:
        return self.registry.serving(name, version).model.stats()

    def versions(self, name: str) -> tuple[str, ...]:
        self.registry.serving(name)
        return tuple(version.number for version in self.registry.entries[name].served)

    def statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        return self.registry.statistics(name, version)

    def index(self, ready_only: bool = False) -> list[RepositoryIndexEntry]:
        known = self.registry.index()
        names = {entry.name for entry in known}
        whole = [*known, *(RepositoryIndexEntry(name) for name in self.control.names() if name not in names)]
        return [entry for entry in whole if not ready_only or entry.state is ModelState.READY]

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] = NO_FILES) -> None:
        self._refuse_when_exiting()
        await self.control.load(name, config, files)

    async def unload_model(self, name: str, dependents: bool = False) -> None:
        # No model has dependents yet: ensembles are not served.
        await self.control.unload(name)

    def open(self, door: str, headers: Headers = ()) -> AbstractContextManager[RequestContext]:
        return request_scope(RequestContext(door, headers), self._ended)

    def infer(self, name: str, version: str, request: InferRequest) -> ResponseStream[InferResponse]:
        if request.id:
            _set_request_id(request.id)
        if self._exiting:
            self._refuse_when_exiting()
        serves = self.registry.serving(name, version)
        validate_request(serves.config, request)
        answers, exchange = serves.model.infer(request), current_request()
        if exchange is not None:
            answers = trace_tensors(request_trace(exchange, self.commons.traces), request.inputs.values(), answers)
        return CountedStream(answers, serves.tally, accounted=serves.text is not None)

    def generate(self, name: str, request: GenerateRequest) -> ResponseStream[GenerateChunk]:
        _set_request_id(request.id)
        serves, text = self._writing(name)
        return CountedStream(text.generate(request), serves.tally)

    async def tokenize(self, name: str, request: TokenizeRequest) -> list[int]:
        serves, text = self._writing(name)
        with serves.tally.running():
            tokens = await text.tokenize(request)
        finish_current_request()
        return tokens

    async def detokenize(self, name: str, ids: list[int]) -> str:
        serves, text = self._writing(name)
        with serves.tally.running():
            told = await text.detokenize(ids)
        finish_current_request()
        return told

    # What the composition root does

    async def load(self, name: str, version: str, build: Callable[[], Model]) -> Exception | None:
        """Serve a model that is made by hand; what goes wrong is this model's trouble alone, and is returned."""
        try:
            await self.lifecycle.serve(name, version, build)
        except LoadFailure as failure:
            return failure.cause
        return None

    def measure(self) -> Iterator[Measurement]:
        """What there is to know of each model at a scrape, and of requests that were for none."""
        yield Measurement({}, tuple(ended_readings(self._homeless)))
        yield from self.registry.measure()
        for held in self._budget.measure():
            yield held._replace(labels=self.registry.labels(held.labels["model"], held.labels["version"]))

    def exit(self) -> None:
        """Refuse what is new from here on, and the loads and unloads that clients wait for."""
        self._exiting = True
        self.lifecycle.give_up_changes()

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return self.registry.tally.count

    async def drained(self) -> None:
        """Return when no request runs."""
        await self.registry.tally.drained()

    async def unload(self) -> None:
        """Unload every model, whatever one of them says."""
        await self.lifecycle.close()

    # Inside

    def _ended(self, exchange: RequestContext) -> None:
        self._count(exchange)
        for witness in self._witnesses:
            witness(exchange)

    def _count(self, exchange: RequestContext) -> None:
        """With the model that it was for, if that counts; any name a client makes up would be a series forever."""
        counts = self.registry.counting(exchange.model, exchange.version) if exchange.found else None
        if counts is not None and counts.measured is not None:
            counts.measured.count(exchange)
        elif exchange.end is not None:
            self._homeless[exchange.end] += 1

    def _writing(self, name: str) -> tuple[LoadedModel, TextModel]:
        self._refuse_when_exiting()
        serves = self.registry.serving(name)
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
