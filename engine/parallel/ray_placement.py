"""The resources that ranks ask of a Ray cluster, and which rank takes which of the bundles granted. Imports no Ray."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from ...core.errors import InvalidArgument
from ..config import EngineConfig
from .layout import RankLayout


class RankResources(NamedTuple):
    """The resources of one rank: a GPU for itself, or CPUs. `threads`: the number that it computes with."""

    gpus: int
    cpus: int
    threads: int

    @property
    def bundle(self) -> dict[str, float]:
        return {"GPU": float(self.gpus)} if self.gpus else {"CPU": float(self.cpus)}

    def __str__(self) -> str:
        return f"{self.gpus} GPU" if self.gpus else f"{self.cpus} CPU{'s' if self.cpus > 1 else ''}"


class RankPlacement(NamedTuple):
    """The place of one rank: a bundle of the placement group, on the machine with this address, where it is number
    `local_rank` of `local_ranks`."""

    bundle: int
    host: str
    local_rank: int
    local_ranks: int


def rank_resources(config: EngineConfig, layout: RankLayout, resources: Mapping[str, float]) -> RankResources:
    """The resources that each rank asks for; device auto is a GPU where the cluster's `resources` name one.

    Raises:
        InvalidArgument: the configuration names one GPU for all.
    """
    kind, _, number = config.device.partition(":")
    if number:
        message = f"device {config.device!r} names one GPU, and Ray chooses them: cuda is enough"
        raise InvalidArgument(message, field="device")
    threads = config.threads_each(layout.world)
    if kind == "cuda" or (kind == "auto" and resources.get("GPU", 0.0) >= 1.0):
        return RankResources(1, 0, threads)
    return RankResources(0, threads, threads)


def place_ranks(hosts: Sequence[str]) -> list[RankPlacement]:
    """Each rank's place, where bundle b was put on `hosts[b]`. Ranks that follow each other, as those of a stage
    do, are put together: machine after machine, the one with the most bundles first."""
    count = Counter(hosts)
    order = sorted(range(len(hosts)), key=lambda bundle: (-count[hosts[bundle]], hosts[bundle], bundle))
    seated: Counter[str] = Counter()
    found = []
    for bundle in order:
        host = hosts[bundle]
        found.append(RankPlacement(bundle, host, seated[host], count[host]))
        seated[host] += 1
    return found


def rank_config(config: EngineConfig, asked: RankResources, place: RankPlacement) -> EngineConfig:
    """The engine's configuration, as the machine of that rank should understand it: memory and cores are its own."""
    threads = asked.threads * ranks_sharing_memory(config, asked, place)
    device = "cuda:0" if asked.gpus else "cpu"  # Ray lets it see no other
    return msgspec.structs.replace(
        config, device=device, threads=threads, data_parallel_size=1, replica=0, host_memory=None
    )


def ranks_sharing_memory(config: EngineConfig, asked: RankResources, place: RankPlacement) -> int:
    """Ranks that share a machine's memory with this one, itself included: of other replicas as many as of its own. A
    GPU is not shared."""
    return 1 if asked.gpus else place.local_ranks * config.data_parallel_size
