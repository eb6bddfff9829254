"""Ranks on two machines of a Ray cluster, both of which are this one: one comes and goes. Everything is on loopback."""

import asyncio
import gc
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray", reason="ranks on several machines need Ray: pip install '.[ray]'")

import numpy as np
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray._private.node import Node
from ray.cluster_utils import Cluster

from charonia.core.errors import CharoniaError, InvalidArgument, NotReady, Unavailable
from charonia.engine.client.client import EngineClient
from charonia.engine.config import CacheConfig, EngineConfig, ParallelConfig
from charonia.engine.core.messages import AddRequest
from charonia.engine.parallel.rank_connections import ConnectToken, RankListener
from charonia.engine.parallel.rank_layout import RankLayout
from charonia.engine.parallel.ranks_executor import RanksExecutor
from charonia.engine.parallel.ray_ranks import (
    RankPlacement,
    RankResources,
    RayRanks,
    RayTimeouts,
    interface_of,
    place_ranks,
    rank_resources,
    remote_rank_args,
)
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.scheduler.sequence import SequenceSpec

SECONDS = 60.0
"""Anything here may take so long on a machine that is busy with something else."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # everywhere: a machine's address is loopback
}
NODE = {
    "node_ip_address": "127.0.0.1",
    "num_cpus": 1,
    "object_store_memory": 80 << 20,
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
}
"""A CPU each: two ranks need both."""

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray's own processes


class Machines:
    """A cluster of a head and one more machine."""

    def __init__(self) -> None:
        self._cluster = Cluster(initialize_head=True, head_node_args=NODE)
        self.bring_back()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def take_away(self) -> None:
        """As if its power were cut."""
        self._cluster.remove_node(self._other, allow_graceful=False)

    def bring_back(self) -> None:
        self._other = self._cluster.add_node(**NODE)
        self._cluster.wait_for_nodes()

    def raylets(self) -> list[int]:
        """What starts processes, on each machine."""
        nodes = self._cluster.list_all_nodes()
        return [entry.process.pid for node in nodes for entry in node.all_processes["raylet"]]

    def ranks(self) -> dict[int, int]:
        """Every process that is a rank, and the raylet that started it."""
        return {pid: raylet for raylet in self.raylets() for pid in children(raylet) if "RankActor" in title(pid)}

    def groups(self) -> list[str]:
        """The placement groups that are not removed."""
        table = self._cluster.global_state.placement_group_table()
        return [group["state"] for group in table.values() if group["state"] != "REMOVED"]

    def shutdown(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    scratch = tempfile.mkdtemp(prefix="charonia-ray-", dir="/tmp")  # paths of sockets have little room
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in ENVIRONMENT.items():
            patch.setenv(variable, value)
        patch.setenv("RAY_TMPDIR", scratch)
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)  # the same here, where it was read already
        # Seconds of processor time for what people would look at.
        patch.setattr(Node, "start_api_server", lambda node, **how: None)
        patch.setattr(ray_utils, "get_dashboard_dependency_error", lambda: ImportError("no dashboard"))
        logging.getLogger("ray").setLevel(logging.ERROR)
        machines = Machines()
        try:
            yield machines
        finally:
            machines.shutdown()
            shutil.rmtree(scratch, ignore_errors=True)
    gc.collect()  # what Ray has left open, while warnings of it are expected


@pytest.fixture(scope="module")
def config(checkpoint: Callable[..., Path], machines: Machines) -> Callable[..., EngineConfig]:
    def make(tensor: int = 2, replicas: int = 1, **parallel: Any) -> EngineConfig:
        placed = {"backend": "ray", "ray_address": machines.address} | parallel
        return EngineConfig(
            model=str(checkpoint("llama")),
            device="cpu",
            threads=tensor * placed.get("pipeline", 1),
            parallel=ParallelConfig(tensor=tensor, **placed),
            cache=CacheConfig(block_size=16, blocks=128),
            data_parallel_size=replicas,
        )

    return make


@pytest.fixture(scope="module")
def split(sibling: Callable[[str], ModuleType]) -> Any:
    return sibling("engine/test_split_equality.py")


@pytest.fixture(scope="module")
def expected(config: Callable[..., EngineConfig], split: Any) -> dict[int, list[int]]:
    """What one rank says in this process, to the prompts of all equality tests."""
    executor = InlineExecutor(config(1, backend="mp"))
    try:
        executor.load(lambda phase, fraction: None)
        tokens: dict[int, list[int]] = split.serve(executor, split.ALONE, 1, {}).outcome.tokens
        return tokens
    finally:
        executor.close()


@asynccontextmanager
async def serving(config: EngineConfig, machines: Machines) -> AsyncIterator[EngineClient]:
    """An engine with a rank on each machine; nothing of it may be left."""
    client = EngineClient(config)
    try:
        async with asyncio.timeout(SECONDS):
            await client.start()
        assert sorted(machines.ranks().values()) == sorted(machines.raylets())
        yield client
    finally:
        await client.close()
    await until(lambda: not machines.ranks() and not machines.groups())


@pytest.mark.proof
async def test_ranks_that_share_layers(
    config: Callable[..., EngineConfig], machines: Machines, split: Any, expected: dict[int, list[int]]
) -> None:
    """They say what one says; a machine that is lost ends the streams, and the model serves again when it is back; a
    core that is killed takes its ranks along, wherever they are."""
    async with serving(config(), machines) as client:
        assert await answers(client, split) == expected
        await a_lost_machine_ends_streams(client, machines, split)
        machines.bring_back()
        await until(lambda: client.info is not None)
        assert await answers(client, split) == expected
        await a_killed_core_takes_its_ranks_along(client, machines)


@pytest.mark.proof
async def test_replicas(
    config: Callable[..., EngineConfig], machines: Machines, split: Any, expected: dict[int, list[int]]
) -> None:
    """Each has its one rank where there is room, and takes its part of the requests."""
    async with serving(config(1, replicas=2), machines) as client:
        assert await answers(client, split) == expected
        assert all(replica.totals.prefix_queries for replica in client.replicas)


@pytest.mark.proof
def test_stages(
    config: Callable[..., EngineConfig], machines: Machines, split: Any, expected: dict[int, list[int]]
) -> None:
    executor = RanksExecutor(config(1, pipeline=2), RayRanks)
    try:
        executor.load(lambda phase, fraction: None)
        assert sorted(machines.ranks().values()) == sorted(machines.raylets())
        assert split.serve(executor, split.ALONE, 2, {}).outcome.tokens == expected
    finally:
        executor.close()
    assert machines.groups() == []


async def a_lost_machine_ends_streams(client: EngineClient, machines: Machines, split: Any) -> None:
    readers = [asyncio.create_task(read_for_ever(client, prompt)) for prompt in split.prompts()[:4]]
    await asyncio.sleep(0.1)
    assert not any(reader.done() for reader in readers)
    await asyncio.to_thread(machines.take_away)
    async with asyncio.timeout(SECONDS):
        ends = await asyncio.gather(*readers)
    assert {type(end) for end in ends} == {NotReady}
    assert any(end.message.startswith(("rank 0 of 2 is lost", "rank 1 of 2 is lost")) for end in ends)
    assert client.info is None
    await until(lambda: machines.groups() == ["PENDING"])
    assert machines.ranks() == {}
    assert client.info is None


async def a_killed_core_takes_its_ranks_along(client: EngineClient, machines: Machines) -> None:
    before = machines.ranks()
    assert len(before) == 2
    [core] = client.pids
    os.kill(core, signal.SIGKILL)
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in before))


async def answers(client: EngineClient, split: Any) -> dict[int, list[int]]:
    """To all prompts at once."""
    async with asyncio.timeout(SECONDS):
        read = await asyncio.gather(*(answer(client, prompt, split.NEW) for prompt in split.prompts()))
    return dict(enumerate(read))


async def answer(client: EngineClient, prompt: list[int], count: int) -> list[int]:
    with client.open_stream(
        AddRequest(SequenceSpec(key=0, prompt=np.array(prompt, np.int32), max_tokens=count))
    ) as channel:
        tokens: list[int] = []
        finished = False
        while not finished:
            delta = await channel.read()
            tokens += delta.token_ids
            finished = delta.finish_reason is not None
        return tokens


async def read_for_ever(client: EngineClient, prompt: list[int]) -> CharoniaError:
    try:
        while True:
            await answer(client, prompt, 150)
    except CharoniaError as error:
        return error


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.05)


def test_ranks_for_which_there_is_no_room_are_told(config: Callable[..., EngineConfig], machines: Machines) -> None:
    wanted = r"^4 ranks \(tensor 4, pipeline 1\) want 1 CPU each of the Ray cluster"
    with pytest.raises(Unavailable, match=wanted + r": it had no room for 0.5 s; \d CPU, 0 GPU are free$"):
        RayRanks(config(4), RankLayout(4), RayTimeouts(room=0.5))
    assert machines.groups() == []


async def test_ranks_that_do_not_join_are_named(
    config: Callable[..., EngineConfig], machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They call one who never answers."""
    message = r"^rank 0 of 2 on 127.0.0.1, rank 1 of 2 on 127.0.0.1 did not join within 0.2 s$"
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        monkeypatch.setattr(RankListener, "token", lambda gate, rank: ConnectToken("127.0.0.1", port, bytes(32), rank))
        with pytest.raises(Unavailable, match=message):
            RayRanks(config(), RankLayout(2), RayTimeouts(join=0.2))
        await until(lambda: not machines.ranks() and not machines.groups())


