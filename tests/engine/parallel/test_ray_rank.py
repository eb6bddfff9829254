"""The resources and places of ranks on a cluster, as numbers: no Ray is needed."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.errors import InvalidArgument
from charonia.engine.config import EngineConfig, ParallelConfig
from charonia.engine.core import process
from charonia.engine.core.process import build_executor
from charonia.engine.parallel.layout import RankLayout
from charonia.engine.parallel.rank_connections import ConnectToken
from charonia.engine.parallel.ray_rank import (
    RankPlacement,
    RankResources,
    interface_of,
    place_ranks,
    rank_resources,
    remote_rank_args,
)

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


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "charonia.engine.parallel.ray_ranks", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(process, "open_checkpoint", lambda model: SimpleNamespace(spec=None, directory=model))
    monkeypatch.setattr(process, "check_partition", lambda *arguments: None)
    with pytest.raises(InvalidArgument, match=r"needs Ray \(ray\): pip install 'charonia\[ray\]'") as raised:
        build_executor(EngineConfig(model="m", parallel=ParallelConfig(backend="ray")))
    assert raised.value.field == "distributed_executor_backend"


@pytest.mark.parametrize(("executor", "backend"), [("inline", "ray"), ("fake", "ray"), ("ranks", "slurm")])
def test_backends_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, executor: str, backend: str) -> None:
    monkeypatch.setattr(process, "open_checkpoint", lambda model: SimpleNamespace(spec=None, directory=model))
    monkeypatch.setattr(process, "check_partition", lambda *arguments: None)
    with pytest.raises(InvalidArgument, match=backend) as raised:
        build_executor(EngineConfig(model="m", executor=executor, parallel=ParallelConfig(backend=backend)))
    assert raised.value.field == "distributed_executor_backend"
