"""Memory that models hold: refused naming the largest holders, given back at unload; promises count."""

import asyncio
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from charonia.core.backends import TextBackend
from charonia.core.errors import CharoniaError, InvalidArgument, Unavailable, Unsupported
from charonia.core.media_models import MediaConfig, MediaPart, MediaServices, TowerSpec
from charonia.core.metrics import Reading
from charonia.core.model import Capabilities, MemoryNeed, ModelConfig, ReservedMemory
from charonia.repository import backend_registry, lifecycle
from charonia.repository import builder as builders
from charonia.repository import memory_budget as budgets
from charonia.repository.builder import ModelBuilder
from charonia.repository.config_io import complete_fields
from charonia.repository.gateway import InProcessGateway
from charonia.repository.memory_budget import DeviceMemory, MemoryBudget
from charonia.repository.model_source import ModelSource, VersionSource
from charonia.repository.watcher import RepositoryWatcher

from ..waiting import until
from .conftest import CONFIG, Toy, World

MIB = 2**20


class Growing:
    """A model that takes its memory bit by bit."""

    def __init__(self, promised: int, resident: int) -> None:
        self.promised = promised
        self.resident = resident

    def reserved_memory(self) -> ReservedMemory:
        return ReservedMemory(self.promised, self.resident)


def test_what_does_not_fit_is_refused_naming_the_largest() -> None:
    free = 100 * MIB
    budget = MemoryBudget(DeviceMemory(lambda: free))
    for version, size in (("1", 30), ("2", 60), ("3", 10), ("4", 5)):
        last = budget.reserve("m", version, [MemoryNeed(size * MIB)])
        last.finish_loading(None)
    free = 3 * MIB
    with pytest.raises(Unavailable) as caught:
        budget.reserve("n", "1", [MemoryNeed(4 * MIB)])
    assert caught.value.message == (
        "model 'n' version 1 needs at least 4.0 MiB of memory and 3.0 MiB is free; most is held by "
        "'m' version 2 (60.0 MiB), 'm' version 1 (30.0 MiB), 'm' version 3 (10.0 MiB)"
    )
    last.release()
    last.release()
    assert budget.host.reserved == 100 * MIB


def test_a_limit_is_for_all_of_them_together() -> None:
    budget = MemoryBudget(DeviceMemory(lambda: 100 * MIB, limit=10 * MIB))
    first = budget.reserve("m", "1", [MemoryNeed(3 * MIB), MemoryNeed(4 * MIB)])
    assert budget.host.available == 3 * MIB
    with pytest.raises(Unavailable, match=r"4.0 MiB of memory and 3.0 MiB of 10.0 MiB is free; .* 'm' version 1 \(7.0"):
        budget.reserve("n", "1", [MemoryNeed(4 * MIB)])
    first.release()
    assert budget.host.available == 10 * MIB


def test_what_was_promised_is_not_free_until_it_is_taken_and_counted_by_the_kernel() -> None:
    free = 100
    host = DeviceMemory(lambda: free)
    hold = MemoryBudget(host).reserve("llm", "1", [MemoryNeed(20)])
    free = 80
    assert host.available == 60  # how much of it the model has by now, nobody knows
    model = Growing(promised=60, resident=20)
    hold.finish_loading(model)
    assert (host.reserved, host.available) == (60, 40)
    model.resident, free = 50, 50
    assert host.available == 40
    model.resident, free = 70, 30
    assert host.available == 30
    hold.release()
    assert (host.reserved, host.available) == (0, 30)


def test_a_model_holds_no_less_than_it_stated() -> None:
    host = DeviceMemory(lambda: 100)
    hold = MemoryBudget(host).reserve("m", "1", [MemoryNeed(20)])
    hold.finish_loading(None)
    assert host.reserved == 20
    hold.finish_loading(Growing(promised=10, resident=0))
    assert host.reserved == 20


class Cards:
    """Two GPUs as their driver tells of them."""

    def __init__(self, *free: int) -> None:
        self.free = [size * MIB for size in free]
        memories = {gpu: DeviceMemory(lambda gpu=gpu: self.free[gpu], None, gpu) for gpu in range(len(free))}
        self.budget = MemoryBudget(DeviceMemory(lambda: 1000 * MIB), memories)
        self.memories = memories


