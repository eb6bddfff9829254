"""The adapters of one engine core, as the server's process knows them."""

import asyncio
import logging
from collections.abc import Callable, Iterator

from ...core.adapter import Adapter
from ...core.errors import CharoniaError, NotReady, Unavailable
from ..core.messages import AdapterLoaded, AdapterReply, LoadAdapter, ToCore, UnloadAdapter

log = logging.getLogger(__name__)


class ResidentAdapters:
    """The adapters that a core computes with. The core counts loads: each that it answers is to be unloaded once."""

    def __init__(self, send: Callable[[ToCore], bool]) -> None:
        self._send = send
        self._wanted: dict[str, Adapter] = {}
        self._resident = set[str]()
        self._lost: dict[str, str] = {}
        """By digest, why a restarted core could not load an adapter again."""
        self._loads: dict[int, asyncio.Future[Adapter]] = {}
        self._last_load = 0
        self._restoring = set[asyncio.Task[None]]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._resident)

    def __contains__(self, digest: str) -> bool:
        """Whether the core computes with the adapter."""
        return digest in self._resident

    def absence(self, digest: str) -> CharoniaError:
        """The error of a request whose adapter a serving core does not have."""
        adapter = self._wanted.get(digest)
        if digest in self._lost and adapter is not None:
            message = f"adapter {adapter.path} was lost with the engine core that had it: {self._lost[digest]}"
            return Unavailable(f"{message}; load it again, with load_inplace")
        return NotReady("the engine core was started again, and reads its adapters first")

    async def load(self, path: str) -> Adapter:
        """Return when the core has the adapter, whose `name` is empty. Raises the core's `CharoniaError`, or that of
        its loss."""
        adapter = await self._load(path)
        self._wanted[adapter.digest] = adapter
        return adapter

    async def _load(self, path: str) -> Adapter:
        self._last_load += 1
        if not self._send(LoadAdapter(self._last_load, path)):  # nobody would answer
            raise NotReady("the engine is not ready")
        loading: asyncio.Future[Adapter] = asyncio.get_running_loop().create_future()
        self._loads[self._last_load] = loading
        adapter = await loading
        if adapter.digest in self._resident:
            self._send(UnloadAdapter(adapter.digest))
        self._lost.pop(adapter.digest, None)
        self._resident.add(adapter.digest)
        return adapter

    def unload(self, digest: str) -> None:
        """Have the core forget an adapter; unknown ones are ignored."""
        self._wanted.pop(digest, None)
        self._lost.pop(digest, None)
        if digest in self._resident:
            self._resident.remove(digest)
            self._send(UnloadAdapter(digest))

    def on_reply(self, reply: AdapterReply) -> None:
        loading = self._loads.pop(reply.number)
        if isinstance(reply, AdapterLoaded):
            if loading.done():  # its caller was cancelled
                self._send(UnloadAdapter(reply.adapter.digest))
            else:
                loading.set_result(reply.adapter)
        elif not loading.done():
            loading.set_exception(reply.error.error())

    def on_serving(self) -> None:
        """Load all adapters into a core that has just begun to serve."""
        for adapter in self._wanted.values():
            restoring = asyncio.create_task(self._restore(adapter))
            self._restoring.add(restoring)
            restoring.add_done_callback(self._restoring.discard)

    def on_loss(self, error: CharoniaError) -> None:
        """The core is gone, with its adapters."""
        self._resident.clear()
        loads, self._loads = self._loads, {}
        for loading in loads.values():
            if not loading.done():
                loading.set_exception(error)

    async def _restore(self, adapter: Adapter) -> None:
        """Load an adapter that the lost core had; what nobody wants of it any more, or never did, is unloaded."""
        try:
            loaded = await self._load(adapter.path)
        except NotReady:
            return  # the next core gets it
        except CharoniaError as error:
            self._lose(adapter, error.message)
            return
        if loaded.digest != adapter.digest:
            self._lose(adapter, "its files are not those that were loaded")
        if loaded.digest not in self._wanted:
            self.unload(loaded.digest)

    def _lose(self, adapter: Adapter, why: str) -> None:
        if adapter.digest not in self._wanted:
            return
        self._lost[adapter.digest] = why
        log.error("adapter %s is lost with the engine core that had it: %s", adapter.path, why)
