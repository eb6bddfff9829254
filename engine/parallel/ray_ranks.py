"""Ranks on the machines of a Ray cluster: Ray starts and ends them, and messages go over connections of our own.

Ray ends the ranks when this process ends. The module is loaded only where Ray is wanted.
"""

import fcntl
import logging
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from struct import Struct
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

import msgspec
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...core.errors import InvalidArgument, Unavailable
from ...processes.child_process import set_process_name
from ..config import EngineConfig
from .rank_connections import ConnectToken, RankListener, connect_to_listener, shut_down, wait_until_closed
from .rank_layout import RankLayout, RankPlace

_FORWARDED_VARIABLES = ("CHARONIA_", "HF_", "LRU_CACHE_", "NCCL_", "ONEDNN_")
"""Prefixes of environment variables that a rank gets, unless its machine sets them."""
_GET_ADDRESS = 0x8915
"""Linux's SIOCGIFADDR."""
_INTERFACE = Struct("16s4x4s16x")  # ifreq: name, then a sockaddr_in without port


class RankResources(NamedTuple):
    """The resources of one rank: a GPU for itself, or CPUs. `threads`: those that it computes with."""

    gpus: int
    cpus: int
    threads: int

    @property
    def bundle(self) -> dict[str, float]:
        return {"GPU": float(self.gpus)} if self.gpus else {"CPU": float(self.cpus)}

    def __str__(self) -> str:
        return f"{self.gpus} GPU" if self.gpus else f"{self.cpus} CPU{'s' if self.cpus > 1 else ''}"


class RankPlacement(NamedTuple):
    """The place of one rank in the cluster."""

    bundle: int
    """Its bundle in the placement group."""
    host: str
    """The address of its machine."""
    local_rank: int
    """Its number among the `local_ranks` there."""
    local_ranks: int


def rank_resources(config: EngineConfig, layout: RankLayout, resources: Mapping[str, float]) -> RankResources:
    """The resources that each rank needs; device auto is a GPU if the cluster's `resources` have one. Raises
    `InvalidArgument` for a device with a number."""
    kind, _, number = config.device.partition(":")
    if number:
        message = f"device {config.device!r} names one GPU, and Ray chooses them: cuda is enough"
        raise InvalidArgument(message, field="device")
    threads = config.threads_each(layout.world)
    if kind == "cuda" or (kind == "auto" and resources.get("GPU", 0.0) >= 1.0):
        return RankResources(1, 0, threads)
    return RankResources(0, threads, threads)


def place_ranks(hosts: Sequence[str]) -> list[RankPlacement]:
    """Each rank's place, where bundle b is on `hosts[b]`: machine after machine, the one with the most bundles first,
    so that the ranks of a stage are together."""
    count = Counter(hosts)
    placed: Counter[str] = Counter()
    places = []
    in_order = sorted((-count[host], host, bundle) for bundle, host in enumerate(hosts))
    for _, host, bundle in in_order:
        places.append(RankPlacement(bundle, host, placed[host], count[host]))
        placed[host] += 1
    return places


class RemoteRankArgs(NamedTuple):
    """The arguments of a rank on another machine; `environment` is to be set there."""

    config: EngineConfig
    place: RankPlace
    token: ConnectToken
    environment: Mapping[str, str]


def remote_rank_args(
    config: EngineConfig, resources: RankResources, layout: RankLayout, placement: RankPlacement, token: ConnectToken
) -> RemoteRankArgs:
    """The arguments of the rank that `token` names, for its machine: memory and cores are that machine's. Ray shows it
    its own GPU alone. On CPUs it shares the machine with the ranks there, as many of each replica."""
    sharing = 1 if resources.gpus else placement.local_ranks * config.data_parallel_size
    config = msgspec.structs.replace(
        config,
        device="cuda:0" if resources.gpus else "cpu",
        threads=resources.threads * sharing,
        data_parallel_size=1,
        replica=0,
        host_memory=None,
    )
    place = RankPlace(token.rank, layout, placement.host, 0 if resources.gpus else placement.local_rank, sharing)
    environment = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED_VARIABLES)}
    return RemoteRankArgs(config, place, token, environment)


class RankActor:
    """The Ray actor that runs one rank."""

    def serve(self, args: RemoteRankArgs) -> None:
        """Run the rank until the core lets it leave. The process, and so its connection, stays until Ray ends it:
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
    """The network interface with this IPv4 address, if there is one, for gloo: it would look up the machine's name,
    which often resolves to loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                request = _INTERFACE.pack(name.encode(), b"")
                _, own_address = _INTERFACE.unpack(fcntl.ioctl(any_socket, _GET_ADDRESS, request))
                if socket.inet_ntoa(own_address) == address:
                    return name
    return None


log = logging.getLogger(__name__)

Actor: TypeAlias = Any
"""Ray has no type for handles that a checker without Ray could read."""


@dataclass(frozen=True, slots=True)
class RayTimeouts:
    """Seconds that the cluster may take to find `room`, and then the ranks to `join`."""

    room: float = 300.0
    join: float = 300.0


_WARN_SECONDS = 10.0
"""Wait for room after which a warning is logged."""
_POLL_SECONDS = 0.5
_DEATH_SECONDS = 5.0
"""How long Ray may take to end a process: on a lost machine it never does."""