def test_a_gpu_refuses_by_its_number_and_its_own_holders() -> None:
    cards = Cards(100, 50)
    cards.budget.reserve("on-both", "1", [MemoryNeed(8 * MIB), MemoryNeed(40 * MIB, 0), MemoryNeed(20 * MIB, 1)])
    cards.budget.reserve("on-0", "1", [MemoryNeed(30 * MIB, 0)])
    cards.free = [30 * MIB, 30 * MIB]
    with pytest.raises(Unavailable) as caught:
        cards.budget.reserve("n", "2", [MemoryNeed(5 * MIB), MemoryNeed(20 * MIB, 0), MemoryNeed(31 * MIB, 1)])
    assert caught.value.message == (
        "model 'n' version 2 needs at least 31.0 MiB of memory of GPU 1 and 30.0 MiB is free; most is held by "
        "'on-both' version 1 (20.0 MiB)"
    )
    # What it had of the other memories already, it has no more.
    assert [memory.reserved // MIB for memory in (cards.budget.host, *cards.memories.values())] == [8, 70, 20]


def test_of_a_gpu_a_model_holds_what_was_free_before_it_loaded() -> None:
    cards = Cards(100, 50)
    hold = cards.budget.reserve("llm", "1", [MemoryNeed(10 * MIB, 0)])
    cards.free[0] -= 70 * MIB  # weights, a cache, a context
    hold.finish_loading(Growing(promised=7, resident=0))
    with pytest.raises(Unavailable, match=r"31.0 MiB of memory of GPU 0 and 30.0 MiB is free; .* 'llm' .* \(70.0 MiB"):
        cards.budget.reserve("n", "1", [MemoryNeed(31 * MIB, 0)])
    hold.release()
    assert cards.memories[0].reserved == 0


def test_who_holds_what_is_measured() -> None:
    cards = Cards(100, 50)
    for _ in range(2):  # one that replaces itself
        cards.budget.reserve("m", "3", [MemoryNeed(1), MemoryNeed(2 * MIB, 1)])
    cards.budget.reserve("n", "1", [])
    assert [(*measurement.labels.values(), measurement.readings[0]) for measurement in cards.budget.measurements()] == [
        ("m", "3", Reading("charonia_memory_held_bytes", 2, {"memory": "host"})),
        ("n", "1", Reading("charonia_memory_held_bytes", 0, {"memory": "host"})),
        ("m", "3", Reading("charonia_memory_held_bytes", 4 * MIB, {"memory": "gpu1"})),
    ]


def test_what_somebody_else_gave_back_meanwhile_is_no_ones_debt() -> None:
    cards = Cards(100)
    hold = cards.budget.reserve("m", "1", [MemoryNeed(10 * MIB, 0)])
    cards.free[0] += 50 * MIB
    hold.finish_loading(None)
    assert cards.memories[0].reserved == 10 * MIB


def test_a_gpu_that_is_not_there_limits_nothing() -> None:
    cards = Cards(100, 50)
    cards.budget.reserve("m", "1", [MemoryNeed(1000 * MIB, 7)]).release()
    grants = [cards.budget.grant([MemoryNeed(1, gpu) for gpu in gpus], 1) for gpus in ((0, 1), (0, 7), (7,))]
    assert [grant.get("gpu_memory") for grant in grants] == [50 * MIB, 100 * MIB, None]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What is free on each GPU of a machine that has two."""
    free = {0: 100, 1: 60}

    class Driver:
        def free(self, gpu: int) -> int:
            return free[gpu]

    monkeypatch.setattr(budgets, "Gpus", Driver)
    for module in (budgets, builders):
        monkeypatch.setattr(module, "usable_gpus", lambda: tuple(free))
    return free


async def test_instance_groups_say_which_gpu_holds(tmp_path: Path, toys: list[Toy], driver: dict[int, int]) -> None:
    world = World(tmp_path)
    world.gateway = InProcessGateway(builder=ModelBuilder(budget=MemoryBudget.of_machine(limit=None, gpu_limit=90)))
    world.explicit()
    groups = {"first": "gpus: 0", "second": "gpus: 1", "both": "gpus: [0, 1]"}
    for name, gpus in groups.items():
        group = f"instance_group {{ kind: KIND_GPU {gpus} }}"
        (world.write(name, {"1": 1}, CONFIG + group) / "1" / "needs").write_bytes(bytes(55))
    await world.gateway.load_model("first")
    await world.gateway.load_model("second")
    with pytest.raises(CharoniaError, match=r"memory of GPU 0 and .* of 0.0 MiB is free; most is held by 'first'"):
        await world.gateway.load_model("both")
    await world.gateway.unload_model("first")
    with pytest.raises(CharoniaError, match=r"memory of GPU 1 and .* is free; most is held by 'second'"):
        await world.gateway.load_model("both")
    await world.gateway.lifecycle.close()
    assert [toy.unloaded for toy in toys] == [True, True]


async def test_an_undecided_model_counts_where_it_will_go(
    tmp_path: Path, toys: list[Toy], driver: dict[int, int]
) -> None:
    """KIND_AUTO is every GPU that there is."""
    world = World(tmp_path)
    world.gateway = InProcessGateway(builder=ModelBuilder(budget=MemoryBudget.of_machine(limit=None, gpu_limit=None)))
    world.explicit()
    (world.write("m", {"1": 1}) / "1" / "needs").write_bytes(bytes(61))
    with pytest.raises(CharoniaError, match=r"needs at least 0\.0 MiB of memory of GPU 1"):
        await world.gateway.load_model("m")


async def leaving(tmp_path: Path) -> "tuple[World, asyncio.Task[int]]":
    """Beside "a", which leaves but still answers, there is no room for "b"."""
    world = World(tmp_path)
    world.gateway = InProcessGateway(builder=ModelBuilder(budget=MemoryBudget(DeviceMemory(lambda: 100, limit=100))))
    world.explicit()
    for name in ("a", "b"):
        (world.write(name, {"1": 7}) / "1" / "needs").write_bytes(bytes(60))
    await world.gateway.load_model("a")
    running = asyncio.create_task(world.ask("a", wait=True))
    await asyncio.sleep(0)
    await world.gateway.unload_model("a")
    return world, running


async def test_what_does_not_fit_waits_for_those_that_leave(tmp_path: Path, toys: list[Toy]) -> None:
    world, running = await leaving(tmp_path)
    loading = asyncio.create_task(world.gateway.load_model("b"))
    assert not (await asyncio.wait([loading], timeout=0.1))[0]
    toys[0].go.set()
    await loading
    assert (await running, await world.ask("b")) == (7, 7)


async def test_nobody_waits_for_ever(tmp_path: Path, toys: list[Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_UNLOAD_WAIT", 0.01)
    world, running = await leaving(tmp_path)
    with pytest.raises(CharoniaError, match="most is held by 'a' version 1"):
        await world.gateway.load_model("b")
    toys[0].go.set()
    assert await running == 7


class Greedy(Toy):
    """A model that is granted memory and needs half of it."""

    def __init__(
        self, written: ModelConfig, path: str, parameters: object, on_progress: object, memory: int = 0
    ) -> None:
        super().__init__(ModelConfig(written.name, written.version, "greedy"), None, Path(path))
        self.granted = memory
        self.capabilities = Capabilities(memory=self)

    def reserved_memory(self) -> ReservedMemory:
        return ReservedMemory(self.granted // 2, 0)


GREEDY = TextBackend(Greedy, lambda *_: (MemoryNeed(100),))  # type: ignore[arg-type]
"""As a package brings it."""


@pytest.fixture
def greedy(tmp_path: Path, toys: list[Toy], two_at_once: None, monkeypatch: pytest.MonkeyPatch) -> World:
    """A repository of two of them, whose loads hang, over 1000 bytes of memory; they state 100 each."""
    entry = EntryPoint("greedy", f"{__name__}:GREEDY", "charonia.backends")
    entries = {"charonia.backends": {entry.name: entry}}
    monkeypatch.setattr(backend_registry, "installed_extensions", lambda group: entries.get(group, {}))
    world = World(tmp_path)
    world.gateway = InProcessGateway(builder=ModelBuilder(budget=MemoryBudget(DeviceMemory(lambda: 1000))))
    world.watcher = RepositoryWatcher(world.catalog, world.gateway.registry, world.gateway.lifecycle)
    world.explicit()
    for name in "ab":
        (world.write(name, {"1": 1}, 'backend: "greedy"') / "1" / "hangs").touch()
    return world


async def test_those_that_load_together_divide_what_is_left(greedy: World) -> None:
    host = greedy.gateway.lifecycle._builder.budget.host
    starting = asyncio.create_task(greedy.start())
    await until(lambda: len(host.reservations) == 2)
    assert sorted(claim.reserved for claim in host.reservations) == [450, 550]
    assert sorted(claim.size for claim in host.reservations) == [100, 100]
    for name in "ab":
        (greedy.root / name / "1" / "hangs").unlink()
    assert await starting
    assert host.reserved == 275 + 225
    await greedy.gateway.lifecycle.close()


class Eyes:
    """What serves images, as far as its memory goes."""

    needs = (MemoryNeed(200), MemoryNeed(50))


class Seeing(Greedy):
    """A greedy model that sees."""

    def __init__(self, *arguments: object, media: MediaServices, **granted: int) -> None:
        super().__init__(*arguments, **granted)  # type: ignore[arg-type]
        assert isinstance(media.encoder, Eyes)


PART = MediaPart(MediaConfig(), TowerSpec("there"))


def test_a_tower_is_counted_beside_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: Any = MediaServices(Eyes(), Eyes())  # type: ignore[arg-type]
    monkeypatch.setattr(builders, "media_services", lambda *_: served)
    builder = ModelBuilder(budget=MemoryBudget(DeviceMemory(lambda: 1000)))
    backend = TextBackend(Seeing, lambda *_: (MemoryNeed(100),), find_media_part=lambda *_: PART)  # type: ignore[arg-type]
    config = complete_fields({"name": "m", "backend": "seeing"})
    (tmp_path / "answer").write_text("7")
    version = VersionSource("1", str(tmp_path))
    source = ModelSource("m", config, (version,))
    factory = builder._prepare_text_model(backend, source, version, 1)
    [host] = factory.reservation.claims
    assert (host.reserved, host.size) == (1000, 350)
    model: Any = factory.build(lambda *_: None)
    assert model.granted == 750
    factory.reservation.release()

    def refuse(*_: object) -> MediaServices:
        raise Unsupported("images of the family 'x' are not served")

    monkeypatch.setattr(builders, "media_services", refuse)
    blind = TextBackend(Greedy, lambda *_: (MemoryNeed(100),), find_media_part=lambda *_: PART)  # type: ignore[arg-type]
    assert builder._prepare_text_model(blind, source, version, 1).reservation.claims[0].size == 100


async def test_one_that_failed_leaves_the_memory_to_the_next(greedy: World) -> None:
    wrong = 'backend: "greedy" metric_tags { key: "a-b" value: "" }'
    greedy.write("a", {"1": 1}, wrong)
    with pytest.raises(InvalidArgument, match="'metric_tags' of a must be"):
        await greedy.gateway.load_model("a")
    (greedy.root / "b" / "1" / "hangs").unlink()
    await greedy.gateway.load_model("b")
    assert greedy.gateway.lifecycle._builder.budget.host.reserved == 500
    await greedy.gateway.lifecycle.close()


async def test_what_does_not_fit_waits_for_those_that_load(greedy: World) -> None:
    """Until they have said what they need, all of it is theirs."""
    host = greedy.gateway.lifecycle._builder.budget.host
    (greedy.write("c", {"1": 1}) / "1" / "needs").write_bytes(bytes(10))
    first = asyncio.create_task(greedy.gateway.load_model("a"))
    await until(lambda: not host.available)
    second, third = (asyncio.create_task(greedy.gateway.load_model(name)) for name in "bc")
    assert not (await asyncio.wait([first, second, third], timeout=0.1))[0]
    (greedy.root / "a" / "1" / "hangs").unlink()
    await first
    await until(lambda: {claim.name for claim in host.reservations} >= {"a", "b"})
    (greedy.root / "b" / "1" / "hangs").unlink()
    await asyncio.gather(second, third)
    held = {claim.name: claim.size for claim in host.reservations}
    assert held in ({"a": 500, "b": 250, "c": 10}, {"a": 500, "b": 245, "c": 10}), "who came first after a"
    await greedy.gateway.lifecycle.close()


async def test_models_hold_and_give_back(tmp_path: Path, toys: list[Toy]) -> None:
    world, host = World(tmp_path), DeviceMemory(lambda: 100, limit=105)
    world.gateway = InProcessGateway(builder=ModelBuilder(budget=MemoryBudget(host)))
    world.explicit()
    for name, size in (("a", 60), ("b", 40), ("c", 101)):
        (world.write(name, {"1": 1}) / "1" / "needs").write_bytes(bytes(size))
    (tmp_path / "b" / "1" / "fails").write_text("no weights")
    await world.gateway.load_model("a")
    with pytest.raises(Exception, match="no weights"):
        await world.gateway.load_model("b")
    assert host.reserved == 60
    with pytest.raises(Exception, match=r"version 1 needs at least .* of memory .* most is held by 'a' version 1"):
        await world.gateway.load_model("c")
    await world.gateway.lifecycle.close()
    assert host.reserved == 0
    assert [toy.unloaded for toy in toys] == [True]