async def test_ranks_that_cannot_call_say_why(
    config: Callable[..., EngineConfig], machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankListener, "token", lambda gate, rank: ConnectToken("127.0.0.1", 1, bytes(32), rank))
    with pytest.raises(Unavailable, match=r"^rank [01] of 2 on 127.0.0.1 did not start: ConnectionRefusedError: "):
        RayRanks(config(), RankLayout(2))
    await until(lambda: not machines.ranks() and not machines.groups())


@pytest.mark.parametrize(
    ("address", "error"),
    {
        "127.0.0.1:1": Unavailable("no Ray cluster answers at 127.0.0.1:1"),
        "ray://127.0.0.1:10001": InvalidArgument("ray_address 'ray://127.0.0.1:10001'", field="ray_address"),
        "here": InvalidArgument("ray_address must be host:port, auto or local, got 'here'", field="ray_address"),
    }.items(),
)
def test_a_cluster_that_is_not_there(config: Callable[..., EngineConfig], address: str, error: CharoniaError) -> None:
    with pytest.raises(type(error), match=error.message) as raised:
        RayRanks(config(ray_address=address), RankLayout(2))
    assert raised.value.field == error.field


def children(pid: int) -> list[int]:
    """Living child processes; /proc lists them per thread."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def title(pid: int) -> str:
    """Nothing of a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


