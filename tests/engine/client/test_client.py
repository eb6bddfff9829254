"""A real core process over real sockets, with the fake executor."""

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from charonia.core.errors import InvalidArgument, QueueFull, RequestTimeout, Unavailable
from charonia.core.request import FinishReason, GenerateRequest
from charonia.engine.client import core_supervisor, token_stream
from charonia.engine.client.client import EngineClient
from charonia.engine.client.core_supervisor import DEFAULT_TIMEOUTS, CoreTimeouts
from charonia.engine.client.token_stream import TokenDelta
from charonia.engine.config import CacheConfig, EngineConfig, FakeConfig, KVEventsConfig
from charonia.engine.core.messages import AbortRequests, AddRequest, CoreLoading, EngineLoad, Shutdown
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.sequence import SequenceSpec

from ...waiting import until

BLOCKS = 64
CACHE = CacheConfig(blocks=BLOCKS)
SECONDS = 60.0
Start = Callable[..., Awaitable[EngineClient]]


def config(
    step_seconds: float = 0.0,
    max_num_seqs: int = 32,
    ahead: int = 0,
    state_bytes: int = 0,
    cache: CacheConfig = CACHE,
    **engine: object,
) -> EngineConfig:
    return EngineConfig(
        model="",
        executor="fake",
        cache=cache,
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, ahead=ahead),
        fake=FakeConfig(vocab_size=1000, max_model_len=512, step_seconds=step_seconds, state_bytes=state_bytes),
        **engine,
    )


