"""The adapters of a language model as it offers them: those that it loads while it serves, and the fixed ones that an
engine reads itself."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

from ...core.adapter import Adapter
from ...core.backends import OnProgress
from ...core.errors import InvalidArgument, NotFound
from ...core.metrics import Reading
from ...core.request import GenerateRequest
from ...core.request_context import RequestContext
from ...tokenization.checkpoint_files import locate_adapter
from .adapters import AdapterEngine, AdapterTable, AdapterUse
from .engine import EngineSpec
from .sequence_stats import SequenceStats
from .task_adapters import TaskAdapters


class ModelAdapters:
    """The `AdaptableModel` of the language model `name`. `engine`: what loads adapters while it serves, if its engine
    can. Raises `InvalidArgument` if `spec` wants that of an engine that cannot."""

    def __init__(self, name: str, spec: EngineSpec, engine: AdapterEngine | None) -> None:
        self._name, self._spec = name, spec
        self._table: AdapterTable | None = None
        self._modules: Mapping[str, str] = {}
        self._directories: dict[str, str] = {}
        self._fixed = {name: Adapter(name, path, "", 0, 0) for name, path in spec.adapters.items()}
        if spec.lora is None:
            return
        if engine is None:
            raise InvalidArgument("enable_lora: this engine takes no adapters", field="enable_lora")
        self._table = AdapterTable(engine, spec.lora, name)
        self._modules = spec.lora.modules
        self._tasks = TaskAdapters(self._table, spec.checkpoint, spec.lora.max_rank)

    @property
    def adapters(self) -> Mapping[str, Adapter] | None:
        return self._fixed or None if self._table is None else self._table.named

    async def load_adapter(self, name: str, path: str, replace: bool = False) -> Adapter:
        return await self._changeable.load(name, path, replace)

    async def unload_adapter(self, name: str) -> None:
        await self._changeable.unload(name)

    @property
    def _changeable(self) -> AdapterTable:
        if self._table is None:
            what = "takes no adapters while it serves: that is enable_lora of our engine"
            raise InvalidArgument(f"model '{self._name}' {what}")
        return self._table

    async def locate_first(self) -> None:
        """Find the configured adapters, directories or hub ids, which costs less than what else is loaded. Raises
        `NotFound`; the message names the adapter."""
        for name, path in self._modules.items():
            try:
                self._directories[name] = str(await asyncio.to_thread(locate_adapter, path))
            except NotFound as error:
                raise NotFound(f"lora_modules: '{name}': {error.message}", field="lora_modules") from None

    async def load_first(self, on_progress: OnProgress) -> None:
        """Load the configured adapters, which were located, one after the other."""
        for name, directory in self._directories.items():
            began = time.monotonic()
            adapter = await self._changeable.load(name, directory)
            on_progress("adapters", 1.0, time.monotonic() - began, f"{name}, rank {adapter.rank}")

    async def use(
        self, request: GenerateRequest, stats: SequenceStats, context: RequestContext
    ) -> AbstractContextManager[str]:
        """The block in which a sequence uses the adapter that its request names or brings; it gets what the engine
        calls the adapter. Raises `RequestTimeout` if the request's time is up before it is held."""
        if self._table is None:
            return nullcontext(request.adapter)
        use = self._use(self._table, request, stats, context)
        return await context.in_time(use, self._spec.timeout_of(request, context))

    async def _use(
        self, table: AdapterTable, request: GenerateRequest, stats: SequenceStats, context: RequestContext
    ) -> AdapterUse:
        if request.lora_task is None:
            return await table.use(request.adapter, stats)
        if request.adapter:
            raise InvalidArgument("give either lora_name or lora_task_id", field="lora_task_id")
        return await table.use(await self._tasks.load(request.lora_task, context.tenant), stats)

    def readings(self) -> Iterator[Reading]:
        """The model's series about adapters, for a scrape."""
        if self._table is not None:
            yield from self._table.readings()

    async def close(self) -> None:
        if self._table is not None:
            await self._table.close()
