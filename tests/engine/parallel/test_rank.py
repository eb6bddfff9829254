"""A rank's device: its own GPU, by its index, wherever one is asked for."""

from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from charonia.engine.config import EngineConfig, ParallelConfig
from charonia.engine.parallel.rank import join_ranks, rank_device
from charonia.engine.parallel.rank_layout import RankLayout, RankPlace
from tests.cuda_stand_in import StandInCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    """A machine with four GPUs."""
    stand_in = StandInCuda(devices=4)
    stand_in.put_in_place(monkeypatch)
    return stand_in


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.device]]:
    """The backend and device of each rank that joins, as torch.distributed takes them."""
    found: list[tuple[str, torch.device]] = []

    def join(backend: str, device_id: torch.device, **_: Any) -> None:
        if device_id.index is None:
            raise ValueError("init_process_group device_id parameter must be a device with an index")
        found.append((backend, device_id))

    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(dist, "init_process_group", join)
    return found


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("layout", [RankLayout(), RankLayout(2), RankLayout(1, 2), RankLayout(2, 2)], ids=str)
def test_ranks_join_with_a_gpu_each(
    layout: RankLayout, device: str, cuda: StandInCuda, joined: list[tuple[str, torch.device]]
) -> None:
    """Tensor ranks, stages, and one rank alone, which needs no number to have a GPU."""
    config = EngineConfig(
        model="m", device=device, parallel=ParallelConfig(tensor=layout.tensor, pipeline=layout.pipeline)
    )
    for rank in range(layout.world):
        place = RankPlace(rank, layout, "127.0.0.1", rank, layout.world)
        join_ranks("127.0.0.1", 1, rank, layout, rank_device(config, place))
    assert joined == [("nccl", torch.device("cuda", rank)) for rank in range(layout.world)]
    assert cuda.calls == [("set_device", rank) for rank in range(layout.world)]


def test_ranks_of_a_second_replica_have_the_gpus_behind_the_first_ones(cuda: StandInCuda) -> None:
    config = msgspec.structs.replace(EngineConfig(model="m", device="cuda", data_parallel_size=2), replica=1)
    places = [RankPlace(rank, RankLayout(2), "127.0.0.1", rank, 2) for rank in range(2)]
    assert [rank_device(config, place).index for place in places] == [2, 3]


def test_a_rank_on_another_machine_has_the_gpu_that_ray_lets_it_see(cuda: StandInCuda) -> None:
    """Whatever number it has in the whole: `remote_rank_args` names the first, its only one."""
    cuda.devices = 1
    place = RankPlace(5, RankLayout(8), "10.0.0.7", 0, 1)
    assert rank_device(EngineConfig(model="m", device="cuda:0"), place) == torch.device("cuda", 0)