TOKEN = ConnectToken("a", 1, b"", 0)
CPUS, GPUS = {"CPU": 64.0, "GPU": 0.0}, {"CPU": 64.0, "GPU": 8.0}


@pytest.mark.parametrize(
    ("device", "resources", "asked"),
    [
        ("auto", CPUS, RankResources(0, 4, 4)),
        ("auto", GPUS, RankResources(1, 0, 4)),
        ("cpu", GPUS, RankResources(0, 4, 4)),
        ("cuda", CPUS, RankResources(1, 0, 4)),
    ],
)
def test_a_rank_asks_for_a_gpu_or_for_its_threads(
    device: str, resources: dict[str, float], asked: RankResources
) -> None:
    config = EngineConfig(model="m", device=device, threads=8)
    assert rank_resources(config, RankLayout(2), resources) == asked


def test_a_rank_asks_for_something() -> None:
    asked = rank_resources(EngineConfig(model="m", device="cpu", threads=1), RankLayout(2), CPUS)
    assert (asked.bundle, str(asked)) == ({"CPU": 1.0}, "1 CPU")


def test_no_gpu_can_be_named_for_all() -> None:
    with pytest.raises(InvalidArgument, match="'cuda:1' names one GPU") as raised:
        rank_resources(EngineConfig(model="m", device="cuda:1"), RankLayout(2), GPUS)
    assert raised.value.field == "device"


def test_a_stage_is_put_together_where_bundles_are_not() -> None:
    """Two stages of two, each in both machines as Ray has put them."""
    assert place_ranks(["a", "b", "a", "b"]) == [
        RankPlacement(0, "a", 0, 2),
        RankPlacement(2, "a", 1, 2),
        RankPlacement(1, "b", 0, 2),
        RankPlacement(3, "b", 1, 2),
    ]


def test_the_machine_with_the_most_comes_first() -> None:
    assert [place.host for place in place_ranks(["a", "b", "b"])] == ["b", "b", "a"]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=16))
def test_every_rank_has_a_bundle_of_its_own(hosts: list[str]) -> None:
    found = place_ranks(hosts)
    assert sorted(place.bundle for place in found) == list(range(len(hosts)))
    assert all(hosts[place.bundle] == place.host for place in found)
    changes = sum(before.host != after.host for before, after in pairwise(found))
    assert changes == len(set(hosts)) - 1, "a machine's ranks are not neighbours"
    for host in set(hosts):
        here = [place for place in found if place.host == host]
        assert [place.local_rank for place in here] == list(range(len(here)))
        assert {place.local_ranks for place in here} == {len(here)}


def test_a_rank_on_cpus_shares_its_machine_with_those_of_all_replicas() -> None:
    config = EngineConfig(model="m", threads=8, data_parallel_size=2, replica=1, host_memory=1 << 30)
    asked, place = RankResources(0, 4, 4), RankPlacement(0, "a", 0, 2)
    own, (*_, local, sharing), _, _ = remote_rank_args(config, asked, RankLayout(2), place, TOKEN)
    assert (local, sharing, own.threads // sharing, own.device, own.host_memory) == (0, 4, 4, "cpu", None)


def test_a_rank_on_a_gpu_sees_one_and_has_it_for_itself() -> None:
    config = EngineConfig(model="m", device="cuda", threads=8, data_parallel_size=2, replica=1)
    asked, place = RankResources(1, 0, 4), RankPlacement(1, "a", 1, 2)
    own, (*_, local, sharing), _, _ = remote_rank_args(config, asked, RankLayout(2), place, TOKEN)
    assert (local, sharing) == (0, 1)
    assert (own.threads, own.device, own.data_parallel_size, own.replica) == (4, "cuda:0", 1, 0)


def test_an_address_tells_its_interface() -> None:
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    assert interface_of("192.0.2.77") is None
