"""Adapters of an engine client, over real core processes with the fake executor."""

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType

import pytest

from charonia.core.errors import InvalidArgument, NotFound, NotReady
from charonia.core.request import FinishReason
from charonia.engine.config import CacheConfig, EngineConfig, FakeConfig, LoraConfig
from charonia.engine.core.messages import AddRequest
from charonia.engine.frontend.client import EngineClient

from ...waiting import until

LAYERS = {"model.layers.0.self_attn.q_proj": (8, 8)}
ENABLED = LoraConfig()
Start = Callable[..., Awaitable[EngineClient]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    clients: list[EngineClient] = []

    async def start(lora: LoraConfig | None = ENABLED, **changes: int) -> EngineClient:
        fake, cache = FakeConfig(vocab_size=1000, max_model_len=512, step_seconds=0.002), CacheConfig(blocks=64)
        config = EngineConfig(model="", executor="fake", cache=cache, fake=fake, lora=lora, **changes)
        clients.append(EngineClient(config))
        await clients[-1].start()
        return clients[-1]

    yield start
    for client in clients:
        await client.close()


@pytest.fixture
def write(sibling: Callable[[str], ModuleType], tmp_path: Path) -> Callable[[int], str]:
    adapters = sibling("adapters.py")
    return lambda seed: str(adapters.write_adapter(tmp_path / str(seed), LAYERS, seed))


async def read_all(client: EngineClient, adapter: str) -> FinishReason | None:
    with client.open_stream(AddRequest(key=0, prompt=[1], max_tokens=4, adapter=adapter)) as channel:
        while (reason := (await channel.read()).finish_reason) is None:
            pass
    return reason


async def test_adapters_come_go_and_survive_a_core(start: Start, write: Callable[[int], str]) -> None:
    client = await start()
    first, again = [await client.load_adapter(name, write(1)) for name in ("a", "b")]
    second = await client.load_adapter("c", write(2))
    assert (first.name, again.name) == ("a", "b")
    assert first.digest == again.digest != second.digest
    assert await read_all(client, first.digest) == FinishReason.LENGTH
    await client.unload_adapter(first.digest)
    with pytest.raises(NotReady):
        await read_all(client, first.digest)
    [killed] = client.pids
    os.kill(killed, signal.SIGKILL)
    await until(lambda: client.ready and client.pids != [killed] and second.digest in client.replicas[0].adapters)
    assert await read_all(client, second.digest) == FinishReason.LENGTH
    assert first.digest not in client.replicas[0].adapters


async def test_sequences_in_flight_end_with_an_adapter_that_was_unloaded(
    start: Start, write: Callable[[int], str]
) -> None:
    client = await start()
    adapter = await client.load_adapter("a", write(1))
    with client.open_stream(AddRequest(key=0, prompt=[1], max_tokens=40, adapter=adapter.digest)) as channel:
        await channel.read()
        await client.unload_adapter(adapter.digest)
        while (delta := await channel.read()).finish_reason is None:
            pass
    assert delta.finish_reason == FinishReason.LENGTH
    assert await read_all(client, "") == FinishReason.LENGTH


async def test_files_that_are_wrong_are_refused_and_every_replica_is_as_before(
    start: Start, write: Callable[[int], str], tmp_path: Path
) -> None:
    client = await start(LoraConfig(max_rank=4), data_parallel_size=2)
    with pytest.raises(InvalidArgument, match="max_lora_rank 4, got 8"):
        await client.load_adapter("a", write(1))
    with pytest.raises(NotFound):
        await client.load_adapter("a", str(tmp_path / "nowhere"))
    assert not any(digest for replica in client.replicas for digest in replica.adapters)


async def test_without_lora_adapters_are_refused(start: Start, write: Callable[[int], str]) -> None:
    with pytest.raises(InvalidArgument, match="enable_lora"):
        await (await start(None)).load_adapter("a", write(1))
