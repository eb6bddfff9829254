"""One rank of a Ray cluster: the resources it asks for, the bundle it takes, and its process there. Imports no Ray."""

import fcntl
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from struct import Struct
from typing import NamedTuple

import msgspec

from ...core.errors import InvalidArgument
from ...processes.child_process import set_process_name
from ..config import EngineConfig
from .layout import RankLayout, RankPlace
from .rank_connections import ConnectToken, connect_to_listener

_FORWARDED_VARIABLES = ("CHARONIA_", "HF_", "LRU_CACHE_", "NCCL_", "ONEDNN_")
"""Environment variables that go with a rank, where its machine does not say otherwise."""
_GET_ADDRESS = 0x8915
"""Linux's SIOCGIFADDR."""
_INTERFACE = Struct("16s4x4s16x")  # ifreq: name, then a sockaddr_in without port


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
    """Each rank's place, where bundle b was put on `hosts[b]`. Ranks that follow each other, as those of a stage do,
    are put together: machine after machine, the one with the most bundles first."""
    count = Counter(hosts)
    placed: Counter[str] = Counter()
    places = []
    for bundle, host in sorted(enumerate(hosts), key=lambda each: (-count[each[1]], each[1], each[0])):
        places.append(RankPlacement(bundle, host, placed[host], count[host]))
        placed[host] += 1
    return places


class RemoteRankArgs(NamedTuple):
    """The arguments of a rank on another machine: `environment` to set, and `token` to connect with."""

    config: EngineConfig
    place: RankPlace
    token: ConnectToken
    environment: Mapping[str, str]


def remote_rank_args(
    config: EngineConfig, asked: RankResources, layout: RankLayout, placement: RankPlacement, token: ConnectToken
) -> RemoteRankArgs:
    """The arguments of the rank that `token` names, as its machine should understand them: memory and cores are its
    own. It has a GPU for itself, and Ray lets it see no other; on CPUs it shares the machine with the ranks there, of
    other replicas as many as of its own."""
    sharing = 1 if asked.gpus else placement.local_ranks * config.data_parallel_size
    config = msgspec.structs.replace(
        config,
        device="cuda:0" if asked.gpus else "cpu",
        threads=asked.threads * sharing,
        data_parallel_size=1,
        replica=0,
        host_memory=None,
    )
    place = RankPlace(token.rank, layout, placement.host, 0 if asked.gpus else placement.local_rank, sharing)
    environment = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED_VARIABLES)}
    return RemoteRankArgs(config, place, token, environment)


class RankActor:
    """The Ray actor that runs one rank."""

    def serve(self, args: RemoteRankArgs) -> None:
        """Run that rank until the core says to leave. The process, and its connection with it, stays until Ray ends it:
        torch's own cleanup takes seconds."""
        set_process_name("charonia-rank")
        interface = interface_of(args.place.host)
        own = {"TORCH_CPP_LOG_LEVEL": "ERROR"} | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})
        for name, value in (dict(args.environment) | own).items():
            os.environ.setdefault(name, value)
        self._connection = connect_to_listener(args.token)
        from .rank import run_rank  # imports torch

        try:
            run_rank(args.config, args.place, self._connection)
        except SystemExit:
            os._exit(1)


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address, if one has: gloo would look up the machine's name, which many
    resolve to loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                asked = _INTERFACE.pack(name.encode(), b"")
                _, found = _INTERFACE.unpack(fcntl.ioctl(asking, _GET_ADDRESS, asked))
                if socket.inet_ntoa(found) == address:
                    return name
    return None
