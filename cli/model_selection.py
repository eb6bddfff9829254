"""The models that a command line asks for: those there are, those loaded at the start, and how that changes later."""

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from ..core.backends import OnProgress
from ..core.errors import InvalidArgument
from ..engine.core.prepared_core import SPARE_CORE_BYTES, keep_spare_cores
from ..engine.options import EngineOptions, declare_drafters
from ..processes.rate_limiter import RateLimiter, parse_resource_limits
from ..repository.backend_registry import absent_backend, canonical_backend, checkpoint_backends
from ..repository.builder import ModelBuilder, parse_backend_config
from ..repository.catalog import RepositoryCatalog
from ..repository.gateway import InProcessGateway
from ..repository.memory_budget import MemoryBudget
from ..repository.model_control import ModelControl
from ..repository.model_source import ModelSource, checkpoint_source, is_repository
from ..repository.object_storage.bucket_repository import open_buckets
from ..repository.object_storage.locations import is_bucket_url
from ..repository.on_demand import OnDemandLimits, OnDemandLoader
from ..repository.response_cache import parse_cache_config
from ..repository.route_control import RouteControl
from ..repository.state_directory import StateDirectory
from ..repository.watcher import LoadListener, RepositoryWatcher
from ..routing.route import Route
from .options import AdapterOptions, OnDemandOptions, RepositoryOptions

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressDisplay:
    """A `LoadListener` that writes to stdout; a phase leaves one line with the time it took. A terminal shows bars."""

    def __init__(self) -> None:
        self._bars = _make_bars() if sys.stdout.isatty() else None
        self._phases: dict[str, TaskID] = {}
        self._unheard: OSError | None = None

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Raises the `OSError` of a line that could not be written: not where it was, for those who load go on."""
        if self._bars is not None:
            self._bars.stop()
        if kind is None and self._unheard is not None:
            raise self._unheard

    def print_line(self, text: str) -> None:
        if self._unheard is not None:
            return
        try:
            if self._bars is None:
                print(text)
            else:
                self._bars.console.print(text)
            sys.stdout.flush()
        except OSError as error:
            self._unheard = error

    def on_loading(self, name: str) -> OnProgress:
        self._show(f"{name}: starting", 0)

        def on_progress(phase: str, fraction: float, seconds: float, detail: str) -> None:
            self._hide(f"{name}: starting")
            title = f"{name}: {phase}"
            self._show(title, fraction)
            if fraction >= 1:
                self._hide(title)
                self.print_line(f"{title} {_seconds(seconds)}{f'  {detail}' if detail else ''}")

        return on_progress

    def on_loaded(self, name: str, seconds: float) -> None:
        self._end(name, f"ready after {_seconds(seconds)}")

    def on_described(self, name: str) -> None:
        self._end(name, "on demand")

    def on_failed(self, name: str, reason: str) -> None:
        self._end(name, f"FAILED: {reason}")

    def _end(self, name: str, result: str) -> None:
        for title in [title for title in self._phases if title.startswith(f"{name}: ")]:
            self._hide(title)
        self.print_line(f"{name}: {result}")

    def _show(self, title: str, fraction: float) -> None:
        if self._bars is None:
            return
        if title not in self._phases:
            self._phases[title] = self._bars.add_task(title, total=1.0)
        self._bars.update(self._phases[title], completed=fraction)

    def _hide(self, title: str) -> None:
        if self._bars is not None and title in self._phases:
            self._bars.remove_task(self._phases.pop(title))


def _make_bars() -> "Progress":
    """Bars of a terminal: what they are drawn with is imported for one alone, which servers seldom have."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(highlight=False, markup=False, soft_wrap=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


log = logging.getLogger(__name__)

_ALL_MODELS = "*"
_REPOSITORY_ALTERNATIVES = {
    "served_model_name": "a model is called as its folder",
    "revision": "the parameter 'model' in config.pbtxt may be owner/name@revision",
}
"""The replacements of flags that no config.pbtxt has."""


