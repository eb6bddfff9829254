"""Cores that share a directory of cached blocks and states: processes of their own, with the fake executor, which
refuses a block that holds another sequence's tokens."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from charonia.core.errors import InvalidArgument
from charonia.engine.client.client import EngineClient
from charonia.engine.config import CacheConfig, EngineConfig, FakeConfig
from charonia.engine.core.messages import AddRequest
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.sequence import SequenceSpec

from ...waiting import until

PROMPT = range(200)
Start = Callable[..., Awaitable[EngineClient]]


def config(directory: Path, state_bytes: int = 0, dir_bytes: int = 1 << 30, blocks: int = 64) -> EngineConfig:
    return EngineConfig(
        model="fake",
        executor="fake",
        cache=CacheConfig(blocks=blocks, directory=str(directory), directory_bytes=dir_bytes, state_fraction=0.2),
        scheduler=SchedulerConfig(max_num_seqs=8),
        fake=FakeConfig(
            vocab_size=1000, max_model_len=512, state_bytes=state_bytes, step_seconds=0.001, token_seconds=0.001
        ),
    )


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    clients: list[EngineClient] = []

    async def start(**changes: int) -> EngineClient:
        clients.append(EngineClient(config(tmp_path / "kv", **changes)))
        await clients[-1].start()
        return clients[-1]

    yield start
    for client in clients:
        await client.close()


async def ask(client: EngineClient, prompt: range = PROMPT, **spec: object) -> tuple[list[int], int, str]:
    """The new tokens, how many of the prompt were cached, and why it ended."""
    tokens = np.array(prompt, np.int32)
    request = AddRequest(SequenceSpec(key=0, prompt=tokens, max_tokens=4, **spec))
    with client.open_stream(request) as channel:
        deltas = [await channel.read()]
        while deltas[-1].finish_reason is None:
            deltas.append(await channel.read())
    new = [token for delta in deltas for token in delta.token_ids]
    return new, deltas[0].cached_tokens or 0, str(deltas[-1].finish_reason)


def counted(client: EngineClient, name: str) -> float:
    return client.state().totals.directory.get(name, 0)


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


async def test_a_start_is_warm_and_servers_find_what_the_other_wrote(start: Start, tmp_path: Path) -> None:
    first = await start()
    assert await ask(first, cache_hit_threshold=0.5) == ([], 0, "cache_threshold")
    answer, cached, _ = await ask(first)
    assert (answer, cached) == ([200, 201, 202, 203], 0)
    assert await ask(first, range(400), cache_hit_threshold=0.8) == ([], 192, "cache_threshold")
    await ask(first, tenant="a", salt="s")
    await first.close()  # what waits is written
    assert len(files(tmp_path)) == 24
    second, third = await start(), await start()
    assert await ask(second, cache_hit_threshold=0.9) == (answer, 192, "length")
    assert (await ask(second))[1] == 192
    await until(lambda: counted(second, "read") >= 12)
    assert counted(second, "fetched") == 1
    assert (second.state().totals.landed, second.state().totals.restored) == (192, 0)
    assert (await ask(second, tenant="b", salt="s"))[1] == 0
    assert (await ask(second, tenant="a"))[1] == 0
    assert (await ask(second, tenant="a", salt="s"))[1] == 192
    await ask(second, range(500, 640))
    await until(lambda: counted(second, "written") == 8 + 2 * 12)
    assert (await ask(third, range(500, 640)))[1] == 128
    for path in files(tmp_path):
        path.write_bytes(b"damage")
    assert await ask(third) == (answer, 0, "length")
    await until(lambda: counted(third, "damaged") >= 1)


async def test_states_come_with_their_blocks_and_no_other_model_finds_them(start: Start, tmp_path: Path) -> None:
    first = await start(state_bytes=1 << 16)
    answer, *_ = await ask(first)
    await first.close()
    second = await start(state_bytes=1 << 16)
    assert await ask(second) == (answer, 176, "length")
    assert second.state().totals.state_hits == 1
    other = await start(dir_bytes=1 << 18)  # images of the fake executor are small, what it says of a block is not
    assert (await ask(other))[1] == 0
    for begin in range(0, 800, 200):
        await ask(other, range(begin, begin + 200))
    await other.close()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 1 << 18


async def test_a_directory_without_room_for_a_block_is_refused(start: Start) -> None:
    with pytest.raises(InvalidArgument, match="a block of 16 tokens takes 65536 bytes, and kv_cache_dir_bytes is 4096"):
        await start(dir_bytes=4096)
