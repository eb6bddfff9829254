"""Versions that routes name: loaded for them, whatever the policy says, and unloaded when none names them."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from charonia.core.errors import Conflict, InvalidArgument
from charonia.repository import routed_versions
from charonia.repository.builder import ModelBuilder
from charonia.repository.gateway import InProcessGateway
from charonia.repository.memory_budget import DeviceMemory, MemoryBudget
from charonia.repository.route_control import RouteControl
from charonia.repository.state_directory import StateDirectory
from charonia.repository.watcher import RepositoryWatcher
from charonia.routing.route import Route, RouteArm

from ..waiting import until
from .conftest import CONFIG, World

MIB = 2**20


class Routed:
    """Model `m` of a world, with three versions, of which the policy serves the last; each needs 10 MiB."""

    def __init__(self, world: World, state: Path) -> None:
        self.world = world
        world.write("m", {"1": 1, "2": 2, "3": 3})
        for number in "123":
            with (world.root / "m" / number / "needs").open("w") as file:
                file.truncate(10 * MIB)
        self.state = StateDirectory(state)

    def serve(self, budget: int = 100 * MIB, on_demand: bool = False) -> None:
        world = self.world
        if on_demand:
            world.on_demand(budget)
        else:
            memory = MemoryBudget(DeviceMemory(lambda: 2**60, limit=budget))
            world.gateway = InProcessGateway(builder=ModelBuilder(budget=memory))
        gateway = world.gateway
        self.control = RouteControl(gateway.routes, gateway.lifecycle, world.catalog, self.state)
        gateway.route_control = self.control
        self.control.restore(world.catalog.read_routes())
        found = gateway.registry, gateway.lifecycle, self.control, gateway.on_demand
        world.watcher = RepositoryWatcher(world.catalog, *found)

    async def put(self, *numbers: int, expect: int | None = None) -> int:
        return await self.control.put("r", Route(tuple(RouteArm("m", number, 1) for number in numbers)), "x", expect)

    @property
    def loaded(self) -> list[str]:
        return list(self.world.gateway.registry.entries["m"].loaded_versions)

    def write_routes(self, text: str) -> None:
        (self.world.root / "routes.yaml").write_text(text)


@pytest.fixture
async def routed(
    world: World, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Routed]:
    monkeypatch.setattr(routed_versions, "_LOOK_SECONDS", 0.001)
    routed = Routed(world, tmp_path_factory.mktemp("state") / "state")
    routed.serve()
    await world.start()
    yield routed
    await world.gateway.lifecycle.close()
    routed.state.close()


async def test_a_version_is_loaded_for_a_route_and_stays_until_none_names_it(routed: Routed) -> None:
    world = routed.world
    assert routed.loaded == ["3"]
    kept = world.gateway.registry.find_loaded("m", "3")
    await routed.put(1, 3)
    assert routed.loaded == ["1", "3"]
    assert world.gateway.registry.find_loaded("m", "3") is kept
    assert await world.ask("m") == 3, "the latest is the policy's"
    assert sorted([await world.ask("r") for _ in range(4)]) == [1, 1, 3, 3]
    await world.watcher.poll_once(world)
    await routed.put(2, 1)
    assert routed.loaded == ["1", "2", "3"]
    await routed.control.put("s", Route((RouteArm("m", 1, 1),)), "x")
    await routed.put(3)
    await until(lambda: routed.loaded == ["1", "3"])
    await routed.control.delete("s", "x")
    await until(lambda: routed.loaded == ["3"])
    assert world.gateway.registry.find_loaded("m", "3") is kept


async def test_a_restart_loads_what_routes_name(routed: Routed) -> None:
    await routed.put(1, 2)
    await routed.world.gateway.lifecycle.close()
    routed.serve()
    await routed.world.start()
    assert routed.loaded == ["1", "2", "3"]
    assert await routed.world.ask("m") == 3


async def test_a_version_stays_while_sequences_go_on(routed: Routed) -> None:
    world = routed.world
    await routed.put(1)
    assert await world.ask("r", sequence_id=7, sequence_start=True) == 1
    await routed.put(3)
    await world.watcher.poll_once(world)
    assert await world.ask("r", sequence_id=7) == 1
    assert await world.ask("r", sequence_id=7, sequence_end=True) == 1
    await until(lambda: routed.loaded == ["3"])


async def test_arms_that_do_not_fit_are_refused_before_anything_changes_with_the_bytes(routed: Routed) -> None:
    await routed.world.gateway.lifecycle.close()
    routed.serve(budget=25 * MIB)
    await routed.world.start()
    await routed.put(1, 3)
    with pytest.raises(
        InvalidArgument, match=r"version 2 needs at least 10.0 MiB of memory and 5.0 MiB of 25.0 MiB is free"
    ):
        await routed.put(1, 2, 3)
    assert routed.control.entry("r").version == 1
    assert routed.loaded == ["1", "3"]


async def test_a_version_that_is_not_there_or_does_not_load_is_refused(routed: Routed) -> None:
    with pytest.raises(InvalidArgument, match="has no version 9"):
        await routed.put(9)
    (routed.world.root / "m" / "2" / "fails").write_text("no good")
    with pytest.raises(InvalidArgument, match="version 2 of model 'm': no good"):
        await routed.put(1, 2)
    assert routed.control.entries() == []
    await until(lambda: routed.loaded == ["3"])
    (routed.world.root / "m" / "2" / "fails").unlink()
    with pytest.raises(Conflict):
        await routed.put(1, expect=3)
    assert routed.loaded == ["3"]


async def test_a_file_loads_what_it_names_before_it_is_served(routed: Routed, caplog: pytest.LogCaptureFixture) -> None:
    world = routed.world
    routed.write_routes("routes: {r: {arms: [{model: m, version: 1, weight: 1}]}}")
    await world.watcher.poll_once(world)
    assert routed.loaded == ["1", "3"]
    assert await world.ask("r") == 1
    (world.root / "m" / "2" / "fails").write_text("no good")
    routed.write_routes("routes: {r: {arms: [{model: m, version: 2, weight: 1}]}}")
    for _ in range(2):
        await world.watcher.poll_once(world)
        assert await world.ask("r") == 1
    told = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert told == ["the routes stay as they are: route 'r': version 2 of model 'm' is not served"]
    (world.root / "m" / "2" / "fails").unlink()
    await world.watcher.poll_once(world)
    assert await world.ask("r") == 2
    await world.watcher.poll_once(world)
    assert routed.loaded == ["2", "3"]


async def test_versions_that_requests_load_are_described_for_a_route(routed: Routed) -> None:
    world = routed.world
    await world.gateway.lifecycle.close()
    routed.serve(on_demand=True)
    await world.start()
    await routed.put(1, 3)
    assert routed.loaded == []
    assert world.gateway.served_versions("m") == ("1", "3")
    assert sorted([await world.ask("r"), await world.ask("r")]) == [1, 3]
    assert await world.ask("m") == 3
    await routed.put(3)
    await until(lambda: routed.loaded == ["3"])


@pytest.mark.parametrize("policy", ["version_policy { specific { versions: [ 1, 2 ] } }", "version_policy { all {} }"])
async def test_what_the_policy_serves_stays(routed: Routed, policy: str) -> None:
    world = routed.world
    world.write("m", {}, CONFIG + policy)
    await world.watcher.poll_once(world)
    served = routed.loaded
    await routed.put(1)
    await routed.put(2)
    await world.watcher.poll_once(world)
    assert routed.loaded == served
