"""A server of models within a program, in the shape of Triton's in-process API: no ports, and no other process than the
models' own.

See https://github.com/triton-inference-server/tutorials/tree/main/Triton_Inference_Server_Python_API.
"""

import asyncio
import json
import os
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from .. import __version__
from ..api.metadata import ServerInfo, model_metadata, model_stats_json, server_metadata
from ..cli.extensions import observer_extensions
from ..cli.model_host import ModelHost, machine_metric_sources
from ..cli.model_selection import ModelSelection, engine_settings, select_models
from ..cli.options import ServeOptions, is_true
from ..core.backends import OnProgress, ignore_progress
from ..core.errors import InvalidArgument, Unavailable
from ..core.gateway import RepositoryIndexEntry
from ..processes import gc_tuning
from ..repository.gateway import InProcessGateway
from ..repository.watcher import LoadLogger
from ..telemetry.metric_families import MetricsConfig, parse_metrics_config
from ..telemetry.request_log import log_request
from ..telemetry.shared_state import SharedState
from .loop_thread import LoopThread
from .options import in_words_of_programs, read_options
from .requests import AsyncResponseIterator, InferenceRequest, RequestDoor, ResponseIterator

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

T = TypeVar("T")

_FILE = "file:"
_CONFIG = "config"


class Server:
    """The models of repositories, or of one checkpoint, between `start` and `stop`, a block, or an `async with` block.

    It takes the arguments of `charonia serve` but those of ports, processes and logs. Any thread may call its methods;
    those that wait have an `async_` form. It ends with the last reference to it. Errors are `CharoniaError`s.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """`model`: a checkpoint, a hub id or a repository, as `charonia serve` takes it. Raises `InvalidArgument`."""
        self._model = None if model is None else os.fspath(model)
        with self._error_words():
            self.options = read_options(options, self._model)
            """What the arguments said."""
        self._running: _RunningServer | None = None
        self._end: weakref.finalize[..., Server] | None = None

    @staticmethod
    def _error_words() -> AbstractContextManager[None]:
        """What puts errors about options into words: those of programs, unless a command has flags."""
        return in_words_of_programs()

    def start(self) -> Self:
        """Load the models, and return when they are ready.

        Raises:
            InvalidArgument: it runs, there is nothing to serve, or what is asked for contradicts itself.
            Unavailable: a model failed to load; nothing is left running.
        """
        running = self._begin()
        try:
            running.thread.run(running.open)
        except BaseException:
            self.stop()
            raise
        return self

    async def async_start(self) -> Self:
        """As `start`."""
        running = self._begin()
        try:
            await running.thread.run_from_loop(running.open)
        except BaseException:
            self.stop()
            raise
        return self

    def _begin(self) -> "_RunningServer":
        if self._running is not None:
            raise InvalidArgument("the server is started already")
        with self._error_words():
            self._running = running = _RunningServer(self._model, self.options)
        self._end = weakref.finalize(self, running.thread.stop, False)
        self._end.atexit = False
        running.thread.start(running.close)
        return running

    def stop(self) -> None:
        """End running requests with `ServerExiting`, unload all models and end their processes. May be called again."""
        running, self._running = self._running, None
        if running is not None:
            running.thread.stop()
        if self._end is not None:
            self._end.detach()

    async def async_stop(self) -> None:
        """As `stop`."""
        await asyncio.to_thread(self.stop)

    def __enter__(self) -> Self:
        return self if self._running is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return self if self._running is not None else await self.async_start()

    async def __aexit__(self, *_: object) -> None:
        await self.async_stop()

    def live(self) -> bool:
        """Whether it runs."""
        return self._running is not None and self._running.thread.running

    def ready(self) -> bool:
        """Whether it runs, and every model that it is to have is ready."""
        return self.live() and self.look(InProcessGateway.ready)

    def metadata(self) -> dict[str, Any]:
        """The server's name, version and extensions, as v2 has them."""
        return server_metadata(ServerInfo(self.options.server.id, __version__))

    def metrics(self) -> str:
        """What is measured, in Prometheus's text format."""
        return self.running.thread.run(self.running.metrics)

    def model(self, name: str, version: str | int = "") -> "Model":
        """The model of that name, of its latest version if none is given. Whether there is one its methods find out."""
        return Model(self, name, str(version) if version not in (-1, None) else "")

    def models(self, exclude_not_ready: bool = False) -> dict[str, "Model"]:
        """All known models by name, each in its latest version."""
        index = self._run(lambda gateway: gateway.repository_index(exclude_not_ready))
        return {entry.name: _described(self, entry) for entry in index}  # the latest version comes last

    def load(self, name: str, parameters: Mapping[str, Any] | None = None) -> "Model":
        """Load a model, in mode explicit. `parameters`: as Triton has them, a `config` (JSON, or a dict) and files as
        `file:1/model.onnx`. Raises `Unavailable` in other modes, and `CharoniaError` as the load does."""
        self._run(partial(_load, name, parameters or {}))
        return self.model(name)

    async def async_load(self, name: str, parameters: Mapping[str, Any] | None = None) -> "Model":
        """As `load`."""
        await self._run_from_loop(partial(_load, name, parameters or {}))
        return self.model(name)

    def unload(self, model: "str | Model", unload_dependents: bool = False) -> None:
        """Serve a model no longer, in mode explicit; the requests that it has are answered. Raises as `load`."""
        self._run(lambda gateway: gateway.unload_model(_name(model), unload_dependents))

    async def async_unload(self, model: "str | Model", unload_dependents: bool = False) -> None:
        """As `unload`."""
        await self._run_from_loop(lambda gateway: gateway.unload_model(_name(model), unload_dependents))

    @property
    def running(self) -> "_RunningServer":
        """What it is between `start` and `stop`. Raises `Unavailable` at other times."""
        if self._running is None:
            raise Unavailable("the server is not started" if self._end is None else "the server was stopped")
        return self._running

    def look(self, ask: Callable[[InProcessGateway], T]) -> T:
        """What the gateway says of itself at once."""
        answer = self.running.thread.call_between_turns(True, lambda: (ask(self.running.gateway),))
        assert answer is not None
        return answer[0]

    def _run(self, ask: Callable[[InProcessGateway], Coroutine[Any, Any, T]]) -> T:
        running = self.running
        return running.thread.run(lambda: ask(running.gateway))

    def _run_from_loop(self, ask: Callable[[InProcessGateway], Coroutine[Any, Any, T]]) -> Awaitable[T]:
        running = self.running
        return running.thread.run_from_loop(lambda: ask(running.gateway))


