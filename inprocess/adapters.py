"""The adapters that a program's requests name, in vLLM's way: a name alone, or an object with a name, a number and a
directory, which is loaded when it is first used."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
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


def lora_requests(lora_request: Any, prompts: int) -> list[Any]:
    """What each of so many prompts asks for, of one for all of them or a list. Raises `InvalidArgument` for a list of
    another length."""
    if not isinstance(lora_request, list | tuple):
        return [lora_request] * prompts
    if len(lora_request) != prompts:
        message = f"lora_request must have one for each of {prompts} prompts, got {len(lora_request)}"
        raise InvalidArgument(message, field="lora_request")
    return list(lora_request)


def _located(path: str) -> str:
    """A directory as it is compared with others: absolute, and without links."""
    return os.path.realpath(os.path.expanduser(path))


class _Wanted(NamedTuple):
    """An adapter as programs tell it from others."""

    name: str
    number: int
    directory: str


class _AskedAdapter:
    """An adapter that a program asked for."""

    def __init__(self) -> None:
        self.name = ""
        """By which it is served, or is to be when its load ends; empty before."""
        self.own = False
        """Whether it was loaded for the program."""
        self.users = 0
        """Calls that use it, and changes of it that run."""
        self.changing = asyncio.Lock()


class ProgramAdapters:
    """The adapters of one model, in the server's event loop. Those with one name differ by their numbers and
    directories: the first has the name itself, the others have names that are made of it."""

    def __init__(self, gateway: InProcessGateway, model: str, configured: Mapping[str, str]) -> None:
        """`configured`: the directories, or hub ids, of the adapters that the model starts with, by name."""
        self._gateway, self._model, self._configured = gateway, model, configured
        self._known: dict[_Wanted, _AskedAdapter] = {}
        """The most recently used at the end."""

    @asynccontextmanager
    async def use(self, lora_request: Any) -> AsyncIterator[str]:
        """The block in which requests name it, by the name that it gets. Waits for no load but its own. Raises as
        `Gateway.load_adapter`."""
        name, path = adapter_name(lora_request), str(getattr(lora_request, "lora_path", ""))
        if not path:
            yield name
            return
        wanted = _Wanted(name, getattr(lora_request, "lora_int_id", 0), _located(path))
        known = self._known.pop(wanted) if wanted in self._known else _AskedAdapter()
        self._known[wanted] = known
        known.users += 1
        try:
            replace = bool(getattr(lora_request, "load_inplace", False))
            if replace or known.name not in self._served():
                await self._change(known, wanted, replace)
            yield known.name
        finally:
            self._leave(known, wanted)
            await self._unload_surplus(name)

    def _leave(self, known: _AskedAdapter, wanted: _Wanted) -> None:
        known.users -= 1
        if not known.users and not known.name:
            self._known.pop(wanted)

    async def _change(self, known: _AskedAdapter, wanted: _Wanted, replace: bool) -> None:
        """Load it, or load it anew; that goes on if the caller leaves."""

        def end(done: asyncio.Task[None]) -> None:
            self._leave(known, wanted)
            if not done.cancelled():
                done.exception()  # of which nobody may be left to hear

        known.users += 1
        task = asyncio.create_task(self._load(known, wanted, replace))
        task.add_done_callback(end)
        await asyncio.shield(task)

    async def _load(self, known: _AskedAdapter, wanted: _Wanted, replace: bool) -> None:
        async with known.changing:  # two that use it first at once load it once
            served = self._served()
            if known.name in served:
                if replace:
                    await self._gateway.load_adapter(known.name, wanted.directory, self._model, replace=True)
                return
            known.name, known.own = "", False
            known.name = self._choose_name(wanted, served)
            if known.name in served:
                return
            try:
                await self._gateway.load_adapter(known.name, wanted.directory, self._model)
                known.own = True
            except BaseException:
                known.name = ""
                raise

    def _served(self) -> dict[str, str]:
        """The directories of the adapters that there are, by name."""
        served = [served.adapter for served in self._gateway.adapters()]
        return {adapter.name: adapter.path for adapter in served}

    def _choose_name(self, wanted: _Wanted, served: Mapping[str, str]) -> str:
        """The first name that is free, or is that of the same directory, and that no other of the program has."""
        name, tries = wanted.name, 0
        taken = {known.name for known in self._known.values()}
        while name in taken or (name in served and wanted.directory not in self._directories(name, served[name])):
            tries += 1
            name = f"{wanted.name}-{wanted.number}" if tries == 1 else f"{wanted.name}-{wanted.number}-{tries}"
        return name

    def _directories(self, name: str, path: str) -> set[str]:
        """Where a served adapter is, and where it was said to be, which may be a hub id."""
        return {_located(path), _located(self._configured.get(name, path))}

    async def _unload_surplus(self, name: str) -> None:
        """Unload those of a name that were used least recently, and that nobody uses."""
        alike = [(wanted, known) for wanted, known in self._known.items() if wanted.name == name]
        for wanted, known in alike[:-_MOST_OF_A_NAME]:
            if not known.users and self._known.get(wanted) is known:
                await self._unload(known, wanted)

    async def _unload(self, known: _AskedAdapter, wanted: _Wanted) -> None:
        known.users += 1
        try:
            async with known.changing:  # whoever wants it meanwhile waits, and loads it again
                name, known.name = known.name, ""
                if known.own:
                    with suppress(CharoniaError):  # the server ends, or the program has unloaded it
                        await self._gateway.unload_adapter(name)
        finally:
            self._leave(known, wanted)
