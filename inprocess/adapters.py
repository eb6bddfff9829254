"""The adapters that a program's requests name, in vLLM's way: a name alone, or an object with a name, a number and a
directory, which is loaded when it is first used."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.errors import CharoniaError, InvalidArgument
from ..repository.gateway import InProcessGateway

_MOST_OF_A_NAME = 8
"""Adapters of one name that stay loaded while nobody uses them: a program that trains gives each of its steps one."""


def adapter_name(lora_request: Any) -> str:
    """The name that it asks for; empty for none. Raises `InvalidArgument` for what is no adapter."""
    name = lora_request if isinstance(lora_request, str) else getattr(lora_request, "lora_name", "")
    if lora_request is not None and not (isinstance(name, str) and name):
        raise InvalidArgument("lora_request must be a name, or have lora_name and lora_path", field="lora_request")
    return name


class _Wanted(NamedTuple):
    """An adapter as programs tell it from others."""

    name: str
    number: int
    path: str


@dataclass(slots=True)
class _Loaded:
    """An adapter that was loaded for a program, and how many calls use it."""

    name: str
    users: int = 0


class ProgramAdapters:
    """The adapters of one model, in the server's event loop. Those with one name differ by their numbers and
    directories: the first has the name itself, the others have names that are made of it."""

    def __init__(self, gateway: InProcessGateway, model: str) -> None:
        self._gateway, self._model = gateway, model
        self._loading = asyncio.Lock()
        self._loaded: dict[_Wanted, _Loaded] = {}
        """The most recently used at the end."""

    @asynccontextmanager
    async def use(self, lora_request: Any) -> AsyncIterator[str]:
        """The block in which requests name it, by the name that it gets. Raises as `Gateway.load_adapter`."""
        name, path = adapter_name(lora_request), str(getattr(lora_request, "lora_path", ""))
        if not path:
            yield name
            return
        wanted = _Wanted(name, getattr(lora_request, "lora_int_id", 0), path)
        async with self._loading:  # two that use it first at once load it once
            loaded = self._loaded.pop(wanted, None)
            if loaded is None or loaded.name not in self._served():
                loaded = _Loaded(await self._load(wanted))
            elif getattr(lora_request, "load_inplace", False):
                await self._gateway.load_adapter(loaded.name, path, self._model, replace=True)
            self._loaded[wanted] = loaded
            loaded.users += 1
        try:
            yield loaded.name
        finally:
            loaded.users -= 1
            await self._unload_surplus(name)

    def _served(self) -> dict[str, str]:
        """The directories of the adapters that there are, by name."""
        served = [served.adapter for served in self._gateway.adapters()]
        return {adapter.name: adapter.path for adapter in served}

    async def _load(self, wanted: _Wanted) -> str:
        served = self._served()
        name, tries = wanted.name, 0
        taken = {loaded.name for loaded in self._loaded.values()}
        while name in served and (served[name] != wanted.path or name in taken):
            tries += 1
            name = f"{wanted.name}-{wanted.number}" if tries == 1 else f"{wanted.name}-{wanted.number}-{tries}"
        if name not in served:
            await self._gateway.load_adapter(name, wanted.path, self._model)
        return name

    async def _unload_surplus(self, name: str) -> None:
        """Unload those of a name that were used least recently, and that nobody uses."""
        alike = [wanted for wanted in self._loaded if wanted.name == name]
        if len(alike) <= _MOST_OF_A_NAME:
            return
        async with self._loading:
            for wanted in alike[:-_MOST_OF_A_NAME]:
                loaded = self._loaded.get(wanted)
                if loaded is not None and not loaded.users:
                    del self._loaded[wanted]
                    with suppress(CharoniaError):  # the server ends, or the program has unloaded it
                        await self._gateway.unload_adapter(loaded.name)
