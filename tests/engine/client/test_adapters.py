"""Which adapters the engine holds: names, room and eviction, over an engine that only remembers."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from charonia.core.adapter import Adapter
from charonia.core.errors import InvalidArgument, NotFound, NotReady, RequestTimeout, Unavailable
from charonia.core.request import GenerateRequest
from charonia.core.request_context import RequestContext
from charonia.engine.client import adapters
from charonia.engine.client.adapters import AdapterTable, AdapterUse
from charonia.engine.client.engine import EngineSpec
from charonia.engine.client.model_adapters import ModelAdapters
from charonia.engine.client.sequence_stats import SequenceStats
from charonia.engine.config import LoraConfig
from charonia.telemetry.llm_metrics import LlmMetrics
from charonia.telemetry.metric_families import CHARONIA_FAMILIES, VLLM_FAMILIES

from ...waiting import until


class RememberingEngine:
    """Holds adapters whose digest is their file's text. `gate`: loads wait for it."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.loads: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def load_adapter(self, name: str, path: str) -> Adapter:
        self.loads.append(name)
        await self.gate.wait()
        file = Path(path) / "adapter_model.safetensors"
        if not file.exists():
            raise InvalidArgument(f"there is no {file}", field="lora_path")
        digest = file.read_text()
        if digest not in self.held:
            self.held.append(digest)
        return Adapter(name, path, digest, 8, len(digest))

    async def unload_adapter(self, digest: str) -> None:
        self.held.remove(digest)


class World(NamedTuple):
    """A table with room for 10 bytes, its engine, and a maker of adapters with a content."""

    table: AdapterTable
    engine: RememberingEngine
    make: Callable[[str], str]

    async def use(self, name: str) -> AdapterUse:
        return await self.table.use(name, SequenceStats(LlmMetrics()))

    async def ask(self, name: str) -> str:
        with await self.use(name) as digest:
            assert digest in self.engine.held
            return digest

    def readings(self) -> dict[str, object]:
        return {reading.family: reading.labels or reading.value for reading in self.table.readings()}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    engine = RememberingEngine()

    def make(content: str) -> str:
        directory = tmp_path / content
        directory.mkdir(exist_ok=True)
        (directory / "adapter_model.safetensors").write_text(content)
        return str(directory)

    table = AdapterTable(engine, LoraConfig(max_bytes=10), "base")
    yield World(table, engine, make)
    await table.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_adapter_is_named_and_held_until_it_is_unloaded(world: World) -> None:
    adapter = await world.table.load("sql", world.make("aaaa"))
    assert (dict(world.table.named), world.engine.held) == ({"sql": adapter}, ["aaaa"])
    assert await world.ask("sql") == "aaaa"
    await world.table.unload("sql")
    await until(lambda: world.engine.held == [])
    for lookup in (world.ask("sql"), world.table.unload("sql")):
        with pytest.raises(NotFound, match="adapter 'sql' is not found") as refusal:
            await lookup
        assert refusal.value.field == "lora_name"


async def test_a_name_is_taken_unless_it_is_to_be_replaced(world: World) -> None:
    await world.table.load("sql", world.make("aaaa"))
    with pytest.raises(InvalidArgument, match="The lora adapter 'sql' has already been loaded"):
        await world.table.load("sql", world.make("bbbb"))
    with await world.use("sql") as before:
        await world.table.load("sql", world.make("bbbb"), replace=True)
        assert (before, await world.ask("sql"), world.engine.held) == ("aaaa", "bbbb", ["aaaa", "bbbb"])
    await until(lambda: world.engine.held == ["bbbb"])


async def test_an_adapter_that_does_not_load_changes_nothing(world: World, tmp_path: Path) -> None:
    await world.table.load("sql", world.make("aaaa"))
    for name, replace in (("new", False), ("sql", True)):
        with pytest.raises(InvalidArgument, match="there is no"):
            await world.table.load(name, str(tmp_path / "none"), replace)
    assert await world.ask("sql") == "aaaa"
    assert list(world.table.named) == ["sql"]