async def _load(name: str, parameters: Mapping[str, Any], gateway: InProcessGateway) -> None:
    files: dict[str, bytes] = {}
    config = None
    for key, value in parameters.items():
        if key.startswith(_FILE) and isinstance(value, bytes | bytearray | memoryview):
            files[key.removeprefix(_FILE)] = bytes(value)
        elif key == _CONFIG and isinstance(value, str | Mapping):
            config = value if isinstance(value, str) else json.dumps(value)
        else:
            raise InvalidArgument(f"load takes '{_CONFIG}', and bytes as '{_FILE}<path>', got '{key}'", field=key)
    await gateway.load_model(name, config, files)


def _name(model: "str | Model") -> str:
    return model if isinstance(model, str) else model.name


def _described(server: Server, entry: RepositoryIndexEntry) -> "Model":
    return Model(server, entry.name, entry.version, "" if entry.state is None else entry.state.value, entry.reason)


class Model:
    """A model of a server, by name. `state` and `reason`: as `Server.models` found them."""

    __slots__ = ("__weakref__", "_server", "name", "reason", "state", "version")

    def __init__(self, server: Server, name: str, version: str = "", state: str = "", reason: str = "") -> None:
        self._server = server
        self.name, self.version = name, version
        self.state, self.reason = state, reason

    def create_request(self, **fields: Any) -> InferenceRequest:
        """A request to it, with the fields of `InferenceRequest`."""
        try:
            return InferenceRequest(self, **fields)
        except TypeError as error:
            raise InvalidArgument(f"a request has no such field: {error}") from None

    def infer(
        self, inference_request: InferenceRequest | None = None, raise_on_error: bool = True, **fields: Any
    ) -> ResponseIterator:
        """Its responses to a request, which is given or has the fields of one. Errors are raised here or by the
        iterator; without `raise_on_error`, one of the model is a response."""
        request = inference_request or self.create_request(**fields)
        return ResponseIterator(request, raise_on_error, *self._server.running.door.ask(request, wait=True))

    def async_infer(
        self, inference_request: InferenceRequest | None = None, raise_on_error: bool = True, **fields: Any
    ) -> AsyncResponseIterator:
        """As `infer`, for a task of any event loop."""
        request = inference_request or self.create_request(**fields)
        return AsyncResponseIterator(request, raise_on_error, *self._server.running.door.ask(request, wait=False))

    def ready(self) -> bool:
        """Whether it can be asked."""
        return self._server.live() and self._server.look(
            lambda gateway: gateway.is_model_ready(self.name, self.version)
        )

    def metadata(self) -> dict[str, Any]:
        """Its tensors and versions, as v2 has them. Raises `NotFound`, and `Unavailable` if it is not served."""
        return self._server.look(lambda gateway: model_metadata(gateway, self.name, self.version))

    def config(self) -> dict[str, Any]:
        """Its completed config, as JSON has it. Raises as `metadata`."""
        return self._server.look(lambda gateway: dict(gateway.model_config(self.name, self.version).raw))

    def statistics(self) -> dict[str, Any]:
        """Its counters, as v2 has them. Raises `InvalidArgument` if it is not served."""
        counted = self._server.look(lambda gateway: gateway.model_statistics(self.name, self.version))
        return {"model_stats": [model_stats_json(version) for version in counted]}

    def __repr__(self) -> str:
        return f"Model(name={self.name!r}, version={self.version!r}, state={self.state!r})"


