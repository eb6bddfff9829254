"""Models that requests load, and that make room for others."""

import asyncio
import time
from pathlib import Path

import pytest

from charonia.core.errors import CharoniaError, NotFound, NotReady, ServerExiting, Unavailable
from charonia.core.gateway import ModelState
from charonia.repository.model_registry import ON_DEMAND
from charonia.repository.on_demand import OnDemandLoader
from charonia.routing.route import Route, RouteArm, RouteRule, RouteTarget

from ..waiting import until
from .conftest import CONFIG, Toy, World

PINNED = CONFIG + 'parameters { key: "keep_in_memory" value { string_value: "true" } }'


@pytest.fixture
def world(tmp_path: Path, toys: list[Toy]) -> World:
    """Three models; two of them fit into 100 bytes."""
    made = World(tmp_path)
    for answer, name in enumerate(("a", "b", "c")):
        (made.write(name, {"1": answer}) / "1" / "needs").write_bytes(bytes(45))
    return made


def resident(world: World) -> set[str]:
    return {name for name, entry in world.gateway.registry.entries.items() if entry.loaded_versions}


def readings(loader: OnDemandLoader) -> dict[str, float]:
    prefix, found = "charonia_on_demand_", loader.measure().readings
    return {each.family.removeprefix(prefix): each.value for each in found if each.family.startswith(prefix)}


def waited(loader: OnDemandLoader) -> dict[str, float]:
    """Seconds that requests waited for loads, by model."""
    found = loader.measure().readings
    return {each.labels["model"]: each.value for each in found if each.family == "charonia_load_wait_seconds_total"}


async def test_a_model_is_known_before_anybody_asks_for_it_and_loaded_then(world: World, toys: list[Toy]) -> None:
    world.on_demand(100)
    assert await world.start()
    gateway = world.gateway
    assert (sorted(world.described), toys) == (["a", "b", "c"], [])
    assert gateway.ready()
    assert gateway.is_model_ready("a")
    assert gateway.is_model_ready("a", "1")
    assert not gateway.is_model_ready("a", "2")
    assert await gateway.unready_reason("a") == ""
    assert gateway.model_config("a").inputs[0].name == "A"
    assert gateway.served_versions("a") == ("1",)
    assert [config.name for config in gateway.model_configs()] == ["a", "b", "c"]
    assert gateway.model_statistics("a") == []
    (shown, *_) = await gateway.repository_index()
    assert (shown.name, shown.version, shown.state, shown.reason) == ("a", "1", ModelState.UNAVAILABLE, ON_DEMAND)
    assert (await gateway.repository_index(ready_only=True)) == []
    assert await world.ask("b") == 1
    assert resident(world) == {"b"}
    assert world.states()["b", "1"] == "READY"
    with pytest.raises(NotFound):
        await world.ask("b", "2")
    await gateway.lifecycle.close()


async def test_all_who_ask_wait_for_one_load(world: World, toys: list[Toy]) -> None:
    loader = world.on_demand(100)
    await world.start()
    assert await asyncio.gather(*(world.ask("a") for _ in range(5)), world.ask("a", "1")) == [0] * 6
    assert len(toys) == 1
    assert waited(loader)["a"] > 0
    assert waited(loader).keys() == {"a"}
    assert readings(loader) == {"loads_total": 1, "evictions_total": 0, "reloads_total": 0, "waiting_requests": 0}
    await world.gateway.lifecycle.close()


async def test_the_model_that_was_idle_longest_makes_room(world: World, toys: list[Toy]) -> None:
    loader = world.on_demand(100)
    await world.start()
    for name in ("a", "b", "a", "c"):
        assert await world.ask(name) == ord(name) - ord("a")
    assert resident(world) == {"a", "c"}
    assert world.gateway.is_model_ready("b")
    assert await world.ask("b") == 1
    assert resident(world) == {"b", "c"}
    assert [toy.unloaded for toy in toys] == [True, True, False, False]
    assert readings(loader) == {"loads_total": 4, "evictions_total": 2, "reloads_total": 1, "waiting_requests": 0}
    await world.gateway.lifecycle.close()