@pytest.fixture
def sockets(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cores' directories appear."""
    directory = tmp_path_factory.mktemp("s")
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
async def start(sockets: Path) -> AsyncIterator[Start]:
    """Starts engines; at the end nothing of them may be left."""
    clients: list[EngineClient] = []

    async def start(timeouts: CoreTimeouts = DEFAULT_TIMEOUTS, **changes: object) -> EngineClient:
        clients.append(EngineClient(config(**changes), timeouts=timeouts))
        await clients[-1].start()
        return clients[-1]

    yield start
    pids = [pid for client in clients for pid in client.pids]
    for client in clients:
        await client.close()
    assert not any(alive(pid) for pid in pids)
    assert left_in(sockets) == []


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def left_in(directory: Path) -> list[Path]:
    return list(directory.iterdir())


def load(client: EngineClient) -> EngineLoad:
    """The load of its only core after its last step."""
    return client.replicas[0].core.load


def add(prompt: list[int], max_tokens: int = 8, timeout: float = 0.0) -> AddRequest:
    spec = SequenceSpec(key=0, prompt=np.array(prompt, np.int32), max_tokens=max_tokens)
    return AddRequest(spec, timeout=timeout)


async def read_all(
    client: EngineClient, prompt: list[int], max_tokens: int = 8, timeout: float = 0.0
) -> list[TokenDelta]:
    with client.open_stream(add(prompt, max_tokens, timeout)) as channel:
        deltas = [await channel.read()]
        while deltas[-1].finish_reason is None:
            deltas.append(await channel.read())
        return deltas


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("ahead", [0, 1, 2])
async def test_concurrent_requests_get_their_own_tokens(start: Start, ahead: int) -> None:
    client = await start(ahead=ahead)
    firsts = range(100, 900, 25)
    answers = await asyncio.gather(*(read_all(client, [7, first]) for first in firsts))
    assert [tokens(deltas) for deltas in answers] == [list(range(first + 1, first + 9)) for first in firsts]
    assert all(deltas[-1].finish_reason is FinishReason.LENGTH for deltas in answers)
    assert all(delta.finish_reason is None for deltas in answers for delta in deltas[:-1])
    assert client.ready
    assert load(client).free_blocks == BLOCKS


async def test_a_repeated_prompt_is_found_in_the_cache(start: Start) -> None:
    client = await start()
    prompt = list(range(40))
    assert (await read_all(client, prompt))[-1].cached_tokens == 0
    assert (await read_all(client, prompt))[-1].cached_tokens == 32


async def test_the_impossible_is_refused_alone(start: Start) -> None:
    client = await start(step_seconds=0.005)
    running = asyncio.create_task(read_all(client, [1], max_tokens=50))
    for prompt, max_tokens, field in [([], 1, "prompt"), ([1] * 500, 20, "max_tokens")]:
        with pytest.raises(InvalidArgument, match=field) as refusal:
            await read_all(client, prompt, max_tokens)
        assert refusal.value.field == field
    assert len(tokens(await running)) == 50


async def test_a_slow_reader_finds_everything_merged(start: Start) -> None:
    client = await start(step_seconds=0.001)
    with client.open_stream(add([1], max_tokens=100)) as channel:
        first = await channel.read()
        await until(lambda: load(client).running == 0)
        rest = await channel.read()
    assert tokens([first, rest]) == list(range(2, 102))
    assert rest.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("ahead", [0, 1, 2])
async def test_cancelling_the_reader_frees_the_blocks(start: Start, ahead: int) -> None:
    client = await start(step_seconds=0.01, ahead=ahead)
    other = asyncio.create_task(read_all(client, [2], max_tokens=20))
    reader = asyncio.create_task(read_all(client, [1] * 100, max_tokens=400))
    await until(lambda: load(client).running == 2)
    reader.cancel()
    await until(lambda: load(client).running == 1)
    assert not other.done()
    await other
    await until(lambda: load(client).free_blocks == BLOCKS)


async def test_a_full_queue_refuses_and_says_when_to_come_back(start: Start) -> None:
    client = await start(step_seconds=0.01, max_num_seqs=1, max_queued_requests=2)
    tasks = [asyncio.create_task(read_all(client, [1], max_tokens=30))]
    await until(lambda: load(client).running == 1)
    tasks += [asyncio.create_task(read_all(client, [key], max_tokens=2)) for key in (2, 3)]
    await until(lambda: client.admission.waiting.requests == 2)
    with pytest.raises(QueueFull, match="2 requests") as refusal:
        await read_all(client, [4])
    assert refusal.value.retry_after >= 1
    await asyncio.gather(*tasks)
    assert tokens(await read_all(client, [4], max_tokens=1)) == [5]


async def test_a_queue_full_of_tokens_refuses_too(start: Start) -> None:
    client = await start(step_seconds=0.01, max_num_seqs=1, max_queued_tokens=50)
    tasks = [asyncio.create_task(read_all(client, [1], max_tokens=30))]
    await until(lambda: load(client).running == 1)
    tasks.append(asyncio.create_task(read_all(client, [2] * 40, max_tokens=2)))
    await until(lambda: client.admission.waiting.requests == 1)
    with pytest.raises(QueueFull, match="40 prompt tokens"):
        await read_all(client, [4] * 11)
    tasks.append(asyncio.create_task(read_all(client, [3] * 10, max_tokens=2)))
    await asyncio.gather(*tasks)
    assert client.admission.waiting.requests == 0


async def test_a_request_that_is_being_prepared_has_its_place(start: Start) -> None:
    client = await start(max_queued_requests=1)
    request = GenerateRequest(id="1", prompt="")
    with client.admit(request), pytest.raises(QueueFull):
        client.admit(request)
    assert tokens(await read_all(client, [4], max_tokens=1)) == [5]
    assert client.admission.waiting.requests == 0


async def test_what_no_queue_has_room_for_is_refused_for_good_whether_a_core_serves_or_not() -> None:
    client = EngineClient(config(max_queued_requests=1))
    with pytest.raises(InvalidArgument, match="more than may wait: 1"):
        client.admit(GenerateRequest(id="1", prompt="", choice_count=2))
    with pytest.raises(Unavailable, match="not ready"):
        client.admit(GenerateRequest(id="1", prompt=""))


async def test_time_that_runs_out_is_a_finish_reason_or_before_the_first_token_an_error(start: Start) -> None:
    client = await start(step_seconds=0.02, max_num_seqs=1)
    running = asyncio.create_task(read_all(client, [1], max_tokens=400, timeout=2.0))
    await until(lambda: load(client).running == 1)
    with pytest.raises(RequestTimeout, match="Request timeout expired"):
        await read_all(client, [2], timeout=0.1)
    deltas = await running
    assert deltas[-1].finish_reason is FinishReason.TIMEOUT
    assert tokens(deltas) == list(range(2, 2 + len(tokens(deltas))))
    assert client.admission.waiting.requests == 0
    await until(lambda: load(client).free_blocks == BLOCKS)


async def test_a_request_without_a_timeout_has_the_models(start: Start) -> None:
    client = await start(step_seconds=0.02, default_request_timeout=0.3)
    assert (await read_all(client, [1], max_tokens=400))[-1].finish_reason is FinishReason.TIMEOUT


async def test_a_killed_core_ends_its_streams_and_comes_back(start: Start, sockets: Path) -> None:
    client = await start(step_seconds=0.01)
    reader = asyncio.create_task(read_all(client, [1], max_tokens=400))
    await until(lambda: load(client).running == 1)
    [killed] = client.pids
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(Unavailable, match="exit code -9"):
        await reader
    assert not client.ready
    with pytest.raises(Unavailable, match="not ready"):
        await read_all(client, [1])
    await until(lambda: client.ready)
    assert tokens(await read_all(client, [1], max_tokens=3)) == [2, 3, 4]
    assert client.pids != [killed]
    assert not alive(killed)
    assert len(left_in(sockets)) == 1


async def test_a_core_that_hangs_is_killed_and_comes_back(start: Start) -> None:
    client = await start(CoreTimeouts(turn=2.5, hung=1.2, watch=0.1), step_seconds=0.01)
    reader = asyncio.create_task(read_all(client, [1], max_tokens=400))
    await until(lambda: load(client).running == 1)
    [hung] = client.pids
    os.kill(hung, signal.SIGSTOP)
    await until(lambda: not client.ready)
    with pytest.raises(Unavailable):
        await reader
    await until(lambda: client.ready)
    assert not alive(hung)


async def test_a_core_that_hangs_keeps_no_request_beyond_its_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_stream, "_GRACE_SECONDS", 0.01)
    client = await start(step_seconds=0.01)
    [hung] = client.pids
    os.kill(hung, signal.SIGSTOP)
    with pytest.raises(RequestTimeout):
        await read_all(client, [1], timeout=0.01)
    os.kill(hung, signal.SIGCONT)
    assert tokens(await read_all(client, [1], max_tokens=2, timeout=SECONDS)) == [2, 3]