@dataclass(frozen=True, slots=True)
class ModelSelection:
    """The models to serve, and their builder. `is_single_checkpoint`: there is one, without which nothing is served.
    `routes`: of the repositories' files, by name; `state`: where what requests make of them is kept, if they may."""

    catalog: RepositoryCatalog
    builder: ModelBuilder
    options: RepositoryOptions
    is_single_checkpoint: bool
    routes: Mapping[str, Route] = field(default_factory=dict)
    state: StateDirectory | None = None

    def create_watcher(self, gateway: InProcessGateway) -> RepositoryWatcher:
        """The watcher that keeps the gateway's models as asked for; in mode explicit, requests may change them."""
        if self.options.on_demand.load_on_demand:
            gateway.on_demand = OnDemandLoader(
                self.catalog,
                gateway.registry,
                gateway.lifecycle,
                _on_demand_limits(self.options.on_demand),
                self.keep_spare_cores,
            )
        if self.options.model_control_mode == "explicit":
            allowed = self.options.allow_uploaded_code, self.options.allow_pipelines
            gateway.model_control = ModelControl(self.catalog, gateway.registry, gateway.lifecycle, *allowed)
        gateway.route_control = routes = RouteControl(gateway.routes, gateway.lifecycle, self.catalog, self.state)
        routes.restore(self.routes)
        return RepositoryWatcher(self.catalog, gateway.registry, gateway.lifecycle, routes, gateway.on_demand)

    def keep_spare_cores(self) -> None:
        """Have engine cores wait for the models that requests will load."""
        keep_spare_cores(self.options.on_demand.spare_cores)

    async def load_startup_models(
        self, watcher: RepositoryWatcher, strict: bool, listener: LoadListener | None = None
    ) -> bool:
        """Load the models of the start; true if enough are loaded to serve: all if `strict`. The progress goes to
        `listener`, or else to the standard output, and what is wrong to the standard error."""
        names, wanted = self.catalog.model_names(), self.options.load_model
        in_memory = names if wanted == (_ALL_MODELS,) else list(dict.fromkeys(wanted))
        if self.options.on_demand.load_on_demand:
            names = list(dict.fromkeys([*names, *in_memory]))
        elif self.options.model_control_mode == "explicit":
            names = in_memory
        for place in self.catalog.empty_repositories():
            log.warning("model repository %s has no models: a model is a folder in it", place)
        for reason in self.catalog.dangling_links().values():
            log.warning("no model: %s", reason)
        unknown = self.catalog.unknown
        if unknown and listener is None:
            print(f"charonia: model repository {unknown[0]} is away, and was never read from here", file=sys.stderr)
        watcher.patient = strict or self.is_single_checkpoint
        shown: AbstractContextManager[LoadListener] = ProgressDisplay() if listener is None else nullcontext(listener)
        with shown as display:
            complete = await watcher.load_initial(names, display, in_memory)
        if unknown and self.options.model_control_mode == "none":  # nobody would look again
            return False
        if not complete and strict and listener is None and not self.is_single_checkpoint:
            print("charonia: a model failed to load; --exit-on-error=false serves the others", file=sys.stderr)
        return complete or not watcher.patient

    @asynccontextmanager
    async def polling(self, watcher: RepositoryWatcher) -> AsyncIterator[None]:
        """Follow the repository during the block, in mode poll."""
        if self.options.model_control_mode != "poll":
            yield
            return
        polling = asyncio.create_task(watcher.poll(self.options.repository_poll_secs))
        try:
            yield
        finally:
            polling.cancel()
            with suppress(asyncio.CancelledError):
                await polling


def engine_settings(engine: EngineOptions, adapters: AdapterOptions) -> dict[str, str]:
    """The settings for a checkpoint that the flags name. Raises as `parse_lora_modules`, and `InvalidArgument` for a
    directory without an adapter: it is read when the model is loaded, minutes later."""
    settings = {name: str(value) for name, value in engine.given().items()}
    if adapters.lora_modules:
        modules = parse_lora_modules(adapters.lora_modules)
        for name, path in modules.items():
            if Path(path).is_absolute() and not (Path(path) / _ADAPTER_FILE).is_file():
                lacks = f"there is no {_ADAPTER_FILE} in" if Path(path).is_dir() else "there is no directory"
                raise InvalidArgument(f"--lora-modules {name}: {lacks} '{path}'")
        settings["lora_modules"] = json.dumps(modules)
    return settings