async def test_names_of_one_content_share_it(world: World) -> None:
    path = world.make("aaaa")
    await world.table.load("one", path)
    await world.table.load("two", path)
    await world.table.unload("one")
    assert (await world.ask("two"), world.engine.held) == ("aaaa", ["aaaa"])


async def test_what_was_not_named_for_longest_makes_room_and_comes_back(world: World) -> None:
    for content in ("aaaa", "bbbb"):
        await world.table.load(content[0], world.make(content))
    assert await world.ask("a") == "aaaa"
    await world.table.load("c", world.make("cccc"))
    assert world.engine.held == ["aaaa", "cccc"]
    assert await world.ask("b") == "bbbb"
    assert world.engine.held == ["cccc", "bbbb"]
    assert list(world.table.named) == ["a", "b", "c"]
    shown = world.readings()
    assert (shown["charonia_adapters"], shown["charonia_adapters_held"]) == (3, 2)
    assert (shown["charonia_adapters_held_bytes"], shown["charonia_adapter_loads_total"]) == (8, 4)
    assert shown["charonia_adapter_evictions_total"] == 2


async def test_one_in_use_is_not_taken_away_while_another_is_not(world: World) -> None:
    for content in ("aaaa", "bbbb"):
        await world.table.load(content[0], world.make(content))
    with await world.use("a"), await world.use("a"):
        await world.ask("b")
        await world.table.load("c", world.make("cccc"))
        assert world.engine.held == ["aaaa", "cccc"]


async def test_one_that_has_to_wait_for_room_gets_it_before_new_requests_for_what_is_there(world: World) -> None:
    await world.table.load("a", world.make("aaaaaa"))
    await world.table.load("b", world.make("bbbbbb"))
    assert world.engine.held == ["bbbbbb"]
    with await world.use("b"):
        waiting = asyncio.create_task(world.ask("a"))
        await until(lambda: world.readings()["vllm:lora_requests_info"]["waiting_lora_adapters"] == "a,b")
        late = asyncio.create_task(world.ask("b"))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert not late.done()
    assert (await waiting, await late) == ("aaaaaa", "bbbbbb")


