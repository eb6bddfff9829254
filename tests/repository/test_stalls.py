"""A load, or a directory, that hangs keeps nothing else from loading, and a panic of a library is a failed load."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from charonia.core.errors import InvalidArgument
from charonia.repository import lifecycle, watcher
from charonia.repository.load_turn import Turn

from ..waiting import until
from .conftest import CONFIG, Toy, World


async def test_blocking_work_that_hangs_keeps_no_other_waiting(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_PATIENCE", 0.02)
    come = threading.Event()
    hanging = asyncio.create_task(world.gateway.lifecycle.run_blocking(come.wait))
    assert await world.gateway.lifecycle.run_blocking(lambda: 7) == 7
    assert not hanging.done()
    come.set()
    assert await hanging


async def test_a_turn_that_is_renewed_is_kept() -> None:
    lock, expired = asyncio.Lock(), list[int]()
    async with Turn(lock, 60.0, lambda: expired.append(1)) as turn:
        turn.renew()
        turn._look()
        assert lock.locked()
        turn._renewed -= 61.0
        turn._look()
        assert expired == [1]
        assert not lock.locked()
    assert not lock.locked()


async def test_a_load_that_hangs_gives_its_place_up_and_polling_goes_on(
    world: World, toys: list[Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_STALL_SECONDS", 0.5)
    world.gateway.lifecycle.load_sequentially()
    hangs = world.write("a", {"1": 1}) / "1" / "hangs"
    hangs.touch()
    world.write("b", {"1": 2})
    assert not await world.start()
    assert (world.loads, world.states()["a", "1"]) == (["b"], "LOADING")
    world.write("c", {"1": 3})
    await world.watcher.poll_once(world)
    assert [await world.ask(name) for name in "bc"] == [2, 3]
    hangs.unlink()
    await until(lambda: "a" in world.loads)
    assert await world.ask("a") == 1
    assert world.failures == {}


async def test_a_start_that_needs_every_model_waits_for_a_load_without_progress(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_STALL_SECONDS", 0.02)
    world.gateway.lifecycle.load_sequentially()
    hangs = world.write("a", {"1": 1}) / "1" / "hangs"
    hangs.touch()
    world.write("b", {"1": 2})
    world.watcher.patient = True
    starting = asyncio.create_task(world.start())
    await until(lambda: world.loads == ["b"])
    assert not starting.done()
    hangs.unlink()
    assert await starting
    assert (world.loads, world.failures) == (["b", "a"], {})


async def test_a_directory_that_hangs_keeps_no_other_model_waiting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_PATIENCE", 0.02)
    monkeypatch.setattr(watcher, "_READ_SECONDS", 0.5)
    come, read = threading.Event(), world.catalog.read

    def read_or_hang(name: str, *arguments: Any) -> Any:
        if name == "a":
            come.wait()
        return read(name, *arguments)

    monkeypatch.setattr(world.catalog, "read", read_or_hang)
    world.write("a", {"1": 1})
    world.write("b", {"1": 2})
    assert not await world.start()
    assert await world.ask("b") == 2
    assert "its files cannot be read" in world.failures["a"]
    await world.watcher.poll_once(world)  # which does not ask for it again meanwhile
    come.set()
    await until(lambda: not world.watcher._unread)
    await world.watcher.poll_once(world)
    assert await world.ask("a") == 1


class PanicException(BaseException):
    """As pyo3's."""


async def test_a_panic_is_a_failed_load(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def panic(model: Toy) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(Toy, "load", panic)
    world.write("m", {"1": 1})
    assert not await world.start()
    assert world.states() == {("m", "1"): "UNAVAILABLE"}
    assert world.failures["m"] == "PanicException: index out of bounds"


async def test_a_pipe_in_a_model_is_refused_by_name(world: World, tmp_path: Path) -> None:
    os.mkfifo(world.write("m", {"1": 1}) / "1" / "weights.bin")
    assert not await world.start()
    assert world.failures["m"].endswith("weights.bin is a named pipe, and no regular file")


async def test_the_place_of_a_wrong_field_is_read_outside_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set[int]()
    place = lifecycle.with_config_position

    def remember(error: Any, file: Any) -> Any:
        seen.add(threading.get_ident())
        return place(error, file)

    monkeypatch.setattr(lifecycle, "with_config_position", remember)
    (world.write("m", {"1": 1}, CONFIG) / "1" / "fails").write_text("no good")
    assert not await world.start()
    assert seen
    assert threading.get_ident() not in seen
    with pytest.raises(InvalidArgument, match="no good"):
        raise InvalidArgument(world.failures["m"])
