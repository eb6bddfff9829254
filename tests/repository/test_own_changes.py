"""Models that write beside their versions when they load, in mode poll."""

import logging
from pathlib import Path

import pytest

from .conftest import Toy, World


def write_line(file: Path) -> None:
    with file.open("a") as lines:
        lines.write("loaded\n")


@pytest.fixture
def log_of_loads(world: World, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model `m` writes a line to this file at each load."""
    file = world.write("m", {"1": 1}) / "logs" / "run.log"
    file.parent.mkdir()
    load = Toy.load

    async def load_and_write(toy: Toy) -> None:
        await load(toy)
        write_line(file)

    monkeypatch.setattr(Toy, "load", load_and_write)
    return file


async def test_what_each_load_writes_is_no_change(
    world: World, toys: list[Toy], log_of_loads: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert await world.start()
    for _ in range(5):
        await world.watcher.poll_once(world)
    assert len(toys) == 2, "once more: somebody else may have written it"
    assert "model 'm' is loaded again for what changed beside its versions: logs" in caplog.text
    assert "model 'm' changes logs itself when it loads" in caplog.text
    write_line(log_of_loads)
    await world.watcher.poll_once(world)
    assert len(toys) == 3, "between loads it is somebody else"


@pytest.mark.usefixtures("log_of_loads")
async def test_what_comes_during_a_load_is_loaded(
    world: World, toys: list[Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the model writes something itself."""
    assert await world.start()
    load = Toy.load

    async def load_meanwhile(toy: Toy) -> None:
        await load(toy)
        if len(toys) == 2:
            (world.root / "m" / "labels.txt").write_text("cat")

    monkeypatch.setattr(Toy, "load", load_meanwhile)
    for _ in range(4):
        await world.watcher.poll_once(world)
    assert len(toys) == 3