async def test_a_listener_that_raises_stops_no_later_message(sockets: Path, caplog: pytest.LogCaptureFixture) -> None:
    def on_progress(loading: CoreLoading) -> None:
        raise BrokenPipeError("nobody reads it")

    client = EngineClient(config(), on_progress)
    async with asyncio.timeout(SECONDS):
        await client.start()
        assert tokens(await read_all(client, [1], max_tokens=2)) == [2, 3]
    assert "nobody reads it" in caplog.text
    await client.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_to_the_group_are_the_frontends_to_decide(
    started_children: None, start: Start, number: signal.Signals
) -> None:
    client = await start(step_seconds=0.01)
    reader = asyncio.create_task(read_all(client, [1], max_tokens=50))
    await until(lambda: load(client).running == 1)
    os.kill(client.pids[0], number)
    assert tokens(await reader) == list(range(2, 52))


async def test_a_core_is_deaf_to_the_groups_signals_from_its_birth(started_children: None, sockets: Path) -> None:
    client = EngineClient(config())
    starting = asyncio.create_task(client.start())
    await until(lambda: client.pids)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(client.pids[0], number)
    await starting
    await client.close()
    assert left_in(sockets) == []


async def test_what_is_said_before_the_core_has_connected_reaches_it(started_children: None, sockets: Path) -> None:
    core = core_supervisor.CoreProcess(config(), lambda message: None)
    core.send(AbortRequests([1]))
    core.send(Shutdown())
    try:
        assert await asyncio.wait_for(asyncio.shield(core.ended), 60) == 0
    finally:
        await core.stop(0)
    assert left_in(sockets) == []


async def test_loading_tells_its_phases(sockets: Path) -> None:
    heard: list[CoreLoading] = []
    client = EngineClient(config(), heard.append)
    ready = await client.start()
    await client.close()
    assert list(dict.fromkeys(loading.phase for loading in heard)) == ["libraries", "weights", "cache", "warm-up"]
    assert (ready.blocks, ready.vocab_size, ready.max_model_len) == (BLOCKS, 1000, 512)


async def test_a_core_that_says_why_it_cannot_start_fails_the_load(sockets: Path) -> None:
    client = EngineClient(config(max_model_len=4096))
    with pytest.raises(InvalidArgument, match="max_model_len 4096") as refusal:
        await client.start()
    assert refusal.value.field == "max_model_len"
    await client.close()
    assert left_in(sockets) == []


async def test_cores_that_die_without_a_word_fail_the_load(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_supervisor, "main", os.getpid)  # takes no arguments: the process dies of it
    client = EngineClient(config(), timeouts=CoreTimeouts(first_retry=0.01))
    with pytest.raises(Unavailable, match="died 3 times"):
        await client.start()
    await client.close()
    assert left_in(sockets) == []