async def test_models_that_take_turns_are_told_of(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.on_demand(50)
    await world.start()
    for name in ("a", "b", "a", "b"):
        await world.ask(name)
    assert [record.args for record in caplog.records if "take turns" in record.msg] == [("a", pytest.approx(0, abs=60))]
    await world.gateway.lifecycle.close()


async def test_what_is_in_use_or_pinned_stays(world: World, toys: list[Toy]) -> None:
    world.write("a", {"1": 0}, PINNED)
    world.on_demand(100)
    await world.start()
    assert resident(world) == {"a"}
    waiting = asyncio.create_task(world.ask("b", wait=True))
    await until(lambda: len(toys) == 2)
    with pytest.raises(NotReady, match="no room for it beside the models in use: model 'c' version 1 needs") as caught:
        await world.ask("c")
    assert caught.value.retry_after > 0
    await until(lambda: world.gateway.registry.entries["b"].loaded_versions["1"].in_flight.count == 1)
    toys[1].go.set()
    assert await waiting == 1
    toys[1].sequences = 1
    with pytest.raises(NotReady):
        await world.ask("c")
    toys[1].sequences = 0
    assert await world.ask("c") == 2
    assert resident(world) == {"a", "c"}
    await world.gateway.lifecycle.close()


async def test_nothing_goes_where_all_would_not_do(world: World) -> None:
    (world.root / "c" / "1" / "needs").write_bytes(bytes(200))
    world.on_demand(100)
    await world.start()
    await asyncio.gather(world.ask("a"), world.ask("b"))
    with pytest.raises(NotReady, match="model 'c' version 1 needs"):
        await world.ask("c")
    assert resident(world) == {"a", "b"}
    await world.gateway.lifecycle.close()


async def test_a_model_stays_for_as_long_as_it_was_promised(world: World) -> None:
    later = [0.0]
    world.on_demand(50, lambda: time.monotonic() + later[0], idle=1000, resident=2000)
    await world.start()
    await world.ask("a")
    for waited in (1500, 1999):  # idle for long, and loaded not long ago
        later[0] = waited
        with pytest.raises(NotReady):
            await world.ask("b")
    later[0] = 2001
    await world.ask("b")
    assert resident(world) == {"b"}
    await world.gateway.lifecycle.close()


async def test_a_model_that_fails_is_tried_again_later_and_after_a_change(world: World, toys: list[Toy]) -> None:
    later = [0.0]
    fails = world.root / "a" / "1" / "fails"
    fails.write_text("no good")
    world.on_demand(100, lambda: time.monotonic() + later[0])
    await world.start()
    with pytest.raises(Unavailable, match="model 'a' failed to load: no good") as caught:
        await world.ask("a")
    assert caught.value.retry_after == 1
    assert not world.gateway.is_model_ready("a")
    assert (await world.gateway.repository_index())[0].reason == "no good"
    with pytest.raises(Unavailable, match=r"failed to load, and is tried again in 1 s: no good"):
        await world.ask("a")
    later[0] += 1
    with pytest.raises(Unavailable, match="no good") as caught:
        await world.ask("a")
    assert caught.value.retry_after == 2
    fails.unlink()
    await world.watcher.poll_once(world)
    assert world.gateway.is_model_ready("a")
    assert await world.ask("a") == 0
    await world.gateway.lifecycle.close()


async def test_few_wait_and_none_too_long(world: World, toys: list[Toy]) -> None:
    hangs = world.root / "a" / "1" / "hangs"
    hangs.touch()
    loader = world.on_demand(100, waiting=2, tenant_waiting=1, wait=0.05)
    await world.start()
    loading = asyncio.create_task(loader.provide("a", "one"))
    await asyncio.sleep(0)
    with pytest.raises(NotReady, match="1 requests of this tenant wait"):
        await loader.provide("a", "one")
    other = asyncio.create_task(loader.provide("b", "two"))
    await asyncio.sleep(0)
    with pytest.raises(NotReady, match="2 requests wait for models"):
        await loader.provide("a", "three")
    for task in (loading, other):
        with pytest.raises(NotReady, match=r"is being loaded, for more than 0\.05 s"):
            await task
    assert world.gateway.is_model_ready("a")
    assert readings(loader)["waiting_requests"] == 0
    hangs.unlink()
    await until(lambda: resident(world) == {"a", "b"})
    await world.gateway.lifecycle.close()


async def test_a_server_that_exits_lets_nobody_wait(world: World) -> None:
    hangs = world.root / "a" / "1" / "hangs"
    hangs.touch()
    world.on_demand(100)
    await world.start()
    asking = asyncio.create_task(world.ask("a"))
    await until(lambda: world.states()["a", "1"] == "LOADING")
    world.gateway.begin_exit()
    with pytest.raises(ServerExiting):
        await asking
    hangs.unlink()
    await world.gateway.lifecycle.close()


async def test_what_the_api_unloads_no_request_loads(world: World) -> None:
    world.on_demand(100)
    world.explicit()
    await world.start()
    await world.ask("a")
    for name in ("a", "b"):
        await world.gateway.unload_model(name)
        with pytest.raises(NotFound, match="has no available versions"):
            await world.ask(name)
        assert not world.gateway.is_model_ready(name)
    await world.gateway.load_model("a")
    assert await world.ask("a") == 0
    await world.gateway.lifecycle.close()


async def test_a_model_with_the_config_of_a_request_stays(world: World) -> None:
    world.on_demand(50)
    world.explicit()
    await world.start()
    shown = '{"backend": "toy", "input": [{"name": "A", "data_type": "TYPE_INT32", "dims": [1]}]}'
    await world.gateway.load_model("a", shown)
    with pytest.raises(NotReady):
        await world.ask("b")
    await world.gateway.unload_model("a")
    await world.gateway.load_model("a")
    await world.ask("b")
    await world.gateway.lifecycle.close()


async def test_polling_follows_models_in_memory_and_out_of_it(world: World, toys: list[Toy]) -> None:
    world.on_demand(100)
    await world.start()
    await world.ask("a")
    world.write("a", {"1": 7})
    world.write("b", {"2": 8})
    (world.root / "c" / "config.pbtxt").write_text("backend: 7")
    await world.watcher.poll_once(world)
    assert await world.ask("a") == 7
    assert world.gateway.served_versions("b") == ("2",)
    assert resident(world) == {"a"}
    assert "c" in world.failures
    assert await world.ask("b") == 8
    (world.root / "b").rename(world.root.parent / "gone")
    await world.watcher.poll_once(world)
    with pytest.raises(CharoniaError, match="no available versions"):
        await world.ask("b")
    await world.gateway.lifecycle.close()


async def test_a_wrong_pin_is_refused_with_its_line(world: World) -> None:
    world.write("a", {"1": 0}, PINNED.replace("true", "yes"))
    world.on_demand(100)
    assert not await world.start()
    assert "config.pbtxt:5: parameter 'keep_in_memory' must be true or false, got 'yes'" in world.failures["a"]
    await world.gateway.lifecycle.close()


async def test_arms_of_a_route_are_loaded_when_they_are_chosen_and_counted_once(world: World) -> None:
    world.on_demand(100)
    await world.start()
    world.gateway.routes.replace({"r": Route((RouteArm("a", 0, 1), RouteArm("b", 0, 1)))})
    assert world.gateway.is_model_ready("r")
    assert world.gateway.model_config("r").name == "r"
    assert world.gateway.served_versions("r") == ("1",)
    assert sorted([await world.ask("r") for _ in range(4)]) == [0, 0, 1, 1]
    await world.gateway.lifecycle.close()


async def test_an_arm_that_a_field_chooses_is_loaded_for_it(world: World) -> None:
    world.on_demand(50)
    await world.start()
    rules = (RouteRule(to=RouteTarget("b"), field="tier"),)
    world.gateway.routes.replace({"r": Route((RouteArm("a", 0, 1), RouteArm("b")), rules=rules)})
    assert [await world.ask("r"), await world.ask("r", tier="gold")] == [0, 1]
    assert resident(world) == {"b"}
    assert await world.ask("r", sequence_id=7, sequence_start=True) == 0
    assert await world.ask("r", tier="gold", sequence_id=7, sequence_end=True) == 0
    assert resident(world) == {"a"}
    assert all(not value.in_flight.count for value in world.gateway.registry.entries["a"].loaded_versions.values())
    await world.gateway.lifecycle.close()