class _LoadRecord(LoadLogger):
    """A `LoadListener` that remembers why models failed to load."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}

    def on_loading(self, name: str) -> OnProgress:
        return ignore_progress

    def on_failed(self, name: str, reason: str) -> None:
        super().on_failed(name, reason)
        self.failures[name] = reason


class _RunningServer:
    """A server's models in its thread. It does not know the `Server`, whose end is its own."""

    def __init__(self, model: str | None, options: ServeOptions) -> None:
        self.thread = LoopThread("charonia")
        self._options = options
        self._measured: MetricsConfig = parse_metrics_config(options.server.metrics_config)
        self._selection = _select(model, options, self._measured)
        self._host: ModelHost | None = None
        self._door: RequestDoor | None = None
        self._registry: CollectorRegistry | None = None
        self._polling = AsyncExitStack()

    @property
    def gateway(self) -> InProcessGateway:
        if self._host is None:
            raise Unavailable("the server starts")
        return self._host.gateway

    @property
    def door(self) -> RequestDoor:
        """Where requests to models of tensors go in."""
        if self._door is None:
            raise Unavailable("the server starts")
        return self._door

    async def open(self) -> None:
        """Load the models of the start. Raises `Unavailable` if there is not enough to serve."""
        server = self._options.server
        gc_tuning.leave_to_program()
        strict, shared = is_true(server.strict_readiness), SharedState()
        host = ModelHost(self._selection, shared, observer_extensions(), strict, lambda: True, (log_request,))
        self._host = host
        record = _LoadRecord()
        if not await self._selection.load_startup_models(host.watcher, is_true(server.exit_on_error), record):
            self._refuse(record)
        self._selection.keep_spare_cores()
        await self._polling.enter_async_context(self._selection.polling(host.watcher))
        self._door = RequestDoor(self.thread, host.gateway)

    def _refuse(self, record: _LoadRecord) -> NoReturn:
        reasons = [f"model '{name}' failed to load: {reason}" for name, reason in record.failures.items()]
        away = [f"model repository {place} is away" for place in self._selection.catalog.unknown]
        raise Unavailable("; ".join((*reasons, *away)) or "no model could be loaded")

    async def close(self) -> None:
        """Unload everything; called by the thread at its end."""
        await self._polling.aclose()
        if self._host is not None:
            await self._host.close()
        else:
            self._selection.catalog.close()

    async def metrics(self) -> str:
        from ..api.prometheus import build_registry, render_exposition

        if self._registry is None:
            assert self._host is not None
            server = self._options.server
            sources = *self._host.sources, *machine_metric_sources(server)
            vllm, custom = server.metrics_names == "vllm", self._host.gateway.shared_state.metrics
            families = [family for observer in observer_extensions() for family in observer.metrics]
            self._registry = build_registry(sources, vllm, self._measured.hidden, custom, families)
        return render_exposition(self._registry.collect()).decode()


def _select(model: str | None, options: ServeOptions, measured: MetricsConfig) -> ModelSelection:
    """The models to serve. Whoever calls the server is its program: it may load what code it likes."""
    if options.repository.download_dir is not None:  # read by the hub's library, here and in child processes
        os.environ["HF_HUB_CACHE"] = str(options.repository.download_dir)
    repository = replace(options.repository, allow_uploaded_code=True, allow_pipelines=True)
    settings = engine_settings(options.engine, options.adapters)
    return select_models(model, repository, settings, measured.quantiles if measured.summaries else ())
