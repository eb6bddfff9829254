"""The hub: the gateway in process. Knows which models are loaded, and hands each request to its model.

Knows nothing of protocols, and of models only the contract.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager
from typing import Generic, TypeVar, cast

from ..core.commons import Commons
from ..core.errors import CharoniaError, InvalidArgument, NotFound, Unavailable
from ..core.exchange import Exchange, Headers, current, serving
from ..core.gateway import NO_FILES, IndexEntry, Stream
from ..core.metrics import End, Measurement, ended_readings
from ..core.model import Model, ModelConfig, ModelStats, TextModel
from ..core.records import write_record
from ..core.request import GenerateChunk, GenerateRequest, InferRequest, InferResponse, TokenizeRequest
from ..core.statistics import ModelStatistics
from .entry import Entry
from .validation import check

log = logging.getLogger(__name__)

T = TypeVar("T")

_NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"


class Hub:
    """Registry and dispatch. With `strict`, the server is ready only when every known model is; and nothing is ready
    while the process that answers is not `healthy`. Each of `witnesses` is shown every exchange when it ended."""

    def __init__(
        self,
        strict: bool = True,
        healthy: Callable[[], bool] = lambda: True,
        witnesses: Sequence[Callable[[Exchange], None]] = (write_record,),
        commons: Commons | None = None,
    ) -> None:
        self.commons = commons or Commons()
        self._strict = strict
        self._healthy = healthy
        self._witnesses = witnesses
        self._homeless: Counter[End] = Counter()
        self._entries: dict[str, Entry] = {}
        self._exiting = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # What doors ask

    def ready(self) -> bool:
        if self._exiting or not self._healthy():
            return False
        return not self._strict or all(entry.ready for entry in self._entries.values())

    def exiting(self) -> bool:
        return self._exiting

    def models(self) -> list[ModelConfig]:
        return [entry.model.config for entry in self._entries.values() if entry.model is not None]

    def model(self, name: str, version: str = "") -> ModelConfig:
        return self._loaded(name, version)[0].config

    def model_ready(self, name: str, version: str = "") -> bool:
        entry = self._known(name, version)
        return not self._exiting and self._healthy() and entry.ready

    def stats(self, name: str, version: str = "") -> ModelStats:
        return self._loaded(name, version)[0].stats()

    def versions(self, name: str) -> tuple[str, ...]:
        return (self._loaded(name, "")[0].config.version,)

    def statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        return [
            ModelStatistics(entry.name, entry.version, entry.model.statistics())
            for entry in self._entries.values()
            if entry.model is not None and name in ("", entry.name)
        ]

    def index(self, ready_only: bool = False) -> list[IndexEntry]:
        return [entry.shown() for entry in self._entries.values() if not ready_only or entry.ready]

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] = NO_FILES) -> None:
        raise Unavailable(_NOT_EXPLICIT)

    async def unload_model(self, name: str, dependents: bool = False) -> None:
        raise Unavailable(_NOT_EXPLICIT)

    @contextmanager
    def open(self, door: str, headers: Headers = ()) -> Iterator[Exchange]:
        exchange = Exchange(door, headers)
        try:
            with serving(exchange):
                yield exchange
        finally:
            self._count(exchange)
            for witness in self._witnesses:
                witness(exchange)

    def infer(self, name: str, version: str, request: InferRequest) -> Stream[InferResponse]:
        _name(request.id)
        self._refuse_when_exiting()
        model, text = self._loaded(name, version)
        check(model.config, request)
        responses = Running(model.infer(request), self._one_more())
        return _finished(responses) if text is None else responses

    def generate(self, name: str, request: GenerateRequest) -> Stream[GenerateChunk]:
        _name(request.id)
        return Running(self._writing(name).generate(request), self._one_more())

    async def tokenize(self, name: str, request: TokenizeRequest) -> list[int]:
        tokens = await self._writing(name).tokenize(request)
        _finish()
        return tokens

    async def detokenize(self, name: str, ids: list[int]) -> str:
        text = await self._writing(name).detokenize(ids)
        _finish()
        return text

    # What the composition root does

    async def load(self, name: str, version: str, build: Callable[[], Model]) -> CharoniaError | Exception | None:
        """Build and load one model; what goes wrong is this model's trouble alone, and is returned."""
        if name in self._entries:
            return self.refuse(InvalidArgument(f"model '{name}' appears in two places; the first is served"), name)
        entry = self._entries[name] = Entry(name, version)
        try:
            started = time.monotonic()
            model = build()
            await model.load()
        except Exception as error:
            entry.fail(str(error))
            if not isinstance(error, CharoniaError):
                log.exception("model '%s' failed to load", name)
            return error
        entry.load_seconds = time.monotonic() - started
        entry.publish(model)
        return None

    def refuse(self, error: CharoniaError, name: str) -> CharoniaError:
        """Note a model that cannot even be read."""
        self._entries.setdefault(name, Entry(name)).fail(error.message)
        return error

    def measure(self) -> Iterator[Measurement]:
        """What there is to know of each model at a scrape, and of requests that were for none."""
        yield Measurement({}, tuple(ended_readings(self._homeless)))
        for entry in self._entries.values():
            yield Measurement({"model": entry.name, "version": entry.version}, tuple(entry.readings()))

    def exit(self) -> None:
        """Refuse what is new from here on."""
        self._exiting = True

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return self._running

    async def drained(self) -> None:
        """Return when no request runs."""
        await self._idle.wait()

    async def unload(self) -> None:
        """Unload every model, whatever one of them says."""
        entries = [entry for entry in self._entries.values() if entry.model is not None]
        models = [entry.model for entry in entries if entry.model is not None]
        for entry in entries:
            entry.publish(None)
        for result in await asyncio.gather(*(model.unload() for model in models), return_exceptions=True):
            if isinstance(result, BaseException):
                log.error("a model did not unload", exc_info=result)

    # Inside

    def _count(self, exchange: Exchange) -> None:
        """With the model that it was for, if that counts; any name a client makes up would be a series forever."""
        entry = self._entries.get(exchange.model) if exchange.found else None
        if entry is not None and entry.measured is not None:
            entry.measured.count(exchange)
        elif exchange.end is not None:
            self._homeless[exchange.end] += 1

    def _known(self, name: str, version: str) -> Entry:
        entry = self._entries.get(name)
        exchange = current()
        if exchange is not None:
            exchange.model, exchange.version, exchange.found = name, version, entry is not None
        if entry is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if version and version != entry.version:
            raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")
        if exchange is not None:
            exchange.version = entry.version
        return entry

    def _loaded(self, name: str, version: str) -> tuple[Model, TextModel | None]:
        entry = self._known(name, version)
        if entry.model is not None:
            return entry.model, entry.text
        if version:
            raise Unavailable(f"Request for unknown model: '{name}' version {version} is not at ready state")
        raise NotFound(f"Request for unknown model: '{name}' has no available versions")

    def _writing(self, name: str) -> TextModel:
        self._refuse_when_exiting()
        _, text = self._loaded(name, "")
        if text is None:
            raise InvalidArgument(f"model '{name}' does not generate text", field="model")
        return text

    def _refuse_when_exiting(self) -> None:
        if self._exiting:
            raise Unavailable("Server exiting")

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()


