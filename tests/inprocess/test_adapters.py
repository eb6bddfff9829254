"""Adapters that programs ask for, in a gateway whose model loads them when the test lets it."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from charonia.core.adapter import Adapter
from charonia.core.errors import InvalidArgument
from charonia.inprocess import adapters
from charonia.inprocess.adapters import ProgramAdapters
from charonia.repository.gateway import InProcessGateway

from ..built_models import serve_model
from ..repository.test_adapter_control import Writer


class LoraRequest(NamedTuple):
    """As vLLM's."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class Loader(Writer):
    """Loads an adapter when it `may`, and refuses those of directories that are called broken."""

    def __init__(self) -> None:
        super().__init__("base")
        self.loads: list[tuple[str, str]] = []
        self.may = asyncio.Event()
        self.may.set()

    async def load_adapter(self, name: str, path: str, replace: bool = False) -> Adapter:
        if name in self.named and not replace:
            raise InvalidArgument(f"'{name}' has already been loaded")
        self.loads.append((name, path))
        await self.may.wait()
        if path.endswith("broken"):
            raise InvalidArgument("broken")
        return await super().load_adapter(name, path, replace)


async def adapters_of(model: Loader, **configured: str) -> ProgramAdapters:
    gateway = InProcessGateway()
    await serve_model(gateway, model, "1")
    return ProgramAdapters(gateway, "base", configured)


async def use(program: ProgramAdapters, *request: object) -> str:
    async with program.use(LoraRequest(*request)) as name:  # type: ignore[arg-type]
        return name


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_call_waits_for_no_load_but_its_own() -> None:
    model = Loader()
    program = await adapters_of(model)
    assert await use(program, "a", 1, "/loras/a") == "a"
    model.may.clear()
    loading = [asyncio.create_task(use(program, "b", 1, "/loras/b")) for _ in range(3)]
    other = asyncio.create_task(use(program, "b", 2, "/loras/c"))
    await turns()
    assert await use(program, "a", 1, "/loras/a") == "a"
    assert not any(task.done() for task in (*loading, other))
    model.may.set()
    assert await asyncio.gather(*loading, other) == ["b", "b", "b", "b-2"]
    assert model.loads == [("a", "/loras/a"), ("b", "/loras/b"), ("b-2", "/loras/c")]


async def test_a_load_goes_on_without_its_caller() -> None:
    model = Loader()
    program = await adapters_of(model)
    model.may.clear()
    first = asyncio.create_task(use(program, "a", 1, "/loras/a"))
    await turns()
    first.cancel()
    second = asyncio.create_task(use(program, "a", 1, "/loras/a"))
    await turns()
    assert first.cancelled()
    model.may.set()
    assert await second == "a"
    assert model.loads == [("a", "/loras/a")]


async def test_a_load_that_failed_is_tried_again_and_leaves_the_name() -> None:
    model = Loader()
    program = await adapters_of(model)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="broken"):
            await use(program, "a", 1, "/loras/broken")
    assert await use(program, "a", 2, "/loras/a") == "a"
    assert len(model.loads) == 3


async def test_a_directory_is_the_same_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    directory, snapshot = tmp_path / "ckpt", tmp_path / "snapshot"
    directory.mkdir()
    (tmp_path / "link").symlink_to(directory)
    model = Loader()
    model.named = {
        "sql": Adapter("sql", str(directory), "0" * 64, 8, 1000),
        "poet": Adapter("poet", str(snapshot), "0" * 64, 8, 1000),
    }
    program = await adapters_of(model, sql="ckpt/", poet="org/poet")
    for path in ("ckpt/", "ckpt", "~/ckpt", "./ckpt/../ckpt", str(directory) + "/", "link"):
        assert await use(program, "sql", 1, path) == "sql"
    for number, path in enumerate(("org/poet", str(snapshot))):
        assert await use(await adapters_of(model, poet="org/poet"), "poet", number, path) == "poet"
    assert model.loads == []
    assert await use(program, "sql", 1, "other/") == "sql-1"
    assert await use(program, "sql", 1, "~/other") == "sql-1"
    assert model.loads == [("sql-1", str(tmp_path / "other"))]


async def test_unused_adapters_of_a_name_leave_but_those_that_are_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_MOST_OF_A_NAME", 1)
    model = Loader()
    model.named = {"a": Adapter("a", "/loras/a", "0" * 64, 8, 1000)}
    program = await adapters_of(model)
    async with AsyncExitStack() as held:
        names = [await held.enter_async_context(program.use(LoraRequest("a", 1, f"/loras/{step}"))) for step in "abc"]
        assert names == ["a", "a-1", "a-1-2"]
        assert list(model.named) == names
    assert list(model.named) == ["a", "a-1-2"]
    assert await use(program, "a", 1, "/loras/b") == "a-1"
    assert await use(program, "a", 1, "/loras/a") == "a"
