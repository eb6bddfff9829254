"""Loaded ensembles whose steps load, change and go without them."""

import asyncio

import pytest

from charonia.core.errors import InvalidArgument, Unavailable
from charonia.core.metrics import Histogram
from charonia.ensembles.composite_model import CompositeModel
from charonia.repository.builder import ModelBuilder
from charonia.repository.gateway import InProcessGateway
from charonia.repository.model_source import read_model
from charonia.repository.response_cache import ResponseCache
from charonia.repository.watcher import RepositoryWatcher

from .conftest import CONFIG, Toy, World, model_of

WIDE = CONFIG.replace("dims: 1", "dims: 2")
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }"


def first_responses(world: World, name: str) -> int:
    """How many times to a first response were measured."""
    measured = model_of(world.gateway, name).capabilities.measured
    assert measured is not None
    family = "nv_inference_first_response_histogram_ms"
    [histogram] = [reading.value for reading in measured.readings() if reading.family == family]
    assert isinstance(histogram, Histogram)
    return sum(histogram.counts)


@pytest.fixture
def world(world: World) -> World:
    world.write("toy", {"1": 5})
    world.write_ensemble("inner", "toy")
    world.write_ensemble("outer", "inner")
    return world


async def test_an_ensemble_that_its_step_does_not_fit_serves_again_when_it_does(world: World) -> None:
    world.explicit()
    await world.gateway.load_model("outer")
    before = model_of(world.gateway, "inner")
    world.write("toy", {"1": 6}, WIDE)
    await world.gateway.load_model("toy")
    says = "'inner' is not at ready state: .*inconsistent shape"
    with pytest.raises(Unavailable, match=says):
        await world.ask("inner")
    with pytest.raises(Unavailable, match=f"in ensemble 'outer', .*{says}"):
        await world.ask("outer")
    assert not any(map(world.gateway.is_model_ready, ("inner", "outer")))
    [shown] = world.gateway.registry.entries["inner"].index()
    assert (str(shown.state), "inconsistent shape" in shown.reason) == ("UNAVAILABLE", True)
    with pytest.raises(InvalidArgument, match="inconsistent shape"):
        await world.gateway.load_model("inner")
    world.write("toy", {"1": 7}, CONFIG)
    await world.gateway.load_model("toy")
    assert (await world.ask("outer"), world.gateway.is_model_ready("outer")) == (7, True)
    assert model_of(world.gateway, "inner") is before, "which has its counts"


async def test_polling_has_ensembles_follow_their_steps(world: World, toys: list[Toy]) -> None:
    """A step that becomes decoupled makes all so that stand on it; a request that runs goes on as it began."""
    assert await world.start()
    running = asyncio.create_task(world.ask("outer", wait=True))
    await asyncio.sleep(0)
    before = world.gateway.model_config("outer")
    assert await world.ask("outer") == 5
    world.write("toy", {"1": 6}, DECOUPLED)
    await world.watcher.poll_once(world)
    assert [world.gateway.model_config(name).decoupled for name in ("inner", "outer")] == [True, True]
    assert not before.decoupled, "a config never changes"
    assert await world.ask("outer") == 6
    assert first_responses(world, "outer") == 2, "those of before count"
    toys[0].go.set()
    assert await running == 5
    world.write("toy", {"1": 7}, CONFIG)
    await world.watcher.poll_once(world)
    assert [world.gateway.model_config(name).decoupled for name in ("inner", "outer")] == [False, False]
    await world.gateway.lifecycle.close()


@pytest.mark.usefixtures("two_at_once")
async def test_a_step_that_changes_while_its_ensemble_loads_unloads_no_version_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = world.root / "inner" / "config.pbtxt"
    world.write("inner", {"2": 0}, config.read_text() + "version_policy { all {} }")
    assert await world.start()
    before = model_of(world.gateway, "inner", "1")
    load, held, go = CompositeModel.load, asyncio.Event(), asyncio.Event()

    async def load_late(model: CompositeModel) -> None:
        if not held.is_set():
            held.set()
            await go.wait()
        await load(model)

    monkeypatch.setattr(CompositeModel, "load", load_late)
    world.write("inner", {"2": 22}, config.read_text())
    loading = asyncio.create_task(world.gateway.lifecycle.load(read_model(world.root / "inner")))
    await held.wait()
    world.write("toy", {"1": 6}, DECOUPLED)
    await world.gateway.lifecycle.load(read_model(world.root / "toy"))
    go.set()
    await loading
    assert model_of(world.gateway, "inner", "1") is before
    for version in ("1", "2"):
        assert (await world.ask("inner", version), world.gateway.model_config("inner", version).decoupled) == (6, True)
    await world.gateway.lifecycle.close()


async def test_cached_responses_go_with_the_step_that_gave_them(world: World, toys: list[Toy]) -> None:
    cache = ResponseCache(1 << 20)
    world.gateway = InProcessGateway(builder=ModelBuilder(cache=cache))
    world.watcher = RepositoryWatcher(world.catalog, world.gateway.registry, world.gateway.lifecycle)
    config = world.root / "outer" / "config.pbtxt"
    config.write_text(config.read_text() + "response_cache { enable: true }")
    assert await world.start()
    running = asyncio.create_task(world.ask("outer", wait=True))
    assert [await world.ask("outer") for _ in range(2)] == [5, 5]
    assert len(cache) == 1
    world.write("toy", {"1": 66})
    await world.watcher.poll_once(world)
    assert await world.ask("outer") == 66
    toys[0].go.set()
    assert await running == 5
    assert len(cache) == 1, "what the old step answered is not kept"
    await world.gateway.lifecycle.close()


async def test_polling_refuses_ensembles_that_ask_each_other(world: World) -> None:
    assert await world.start()
    world.write_ensemble("inner", "outer")
    await world.watcher.poll_once(world)
    assert "circular dependency between ensembles: inner -> outer -> inner" in world.failures["inner"]
    assert await world.ask("outer") == 5, "as before"