class RayRanks:
    """`LaunchedRanks` on a Ray cluster, one bundle of a placement group for each rank.

    Raises:
        InvalidArgument: the configuration does not say where the cluster is, or what a rank needs.
        Unavailable: there is no cluster, no room in it, or a rank does not start; nothing is left of the others.
    """

    def __init__(self, config: EngineConfig, layout: RankLayout, timeouts: RayTimeouts = RayTimeouts()) -> None:
        self._layout = layout
        self._timeouts = timeouts
        self._actors: list[Actor] = []
        self._served: list[Any] = []
        self._connected: dict[int, Connection] = {}
        self._group: Any = None
        connect_to_cluster(config.parallel.ray_address)
        self._listener = RankListener(str(ray.util.get_node_ip_address()))
        try:
            resources = rank_resources(config, layout, _cluster_resources(ray.cluster_resources()))
            self._places = self._place_ranks(resources)
            for rank, place in enumerate(self._places):
                scheduling = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place.bundle)
                options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "scheduling_strategy": scheduling}
                actor = ray.remote(RankActor).options(**options, max_restarts=0, max_task_retries=0).remote()
                self._actors.append(actor)
                args = remote_rank_args(config, resources, layout, place, self._listener.token(rank))
                self._served.append(actor.serve.remote(args))
            self._accept_ranks()
        except BaseException:
            self.wait_for_exit(0.0)
            self.close()
            raise

    @property
    def connections(self) -> Sequence[Connection]:
        return [self._connected[rank] for rank in sorted(self._connected)]

    def exit_reason(self, rank: int) -> str:
        return f"is lost, on {self._places[rank].host}"

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def wait_for_exit(self, timeout: float) -> None:
        if self._served:
            ray.wait(self._served, num_returns=len(self._served), timeout=timeout)
        self.kill()
        wait_until_closed(self._connected.values(), _DEATH_SECONDS)
        if self._group is not None:
            remove_placement_group(self._group)
        for connection in self._connected.values():
            shut_down(connection)

    def close(self) -> None:
        self._listener.socket.close()
        for connection in self._connected.values():
            connection.close()
        ray.shutdown()

    def _place_ranks(self, resources: RankResources) -> list[RankPlacement]:
        """Every rank's place, once the cluster has room for all."""
        self._group = placement_group([resources.bundle] * self._layout.world, strategy="PACK")
        wanted = f"{self._layout} want {resources} each of the Ray cluster"
        room = self._timeouts.room
        if not self._group.wait(min(room, _WARN_SECONDS)):
            if room > _WARN_SECONDS:
                log.warning("%s: waiting for room; %s", wanted, _free_resources())
            if room <= _WARN_SECONDS or not self._group.wait(room - _WARN_SECONDS):
                raise Unavailable(f"{wanted}: it had no room for {room:g} s; {_free_resources()}")
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        try:
            return place_ranks([addresses[nodes[bundle]] for bundle in range(self._layout.world)])
        except KeyError as lost:
            raise Unavailable("a machine left the Ray cluster while ranks were placed") from lost

    def _accept_ranks(self) -> None:
        """Accept the connection of every rank."""
        deadline = monotonic() + self._timeouts.join
        while len(self._connected) < self._layout.world:
            if accepted := self._listener.accept(min(_POLL_SECONDS, max(0.0, deadline - monotonic()))):
                self._connected[accepted.rank] = accepted.connection
                continue
            absent = [rank for rank in range(self._layout.world) if rank not in self._connected]
            names = [f"{self._layout.rank_name(rank)} on {self._places[rank].host}" for rank in absent]
            for rank, name in zip(absent, names, strict=True):
                ended, _ = ray.wait([self._served[rank]], timeout=0.0)
                if ended:
                    raise Unavailable(f"{name} did not start: {_ray_reason(self._served[rank])}")
            if monotonic() >= deadline:
                raise Unavailable(f"{', '.join(names)} did not join within {self._timeouts.join:g} s")


def _free_resources() -> str:
    free = _cluster_resources(ray.available_resources())
    return ", ".join(f"{amount:g} {kind}" for kind, amount in free.items()) + " are free"


def _cluster_resources(amounts: dict[str, float]) -> dict[str, float]:
    """CPUs and GPUs of all machines."""
    return {kind: float(amounts.get(kind, 0.0)) for kind in ("CPU", "GPU")}


def _ray_reason(served: Any) -> str:
    """Why a process ended, in Ray's words."""
    try:
        ray.get(served)
    except Exception as error:
        return str(error).strip().rpartition("\n")[2]
    return "it ended"


_ANSWER_SECONDS = 5.0
"""How long a cluster with a configured address may take to answer: Ray itself would wait for minutes."""


def connect_to_cluster(address: str) -> None:
    """Join the cluster at `host:port` of its head, this machine's (`auto`), or a new one (`local`). "" leaves it to
    RAY_ADDRESS, and then to `auto`.

    Raises:
        InvalidArgument: the address is none, or one of Ray's client.
        Unavailable: no cluster answers, or this machine is not a part of it.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in address:
        message = f"ray_address {address!r}: ranks are placed from a machine of the cluster; give host:port, or auto"
        raise InvalidArgument(message, field="ray_address")
    if address not in ("auto", "local"):
        _check_reachable(address)
    try:
        with _keep_sigterm_handler():
            ray.init(address, logging_level="warning", log_to_driver=False)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise Unavailable(f"cannot join the Ray cluster at {address!r}: {_first_line(error)}") from error
    except ValueError as error:
        raise InvalidArgument(f"ray_address {address!r}: {_first_line(error)}", field="ray_address") from error


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidArgument(f"ray_address must be host:port, auto or local, got {address!r}", field="ray_address")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise Unavailable(f"no Ray cluster answers at {address}: {error}") from error


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Ray takes SIGTERM for itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