class Running(Generic[T]):
    """A model's stream inside a `block`, entered with the first item and left when the stream is closed.

    A generator would do, were it not resumed once more for each token of each stream.
    """

    def __init__(self, stream: AsyncIterator[T], block: AbstractContextManager[None]) -> None:
        # Models promise an AsyncIterator and write generators; only those can be closed.
        self._stream = cast(Stream[T], stream)
        self._block = block
        self._entered = ExitStack()
        self._next: Callable[[], Awaitable[T]] = self._first

    def __aiter__(self) -> "Running[T]":
        return self

    def __anext__(self) -> Awaitable[T]:
        return self._next()

    def _first(self) -> Awaitable[T]:
        self._entered.enter_context(self._block)
        self._next = self._stream.__anext__
        return self._next()

    async def aclose(self) -> None:
        with self._entered:
            await self._stream.aclose()


async def _finished(stream: Stream[T]) -> AsyncGenerator[T, None]:
    """A stream of a model that keeps no account of its own: its end is the request's."""
    async with aclosing(stream):
        async for item in stream:
            yield item
    _finish()


def _name(request_id: str) -> None:
    exchange = current()
    if exchange is not None:
        exchange.id = request_id


def _finish() -> None:
    """The current request is answered; if a text was generated for it, that says how."""
    exchange = current()
    if exchange is not None:
        exchange.finish()
