"""Ensembles and their steps in mode explicit: what a request loads, loads anew and unloads with an ensemble."""

import asyncio

import pytest

from charonia.core.errors import InvalidArgument
from charonia.repository.model_control import CircularEnsembles
from charonia.routing.route import Route, RouteArm

from .conftest import Toy, World


@pytest.fixture
def world(world: World) -> World:
    """Mode explicit, and models to ask: `a`, `b` and `c`."""
    for number, name in enumerate("abc", start=1):
        world.write(name, {"1": number})
    world.explicit()
    return world


def ready(world: World) -> str:
    """The names of the models that are ready."""
    return " ".join(name for name in sorted(world.gateway.registry.entries) if world.gateway.is_model_ready(name))


async def test_an_unload_leaves_the_steps_and_with_dependents_what_is_in_use(world: World) -> None:
    world.write_ensemble("inner", "a", "b")
    world.write_ensemble("outer", "inner", "c")
    world.write_ensemble("other", "b")
    await world.gateway.load_model("outer")
    assert ready(world) == "a b c inner outer"
    await world.gateway.unload_model("outer")
    assert ready(world) == "a b c inner"
    await world.gateway.load_model("outer")
    await world.gateway.load_model("other")
    await world.gateway.load_model("c")
    await world.gateway.unload_model("outer", dependents=True)
    assert ready(world) == "b c other"
    await world.gateway.unload_model("other", dependents=True)
    assert ready(world) == "c"
    await world.gateway.unload_model("other", dependents=True)
    await world.gateway.unload_model("c")
    assert ready(world) == ""


async def test_the_start_loads_steps_for_their_ensembles(world: World) -> None:
    world.write_ensemble("ensemble", "a", "b", "c")
    world.gateway.routes.replace({"route": Route((RouteArm("b", 0, 1),))})
    assert await world.watcher.load_initial(["ensemble", "a"], world)
    await world.gateway.unload_model("ensemble", dependents=True)
    assert ready(world) == "a b", "one is asked for by name, one by a route"


async def test_what_was_loaded_for_an_ensemble_that_fails_goes(world: World) -> None:
    world.write_ensemble("inner", "a", "b")
    await world.gateway.load_model("inner")
    await world.gateway.unload_model("inner")
    (world.root / "c" / "1" / "fails").write_text("no weights")
    world.write("d", {"1": 4})
    world.write_ensemble("outer", "inner", "c", "d")
    with pytest.raises(InvalidArgument, match="ensemble 'outer' depends on 'c' which has no loaded version"):
        await world.gateway.load_model("outer")
    assert ready(world) == "a b", "as before the request"


async def test_a_load_of_an_ensemble_loads_changed_steps_anew(world: World, toys: list[Toy]) -> None:
    """A request that runs meanwhile ends where it began."""
    world.write_ensemble("inner", "a", "b")
    world.write_ensemble("outer", "inner", "c", "a")
    await world.gateway.load_model("outer")
    assert [toy.config.name for toy in toys] == ["a", "c", "b"]
    running = asyncio.create_task(world.ask("outer", wait=True))
    await asyncio.sleep(0)
    world.write("a", {"2": 7})
    await world.gateway.load_model("outer")
    assert [toy.config.name for toy in toys] == ["a", "c", "b", "a"]
    assert await world.ask("outer") == 7
    for toy in toys:
        toy.go.set()
    assert await running == 1
    (world.root / "a" / "2" / "fails").write_text("half a file")
    await world.gateway.load_model("outer")
    assert await world.ask("outer") == 7, "as before"


async def test_a_step_with_a_requests_config_or_files_stays(world: World, toys: list[Toy]) -> None:
    world.write_ensemble("ensemble", "a", "b")
    world.explicit()
    own = '{"backend": "toy", "input": [%s], "output": [%s]}'
    tensor = '{"name": "A", "data_type": "TYPE_INT32", "dims": [1]}'
    await world.gateway.load_model("a", own % (tensor, tensor), {"1/answer": b"9"})
    await world.gateway.load_model("b", own % (tensor, tensor))
    await world.gateway.load_model("ensemble")
    assert len(toys) == 2
    assert await world.ask("ensemble") == 9
    await world.gateway.load_model("a")
    assert await world.ask("ensemble") == 1


async def test_ensembles_that_come_to_ask_each_other_are_refused(world: World) -> None:
    world.write_ensemble("ping", "a")
    world.write_ensemble("pong", "ping")
    await world.gateway.load_model("pong")
    world.write_ensemble("ping", "pong")
    with pytest.raises(CircularEnsembles, match="circular dependency between ensembles: ping -> pong -> ping"):
        await world.gateway.load_model("ping")
    assert await world.ask("pong") == 1


async def test_a_step_that_its_requests_load_is_read_anew(world: World, toys: list[Toy]) -> None:
    world.on_demand(100)
    world.explicit()
    world.write_ensemble("ensemble", "a")
    assert await world.watcher.load_initial(world.catalog.model_names(), world)
    world.write("a", {"1": 1, "2": 8})
    await world.gateway.load_model("ensemble")
    assert (toys, world.gateway.model_config("a").version, ready(world)) == ([], "2", "a b c ensemble")
    assert await world.ask("ensemble") == 8
    await world.gateway.lifecycle.close()
