"""Memory that models hold: refused naming the largest holders, given back at unload."""

from pathlib import Path

import pytest

from charonia.core.errors import Unavailable
from charonia.repository.budget import Budget, stated_bytes
from charonia.repository.builder import Builder
from charonia.repository.gateway import Hub
from charonia.repository.source import read_model

from .conftest import CONFIG, Toy, World

MIB = 2**20


def test_what_does_not_fit_is_refused_naming_the_largest() -> None:
    free = 100 * MIB
    budget = Budget(lambda: free)
    for version, size in (("1", 30), ("2", 60), ("3", 10), ("4", 5)):
        last = budget.take("m", version, size * MIB)
    free = 3 * MIB
    with pytest.raises(Unavailable) as caught:
        budget.take("n", "1", 4 * MIB)
    assert caught.value.message == (
        "model 'n' version 1 needs at least 4.0 MiB of memory and 3.0 MiB is free; most is held by "
        "'m' version 2 (60.0 MiB), 'm' version 1 (30.0 MiB), 'm' version 3 (10.0 MiB)"
    )
    last()
    last()
    assert budget.held == 100 * MIB


@pytest.mark.parametrize(("inside", "size"), [("", 7), ("deep/weights", 7), (None, 0)])
def test_what_a_version_states(tmp_path: Path, inside: str | None, size: int) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "toy" default_model_filename: "f"')
    (tmp_path / "m" / "1" / "other").write_bytes(b"not counted")
    if inside is not None:
        file = tmp_path / "m" / "1" / "f" / inside
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"7 bytes")
    source = read_model(tmp_path / "m")
    assert stated_bytes(source, source.versions[0]) == size


async def test_models_hold_and_give_back(tmp_path: Path, toys: list[Toy]) -> None:
    world, budget = World(tmp_path), Budget(lambda: 100)
    world.hub = Hub(builder=Builder(budget=budget))
    world.explicit()
    config = CONFIG + 'default_model_filename: "f"'
    for name, size in (("a", 60), ("b", 90), ("c", 101)):
        (world.write(name, {"1": 1}, config) / "1" / "f").write_bytes(bytes(size))
    (tmp_path / "b" / "1" / "fails").write_text("no weights")
    await world.hub.load_model("a")
    with pytest.raises(Exception, match="no weights"):
        await world.hub.load_model("b")
    assert budget.held == 60
    with pytest.raises(Exception, match=r"version 1 needs at least .* of memory .* most is held by 'a' version 1"):
        await world.hub.load_model("c")
    await world.hub.unload()
    assert budget.held == 0
    assert [toy.unloaded for toy in toys] == [True]
