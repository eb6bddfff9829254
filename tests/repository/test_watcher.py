"""What polling loads again: what failed, and ensembles whose steps come, go and change."""

import shutil

import pytest

from charonia.core.errors import NotFound
from charonia.repository.watcher import LoadLogger

from .conftest import Toy, World


async def test_a_load_that_failed_is_tried_again_and_told_once(
    world: World, toys: list[Toy], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the next look, and then ever less often."""
    attempts: list[bool] = []
    load = Toy.load

    async def load_when_it_may(toy: Toy) -> None:
        attempts.append(available)
        if not available:
            raise OSError("busy")
        await load(toy)

    monkeypatch.setattr(Toy, "load", load_when_it_may)
    available = False
    world.write("m", {"1": 1})
    assert not await world.start()
    looks = []
    for _ in range(12):
        await world.watcher.poll_once(LoadLogger())
        looks.append(len(attempts))
    assert looks == [2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4]
    told = [record for record in caplog.records if record.name.endswith(".watcher")]
    assert not told, "nothing that the start has not said"
    available = True
    world.write("m", {"1": 1}, (world.root / "m" / "config.pbtxt").read_text() + "version_policy { all {} }")
    await world.watcher.poll_once(world)
    assert await world.ask("m") == 1
    assert len(attempts) == 5


async def test_a_failed_model_that_is_gone_is_unloaded(world: World) -> None:
    model = world.write("m", {"1": 1})
    assert await world.start()
    world.write("m", {"2": 2})
    (model / "2" / "fails").write_text("no weights")
    await world.watcher.poll_once(world)
    assert await world.ask("m") == 1
    shutil.rmtree(model)
    await world.watcher.poll_once(world)
    with pytest.raises(NotFound, match="no available versions"):
        await world.ask("m")


async def test_an_ensemble_loads_when_its_step_comes_or_is_mended(world: World) -> None:
    world.write_ensemble("inner", "toy")
    world.write_ensemble("outer", "inner")
    assert not await world.start()
    assert "'inner' depends on 'toy' which has no loaded version" in world.failures["inner"]
    for _ in range(4):
        await world.watcher.poll_once(world)
    fails = world.write("toy", {"1": 5}) / "1" / "fails"
    fails.write_text("half a file")
    await world.watcher.poll_once(world)
    assert world.failures["toy"] == "half a file"
    fails.unlink()
    await world.watcher.poll_once(world)
    assert await world.ask("outer") == 5
    assert world.gateway.is_model_ready("outer")