def select_models(
    model: str | None, options: RepositoryOptions, engine: Mapping[str, str], quantiles: tuple[float, ...] = ()
) -> ModelSelection:
    """The models that the argument `model` (a checkpoint, a hub id or a repository) and the flags name.

    `engine`: settings for a checkpoint; `quantiles`: of the summaries of latencies, none for no summaries.
    Raises `InvalidArgument` if there is nothing to serve, or what is asked for contradicts itself.
    """
    declare_drafters(options.drafter, engine.get("speculative_config"))
    if options.load_model and options.model_control_mode != "explicit":
        raise InvalidArgument("Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    if _ALL_MODELS in options.load_model and options.load_model != (_ALL_MODELS,):
        raise InvalidArgument("--load-model * stands for all models and must be the only one")
    repositories = list(options.model_repository)
    single = None if model is None or is_bucket_url(model) else _single_checkpoint(model, options, engine)
    if model is not None and single is None:
        repositories.append(model)
    _check_flags(options, engine, single is not None, bool(repositories))
    urls = [place for place in repositories if is_bucket_url(place)]
    local = [Path(place) for place in repositories if not is_bucket_url(place)]
    buckets = open_buckets(urls, options.model_cache_dir, options.model_cache_bytes)
    catalog = RepositoryCatalog(local, single, options.configs.model_config_name, buckets)
    of_all = (  # as if they were said of all backends
        f"execution_timeout_secs={options.execution_timeout_secs:g}",
        f"restart_pause_secs={options.restart_pause:g}",
    )
    written_in_python = options.configs.backend_directory
    backends = parse_backend_config((*of_all, *options.configs.backend_config), written_in_python)
    cache = parse_cache_config(options.cache_config)
    promised = (lambda: 0) if cache is None else (lambda: cache.outstanding)
    spare = options.on_demand.spare_cores * SPARE_CORE_BYTES
    limit = None if options.memory_limit is None else max(0, options.memory_limit - spare)
    budget = MemoryBudget.of_machine(limit, options.gpu_memory_limit, promised)
    complete = not options.configs.disable_auto_complete_config
    limiter = _rate_limiter(options)
    builder = ModelBuilder(backends, complete, budget, quantiles, cache, written_in_python, limiter)
    is_single = single is not None and not repositories
    state = None if options.state_dir is None else StateDirectory(options.state_dir)
    return ModelSelection(catalog, builder, options, is_single, catalog.read_routes(), state)


def _on_demand_limits(options: OnDemandOptions) -> OnDemandLimits:
    return OnDemandLimits(
        options.model_idle_secs,
        options.min_resident_secs,
        options.on_demand_loads,
        options.on_demand_wait_secs,
        options.on_demand_waiting,
        options.on_demand_tenant_waiting,
    )


def _rate_limiter(options: RepositoryOptions) -> RateLimiter | None:
    limits = parse_resource_limits(options.rate_limit_resource)
    if limits and options.rate_limit == "off":
        log.warning("--rate-limit-resource has no effect without --rate-limit execution_count")
    return None if options.rate_limit == "off" else RateLimiter(limits)


_ADAPTER_FILE = "adapter_config.json"
"""What every adapter has."""


class LoraModule(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter as --lora-modules names it."""

    name: str
    path: str
    base_model_name: str | None = None


def parse_lora_modules(texts: Sequence[str]) -> dict[str, str]:
    """The directories, or hub ids, of --lora-modules by the names of the adapters. Raises `InvalidArgument` for a text
    that is neither `name=directory` nor vLLM's JSON object, and for a name that is there twice."""
    modules: dict[str, str] = {}
    for text in texts:
        try:
            module = msgspec.json.decode(text, type=LoraModule) if text[:1] == "{" else LoraModule(*text.split("=", 1))
        except (TypeError, msgspec.MsgspecError):
            message = """--lora-modules must be NAME=DIRECTORY or {"name": ..., "path": ...}, got """
            raise InvalidArgument(f"{message}'{text}'") from None
        if not module.name or not module.path:
            raise InvalidArgument(f"--lora-modules '{text}' needs a name and a directory")
        if module.name in modules:
            raise InvalidArgument(f"--lora-modules: the name '{module.name}' is there twice")
        if module.base_model_name:
            log.warning("--lora-modules: base_model_name of '%s' has no effect: there is one model", module.name)
        path = Path(module.path).expanduser()
        # What is no directory and does not look like one may be a hub id.
        local = path.exists() or module.path.startswith((".", "/", "~"))
        modules[module.name] = os.path.abspath(path) if local else module.path
    return modules


def _single_checkpoint(model: str, options: RepositoryOptions, engine: Mapping[str, str]) -> ModelSource | None:
    """The checkpoint that the argument names; None for a repository."""
    try:
        if Path(model).is_dir() and is_repository(Path(model)):
            return None
        if options.backend and canonical_backend(options.backend) not in (known := [*checkpoint_backends()]):
            *others, last = known
            package = absent_backend(options.backend)
            absent = f"; it is one of {package}, which this installation lacks" if package else ""
            message = f"--backend {options.backend} serves no checkpoint; {', '.join(others)} and {last} do{absent}"
            raise InvalidArgument(message)
        if options.revision and Path(model).exists():
            raise InvalidArgument(f"--revision is for a model of the hub: '{model}' is here")
        hub_id, colon, kind = model.partition(":")
        wanted = f"{hub_id}@{options.revision}{colon}{kind}" if options.revision else model
        source = checkpoint_source(wanted, _served_names(options.served_model_name), engine, options.backend)
        if taken := {source.name, *source.aliases} & json.loads(engine.get("lora_modules", "{}")).keys():
            raise InvalidArgument(f"--lora-modules: the name '{min(taken)}' is the model's: an adapter needs another")
        return source
    except OSError as error:
        raise InvalidArgument(f"cannot read '{model}': {error.strerror}") from None


def _served_names(texts: Sequence[str]) -> tuple[str, ...]:
    """The names of `--served-model-name`, each once. Raises `InvalidArgument` for an empty one."""
    names = [name.strip() for text in texts for name in text.split(",")]
    if not all(names):
        raise InvalidArgument(f"--served-model-name: an empty name in '{' '.join(texts)}'")
    return tuple(dict.fromkeys(names))


def _check_flags(options: RepositoryOptions, engine: Mapping[str, str], single: bool, repositories: bool) -> None:
    """Raises `InvalidArgument` for flags that do not go with a `single` checkpoint, or with `repositories`."""
    if not single and not repositories:
        before = ", before --served-model-name, which takes what follows it" if options.served_model_name else ""
        raise InvalidArgument(f"nothing to serve: name a checkpoint{before}, or give --model-repository")
    if not repositories and options.model_control_mode != "none":
        flag = f"--model-control-mode {options.model_control_mode}"
        raise InvalidArgument(
            f"{flag} is for a model repository; a single checkpoint is served as long as the server runs"
        )
    flags = [*engine, *(name for name in ("served_model_name", "backend", "revision") if getattr(options, name))]
    on_demand = options.on_demand
    if on_demand.load_on_demand and not repositories:
        raise InvalidArgument("--load-on-demand is for a model repository; a single checkpoint stays in memory")
    if on_demand != OnDemandOptions() and not on_demand.load_on_demand:
        raise InvalidArgument("how models are loaded on demand is said, and not --load-on-demand")
    if not single and flags:
        flag = f"--{flags[0].replace('_', '-')}"
        instead = _REPOSITORY_ALTERNATIVES.get(flags[0], "set it in config.pbtxt")
        raise InvalidArgument(f"{flag} is for a single checkpoint; in a repository, {instead}")