async def test_there_may_be_no_room_for_long(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_ROOM_SECONDS", 0.01)
    await world.table.load("a", world.make("aaaaaa"))
    with await world.use("a"):
        with pytest.raises(NotReady, match="no room for another adapter in 10 bytes"):
            await world.table.load("b", world.make("bbbbbb"))
        assert await world.ask("a") == "aaaaaa"


async def test_who_leaves_while_an_adapter_is_read_does_not_keep_it(world: World) -> None:
    await world.table.load("a", world.make("aaaaaa"))
    await world.table.load("b", world.make("bbbbbb"))
    world.engine.gate.clear()
    leaving = asyncio.create_task(world.use("a"))
    await until(lambda: world.engine.loads.count("a") == 2)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    world.engine.gate.set()
    assert await world.ask("b") == "bbbbbb"
    assert world.engine.held == ["bbbbbb"]


async def test_a_request_waits_for_an_adapter_no_longer_than_its_time(world: World) -> None:
    engine = world.engine
    spec = EngineSpec("remembering", "nowhere", connect=lambda *_: None, lora=LoraConfig(max_bytes=10))
    model = ModelAdapters("base", spec, engine)
    for content in ("aaaa", "bbbb", "cccc"):
        await model.load_adapter(content[0], world.make(content))
    assert engine.held == ["bbbb", "cccc"]
    engine.gate.clear()
    request = GenerateRequest(id="", prompt="", adapter="a", timeout=0.01)
    with pytest.raises(RequestTimeout):
        await model.use(request, SequenceStats(LlmMetrics()), RequestContext("test"))
    engine.gate.set()
    request = GenerateRequest(id="", prompt="", adapter="a")
    with await model.use(request, SequenceStats(LlmMetrics()), RequestContext("test")) as digest:
        assert digest == "aaaa"
    for name in "abc":  # nobody uses it any more
        await model.unload_adapter(name)
    await until(lambda: not engine.held)
    await model.close()


async def test_files_that_changed_are_not_taken_for_those_that_were_loaded(world: World) -> None:
    path = world.make("aaaaaa")
    await world.table.load("a", path)
    await world.table.load("b", world.make("bbbbbb"))
    (Path(path) / "adapter_model.safetensors").write_text("cccccc")
    with pytest.raises(Unavailable, match="files of adapter 'a' are not those that were loaded: load it again"):
        await world.ask("a")
    await until(lambda: world.engine.held == [])
    await world.table.load("a", path, replace=True)
    assert await world.ask("a") == "cccccc"
    (Path(path) / "adapter_model.safetensors").unlink()
    assert await world.ask("b") == "bbbbbb"
    with pytest.raises(Unavailable, match="adapter 'a' cannot be read again: there is no"):
        await world.ask("a")


async def test_an_adapter_that_is_unloaded_while_it_is_read_again_is_gone(world: World) -> None:
    await world.table.load("a", world.make("aaaaaa"))
    await world.table.load("b", world.make("bbbbbb"))
    world.engine.gate.clear()
    asking = asyncio.create_task(world.ask("a"))
    await until(lambda: world.engine.loads.count("a") == 2)
    await world.table.unload("a")
    world.engine.gate.set()
    with pytest.raises(NotFound):
        await asking
    await until(lambda: world.engine.held == [])


async def test_one_that_was_unloaded_and_is_loaded_again_while_it_is_used_stays(world: World) -> None:
    path = world.make("aaaa")
    await world.table.load("a", path)
    with await world.use("a"):
        await world.table.unload("a")
        await world.table.load("a", path)
    assert (await world.ask("a"), world.engine.held) == ("aaaa", ["aaaa"])


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_comes_and_goes_every_sequence_has_its_adapter_and_the_room_is_kept(
    world: World, seed: int
) -> None:
    random, names = Random(seed), "abcde"
    most = 0

    async def act(number: int) -> None:
        nonlocal most
        name, directory = random.choice(names), world.make(random.choice(names) * random.randint(1, 4))
        with suppress(NotFound, InvalidArgument, asyncio.CancelledError):
            match random.randrange(10):
                case 0:
                    await world.table.unload(name)
                case 1 | 2:
                    await world.table.load(name, directory, replace=random.random() < 0.5)
                case _:
                    with await world.use(name) as digest:
                        for _ in range(random.randrange(5)):
                            assert digest in world.engine.held
                            most = max(most, sum(map(len, world.engine.held)))
                            await asyncio.sleep(0)

    for name in names:
        await world.table.load(name, world.make(name * 3))
    acts = [asyncio.create_task(act(number)) for number in range(150)]
    for task in acts:
        if random.random() < 0.1:
            task.cancel()
        if random.random() < 0.3:
            await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(*acts, return_exceptions=True), 30)
    assert [task.exception() for task in acts if not task.cancelled() and task.exception()] == []
    for name in list(world.table.named):
        await world.table.unload(name)
    await until(lambda: world.engine.held == [])
    assert 0 < most <= 10 + 4  # one that is read for the first time is counted when it is there


async def test_routers_see_which_adapters_run_and_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = SequenceStats(LlmMetrics())
    for content in ("aaaa", "bbbb"):
        await world.table.load(content[0], world.make(content))
    with await world.table.use("a", stats), await world.use("b"):
        stats.begun = 1.0
        assert world.readings()["vllm:lora_requests_info"] == {
            "max_lora": "8",
            "running_lora_adapters": "a",
            "waiting_lora_adapters": "b",
        }
    families = {family.name for family in (*CHARONIA_FAMILIES, *VLLM_FAMILIES)}
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    since = [
        [reading.value for reading in world.table.readings() if reading.family == "vllm:lora_requests_info"]
        for _ in range(2)
    ]
    monkeypatch.setattr(time, "time", lambda: 6000.0)
    assert since == [[5000.0]] * 2, "nobody uses any since then"
    assert [reading.value for reading in world.table.readings() if reading.family == "vllm:lora_requests_info"] == [
        5000.0
    ]
    assert {reading.family for reading in world.table.readings()} <= families
    sequences = [reading for reading in world.table.readings() if reading.family == "charonia_adapter_sequences_total"]
    assert [(sequence.labels, sequence.value) for sequence in sequences] == [
        ({"adapter": "a"}, 1),
        ({"adapter": "b"}, 1),
    ]