async def test_sockets_that_cannot_be_made_fail_the_load(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = sockets / ("d" * 120)  # longer than the path of a socket may be
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    client = EngineClient(config())
    with pytest.raises(Unavailable, match="cannot be spawned"):
        await client.start()
    await client.close()
    assert left_in(deep) == []


async def test_closing_ends_streams_and_may_be_repeated(start: Start) -> None:
    client = await start(step_seconds=0.01)
    reader = asyncio.create_task(read_all(client, [1], max_tokens=400))
    await until(lambda: load(client).running == 1)
    await asyncio.gather(client.close(), client.close())
    with pytest.raises(Unavailable, match="stopped"):
        await reader
    assert not client.ready


async def test_closing_while_it_loads(sockets: Path) -> None:
    client = EngineClient(config())
    loading = asyncio.create_task(client.start())
    await until(lambda: client.pids)
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert left_in(sockets) == []


async def test_closing_what_was_never_started() -> None:
    client = EngineClient(config())
    await client.close()
    with pytest.raises(Unavailable):
        await read_all(client, [1])


async def test_a_prompt_begins_with_a_kept_state_and_is_counted(start: Start) -> None:
    few = CacheConfig(blocks=30, state_fraction=0.07, host_bytes=1 << 24)
    client = await start(state_bytes=1 << 16, cache=few)
    prompt = list(range(200))
    answers = [await read_all(client, prompt) for _ in range(2)]
    assert [sum((delta.token_ids for delta in answer), ()) for answer in answers] == [tuple(range(200, 208))] * 2
    assert [answer[0].cached_tokens for answer in answers] == [0, 176]
    await until(lambda: client.state().totals.state_hits == 1)
    state = client.state()
    assert state.totals.prefix_hits == 176
    assert state.state_snapshots >= 1
    assert (state.host_snapshots, state.totals.states_brought_back) == (0, 0)
    assert state.totals.state_evictions == 0
    for other in (300, 600):
        await read_all(client, list(range(other, other + 200)))
    [begun, *_] = await read_all(client, prompt)
    assert begun.cached_tokens == 176
    await until(lambda: client.state().totals.state_hits == 2)
    again = client.state()
    assert (again.totals.states_brought_back, again.totals.restored) == (1, 176)
    assert again.host_snapshots >= 2
    assert again.totals.state_evictions >= 2
    assert state.totals.state_misses == 16  # a prompt's last block is left to what follows it, as SnapshotRule says


def replayed(address: str, topic: str) -> list[list[Any]]:
    """The batches of cache events that a core has published so far."""
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(address)
        dealer.send_multipart([b"", bytes(8)])
        batches: list[list[Any]] = []
        while dealer.poll(10_000):
            _, found, number, payload = dealer.recv_multipart()
            assert found == topic.encode()
            if number == b"\xff" * 8:
                return batches
            batches.append(msgspec.msgpack.decode(payload))
        raise AssertionError("nobody replays")
    finally:
        context.destroy(linger=0)


async def test_every_replica_tells_what_its_cache_holds(start: Start, tmp_path: Path) -> None:
    topic, replay = "kv@127.0.0.1@model", f"ipc://{tmp_path}/replay"
    events = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/events", replay_endpoint=replay, topic=topic
    )
    client = await start(kv_events=events, data_parallel_size=2)
    for first in (100, 200, 300, 400):  # they go to both, for no prefix is anywhere
        await read_all(client, [*range(first, first + 40)], 1)
    await until(lambda: client.state().totals.event_batches >= 4)
    firsts = set()
    for number, address in enumerate((replay, f"{replay}_dp1")):
        batches = await asyncio.to_thread(replayed, address, topic)
        assert {replica for _, _, replica in batches} == {number}
        stored = [event for _, events, _ in batches for event in events if event["type"] == "BlockStored"]
        assert all(len(event["token_ids"]) == 16 * len(event["block_hashes"]) for event in stored)
        firsts |= {event["token_ids"][0] for event in stored if event["token_ids"]} - {0}  # of the warm-up
    assert firsts == {100, 200, 300, 400}
    assert client.state().totals.event_batches_dropped == 0


async def test_an_address_of_events_that_is_taken_is_named(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        events = KVEventsConfig(
            enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/events", replay_endpoint=address
        )
        with pytest.raises(InvalidArgument, match=f"kv_events_config: {address}.*in use"):
            await start(kv_events=events)
