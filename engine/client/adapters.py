"""The adapters of one model: their names, the requests that use them, and those that the engine holds.

The engine knows adapters by their content alone, and holds as many as fit into `LoraConfig.max_bytes`. The least
recently named ones make room, and are read again when a request names them.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from ...core.adapter import Adapter
from ...core.errors import InvalidArgument, NotFound, NotReady, Unavailable
from ...core.metrics import Reading
from ...core.request import GenerateRequest
from ...core.request_context import RequestContext
from ...processes.scratch import ScratchDirectory
from ..config import LoraConfig
from .sequence_stats import SequenceStats

log = logging.getLogger(__name__)

T = TypeVar("T")

_WEIGHTS = "adapter_model.safetensors"
_ROOM_SECONDS = 60.0
"""How long an adapter that does not fit waits for requests with others to end."""


class TaskKey(NamedTuple):
    """The name of an adapter that a client sent, by the client's own number. It is forgotten with the adapter."""

    tenant: str
    number: int


AdapterKey: TypeAlias = str | TaskKey


class AdapterEngine(Protocol):
    """An engine that computes with adapters, and keeps them when a core is lost."""

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Return when every core computes with the adapter; at once if it is held. Raises `InvalidArgument` for wrong
        files."""

    async def unload_adapter(self, digest: str) -> None: ...


class HeldAdapter:
    """An adapter that the engine holds."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.scratch: ScratchDirectory | None = None
        """Its directory, if that is to be closed with it."""
        self.users = 0
        """Requests that are computed with it."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()


class AdapterUse:
    """The use of an adapter by one sequence. Its block gets the digest, and the adapter stays until the block ends."""

    def __init__(self, key: AdapterKey, stats: SequenceStats, leave: Callable[["AdapterUse"], None]) -> None:
        self.key = key
        self.stats = stats
        self.held: HeldAdapter | None = None
        self._leave = leave

    def __enter__(self) -> str:
        assert self.held is not None
        return self.held.adapter.digest

    def __exit__(self, *_: object) -> None:
        self._leave(self)


class AdapterTable:
    """The adapters of a model, in one event loop. All changes of what the engine holds happen one after the other."""

    def __init__(self, engine: AdapterEngine, limits: LoraConfig, model: str) -> None:
        self._engine = engine
        self._limits = limits
        self._model = model
        self._named: dict[AdapterKey, Adapter] = {}
        self._shown: dict[str, Adapter] = {}
        """The adapters of `_named` that no client sent: each request for one looks it up."""
        self._held: dict[str, HeldAdapter] = {}
        """By digest, the most recently named at the end."""
        self._leaving: dict[str, HeldAdapter] = {}
        """Adapters that take no more requests and are to be unloaded when those that they have end."""
        self._uses: set[AdapterUse] = set()
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sequences: Counter[AdapterKey] = Counter()
        self._loads = self._evictions = 0
        self._last_labels: dict[str, str] = {}
        self._labels_since = 0.0
        """When a scrape first saw other adapters in use than the one before, in seconds since the epoch."""

    @property
    def named(self) -> Mapping[str, Adapter]:
        """All adapters that requests may name, held or not, but those that clients sent."""
        return MappingProxyType(self._shown)

    def has(self, key: AdapterKey) -> bool:
        return key in self._named

    def find(self, key: AdapterKey) -> Adapter:
        """Raises `NotFound`."""
        if key in self._named:
            return self._named[key]
        if isinstance(key, str):
            raise NotFound(f"Request for unknown model: adapter '{key}' is not found", field="lora_name")
        message = f"LoRA task {key.number} not found in cache. Please send LoRA weights with request"
        raise NotFound(message, field="lora_task_id")

    async def load(
        self, key: AdapterKey, path: str, replace: bool = False, scratch: ScratchDirectory | None = None
    ) -> Adapter:
        """Let the engine hold the adapter in a directory, and name it. `scratch`: that directory, which is closed when
        nothing needs it. Raises as `AdaptableModel.load_adapter`."""
        return await asyncio.shield(self._start(self._load(key, path, replace, scratch)))

    async def unload(self, name: str) -> None:
        """Take the name away. Sequences that use the adapter go on to their ends."""
        self.find(name)
        adapter = self._named.pop(name)
        del self._shown[name], self._sequences[name]
        log.info("model '%s': adapter '%s' is unloaded", self._model, name)
        self._drop_nameless(adapter.digest)

    async def use(self, key: AdapterKey, stats: SequenceStats) -> AdapterUse:
        """The use of an adapter by a sequence, after it was read if it is not held. The caller must leave its block.

        Raises:
            NotFound: no adapter has that name.
            Unavailable: its files have changed.
        """
        held = self._held.get(self.find(key).digest)
        use = AdapterUse(key, stats, self._leave)
        self._uses.add(use)
        if held is not None:
            self._enter(use, held)
            return use
        bringing = self._start(self._bring_back(use))
        try:
            return await asyncio.shield(bringing)
        except BaseException:
            # Whoever waits may leave before the adapter is there.
            bringing.add_done_callback(lambda _: self._leave(use))
            raise

    async def close(self) -> None:
        """Cancel what is being loaded, and close all directories: the engine ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for held in (*self._held.values(), *self._leaving.values()):
            if held.scratch is not None:
                held.scratch.close()

    def readings(self) -> Iterator[Reading]:
        """The model's series about adapters, for a scrape."""
        yield Reading("charonia_adapters", len(self.named))
        yield Reading("charonia_adapters_held", len(self._held))
        yield Reading("charonia_adapters_held_bytes", self._held_bytes)
        yield Reading("charonia_adapter_loads_total", self._loads)
        yield Reading("charonia_adapter_evictions_total", self._evictions)
        for name in self.named:
            yield Reading("charonia_adapter_sequences_total", self._sequences[name], {"adapter": name})
        named = [use for use in self._uses if isinstance(use.key, str)]
        begun = {str(use.key) for use in named if use.stats.begun is not None}
        waiting = {str(use.key) for use in named if use.stats.begun is None}
        labels = {
            "max_lora": str(self._limits.max_loras),
            "running_lora_adapters": ",".join(sorted(begun)),
            "waiting_lora_adapters": ",".join(sorted(waiting)),
        }
        if labels != self._last_labels:
            self._last_labels, self._labels_since = labels, time.time()
        yield Reading("vllm:lora_requests_info", self._labels_since, labels)

    def _start(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that goes on when its reader leaves."""
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_retrieve)
        return task

    async def _load(self, key: AdapterKey, path: str, replace: bool, scratch: ScratchDirectory | None) -> Adapter:
        async with self._changing:
            if key in self._named and not replace:
                message = f"The lora adapter '{key}' has already been loaded. If you want to load the adapter in place"
                raise InvalidArgument(f"{message}, set 'load_inplace' to True.", field="lora_name")
            stored = await asyncio.to_thread(_stored_bytes, path)
            adapter = await self._hold(key, path, min(stored, self._limits.max_bytes), "loaded")
            held = self._held[adapter.digest]
            former = self._named.get(key)
            self._named[key] = adapter
            if isinstance(key, str):
                self._shown[key] = adapter
            if scratch is not None and held.adapter is adapter:
                held.scratch = scratch
            elif scratch is not None:
                scratch.close()
            if former is not None:
                self._drop_nameless(former.digest)
        return adapter

    async def _bring_back(self, use: AdapterUse) -> AdapterUse:
        async with self._changing:
            known = self.find(use.key)
            if known.digest not in self._held:
                await self._read_again(use.key, known)
            self._enter(use, self._held[known.digest])
        return use

    async def _read_again(self, key: AdapterKey, known: Adapter) -> None:
        try:
            adapter = await self._hold(key, known.path, known.bytes, "read again")
        except (InvalidArgument, NotFound) as error:
            raise Unavailable(f"adapter '{known.name}' cannot be read again: {error.message}") from error
        self._drop_nameless(adapter.digest)
        self.find(key)  # it may have been unloaded meanwhile
        if adapter.digest != known.digest:
            raise Unavailable(f"the files of adapter '{known.name}' are not those that were loaded: load it again")

    async def _hold(self, key: AdapterKey, path: str, size: int, done: str) -> Adapter:
        """Let the engine hold the adapter in a directory, which takes about `size` bytes."""
        await self._make_room(size)
        began = time.monotonic()
        name = key if isinstance(key, str) else f"task {key.number} of tenant '{key.tenant}'"
        adapter = await self._engine.load_adapter(name, path)
        self._loads += 1
        text = "model '%s': adapter '%s' is %s in %.2f s: rank %d, %d bytes, digest %s, of %s"
        took = time.monotonic() - began
        log.info(text, self._model, name, done, took, adapter.rank, adapter.bytes, adapter.digest, path)
        digest = adapter.digest
        self._held[digest] = self._held.get(digest) or self._leaving.pop(digest, None) or HeldAdapter(adapter)
        await self._make_room(0, spared=digest)
        return adapter

    async def _make_room(self, size: int, spared: str = "") -> None:
        """Unload the least recently named adapters until `size` bytes are free. One that is in use takes no more
        requests meanwhile, or it might be in use for ever.

        Raises:
            NotReady: those in use stay in use.
        """
        try:
            async with asyncio.timeout(_ROOM_SECONDS):
                while self._held_bytes + size > self._limits.max_bytes and {*self._held, *self._leaving} != {spared}:
                    if not self._leaving:
                        unused = [digest for digest, held in self._held.items() if not held.users]
                        self._retire(next(digest for digest in (*unused, *self._held) if digest != spared))
                        self._evictions += 1
                    leaving = min(self._leaving.values(), key=lambda held: held.users)
                    await leaving.idle.wait()
                    await self._forget(leaving)
        except TimeoutError:
            for digest in [digest for digest in self._leaving if self._has_name(digest)]:
                self._held[digest] = self._leaving.pop(digest)
            raise NotReady(f"there is no room for another adapter in {self._limits.max_bytes} bytes") from None

    @property
    def _held_bytes(self) -> int:
        return sum(held.adapter.bytes for held in (*self._held.values(), *self._leaving.values()))

    def _retire(self, digest: str) -> None:
        self._leaving[digest] = self._held.pop(digest)

    async def _forget(self, held: HeldAdapter) -> None:
        digest = held.adapter.digest
        del self._leaving[digest]
        log.info("model '%s': adapter '%s' is let go from memory", self._model, held.adapter.name)
        for key, adapter in [*self._named.items()]:
            if isinstance(key, TaskKey) and adapter.digest == digest:
                del self._named[key], self._sequences[key]
        await self._engine.unload_adapter(digest)
        if held.scratch is not None:
            held.scratch.close()

    def _drop_nameless(self, digest: str) -> None:
        """Unload an adapter that has no name any more."""
        if digest in self._held and not self._has_name(digest):
            self._retire(digest)
            self._start(self._forget_unused())

    def _has_name(self, digest: str) -> bool:
        return any(adapter.digest == digest for adapter in self._named.values())

    async def _forget_unused(self) -> None:
        async with self._changing:
            for held in [held for held in self._leaving.values() if not held.users]:
                await self._forget(held)

    def _enter(self, use: AdapterUse, held: HeldAdapter) -> None:
        held.users += 1
        held.idle.clear()
        use.held = held
        self._held[held.adapter.digest] = self._held.pop(held.adapter.digest)
        self._sequences[use.key] += 1

    def _leave(self, use: AdapterUse) -> None:
        self._uses.discard(use)
        held, use.held = use.held, None
        if held is None:
            return
        held.users -= 1
        if not held.users:
            held.idle.set()
            if held.adapter.digest in self._leaving:
                self._start(self._forget_unused())


def _stored_bytes(path: str) -> int:
    """The size of an adapter's file of weights; 0 where there is none, which reading it will report."""
    file = Path(path) / _WEIGHTS
    return file.stat().st_size if file.is_file() else 0


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a task without a reader, or asyncio logs it."""
    if not task.cancelled():
        task.exception()


def with_adapter(request: GenerateRequest, context: RequestContext) -> GenerateRequest:
    """The request with the adapter by whose name its model was acquired, if there is one. Raises `InvalidArgument` if
    the request names another."""
    adapter = context.adapter
    if not adapter or request.adapter == adapter:
        context.adapter = request.adapter
        return request
    if request.adapter:
        message = f"lora_name: '{request.adapter}' is not for the adapter '{adapter}': ask for the model itself"
        raise InvalidArgument(message, field="lora_name")
    return msgspec.structs.replace(request, adapter=adapter)
