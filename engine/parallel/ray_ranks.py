"""Ranks on the machines of a Ray cluster: Ray starts them and ends them; what is said goes over lines of our own.

They belong to this process: when it ends, Ray ends them and takes the places back. Loaded only where Ray is wanted.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...core.errors import InvalidArgument, Unavailable
from ..config import EngineConfig
from .layout import RankLayout
from .rank_connections import RankListener, shut_down, wait_until_closed
from .ray_placement import RankPlacement, RankResources, place_ranks, rank_config, rank_resources, ranks_sharing_memory
from .ray_rank import RankActor, RemoteRankArgs

log = logging.getLogger(__name__)

Actor: TypeAlias = Any
"""Ray has no type for a handle that a checker without Ray could read."""


class RayTimeouts(NamedTuple):
    """Seconds that the cluster may take to find `room`, and then the ranks to `join`."""

    room: float = 300.0
    join: float = 300.0


DEFAULT_RAY_TIMEOUTS = RayTimeouts()

_WARN_SECONDS = 10.0
"""After which it is told that ranks wait for room."""
_POLL_SECONDS = 0.5
_DEATH_SECONDS = 5.0
"""How long Ray may take to end a process: on a machine that is gone it never does."""
_FORWARDED_VARIABLES = ("CHARONIA_", "HF_", "LRU_CACHE_", "NCCL_", "ONEDNN_")
"""Environment variables that go with a rank, where its machine does not say otherwise."""


class RayRanks:
    """A `Crew` on a Ray cluster, one bundle of a placement group for each rank.

    Raises:
        InvalidArgument: the configuration does not say where the cluster is, or what a rank needs.
        Unavailable: there is no cluster, no room in it, or a rank does not start; nothing is left of the others.
    """

    memory = None

    def __init__(self, config: EngineConfig, layout: RankLayout, patience: RayTimeouts = DEFAULT_RAY_TIMEOUTS) -> None:
        self._layout, self._patience = layout, patience
        self._actors: list[Actor] = []
        self._served: list[Any] = []
        self._lines: dict[int, Connection] = {}
        self._group: Any = None
        connect_to_cluster(config.parallel.ray_address)
        self._gate = RankListener(own_address())
        try:
            asked = rank_resources(config, layout, cluster_resources())
            self._places = self._placed(asked)
            for rank, place in enumerate(self._places):
                self._start(config, asked, rank, place)
            self._meet()
        except BaseException:
            self.wait_for_exit(0.0)
            self.close()
            raise

    @property
    def connections(self) -> Sequence[Connection]:
        return [self._lines[rank] for rank in sorted(self._lines)]

    @property
    def hosts(self) -> list[str]:
        """The host of each rank."""
        return [place.host for place in self._places]

    def exit_reason(self, rank: int) -> str:
        return f"is lost, on {self._places[rank].host}"

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def wait_for_exit(self, patience: float) -> None:
        _still_running(self._served, patience)
        self.kill()
        wait_until_closed(self._lines.values(), _DEATH_SECONDS)
        if self._group is not None:
            remove_placement_group(self._group)
        for line in self._lines.values():
            shut_down(line)

    def close(self) -> None:
        self._gate.close()
        for line in self._lines.values():
            line.close()
        ray.shutdown()

    def _placed(self, asked: RankResources) -> list[RankPlacement]:
        """Every rank's place, once the cluster has room for all."""
        self._group = placement_group([asked.bundle] * self._layout.world, strategy="PACK")
        self._wait_for_room(f"{self._layout} want {asked} each of the Ray cluster")
        nodes, known = placement_group_table(self._group)["bundles_to_node_id"], node_addresses()
        try:
            return place_ranks([known[nodes[bundle]] for bundle in range(self._layout.world)])
        except KeyError as lost:
            raise Unavailable("a machine left the Ray cluster while ranks were placed") from lost

    def _wait_for_room(self, wanted: str) -> None:
        if self._group.wait(min(self._patience.room, _WARN_SECONDS)):
            return
        if (left := self._patience.room - _WARN_SECONDS) > 0.0:
            log.warning("%s: waiting for room; %s", wanted, _free_resources())
            if self._group.wait(left):
                return
        raise Unavailable(f"{wanted}: it had no room for {self._patience.room:g} s; {_free_resources()}")

    def _start(self, config: EngineConfig, asked: RankResources, rank: int, place: RankPlacement) -> None:
        seat = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place.bundle)
        options = {"num_cpus": asked.cpus, "num_gpus": asked.gpus, "scheduling_strategy": seat}
        actor = ray.remote(RankActor).options(**options, max_restarts=0, max_task_retries=0).remote()
        self._actors.append(actor)
        own = rank_config(config, asked, place)
        sharing = ranks_sharing_memory(config, asked, place)
        environment = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED_VARIABLES)}
        local = 0 if asked.gpus else place.local_rank
        errand = RemoteRankArgs(own, self._layout, self._gate.token(rank), place.host, local, sharing, environment)
        self._served.append(actor.serve.remote(errand))

    def _meet(self) -> None:
        """Have a line to every rank."""
        deadline = monotonic() + self._patience.join
        while len(self._lines) < self._layout.world:
            if called := self._gate.accept(min(_POLL_SECONDS, max(0.0, deadline - monotonic()))):
                self._lines[called.rank] = called.connection
                continue
            absent = [rank for rank in range(self._layout.world) if rank not in self._lines]
            self._check_alive(absent)
            if monotonic() >= deadline:
                raise Unavailable(
                    f"{', '.join(map(self._named, absent))} did not join within {self._patience.join:g} s"
                )

    def _check_alive(self, absent: Sequence[int]) -> None:
        for rank in absent:
            if not _still_running([self._served[rank]], 0.0):
                raise Unavailable(f"{self._named(rank)} did not start: {_ray_reason(self._served[rank])}")

    def _named(self, rank: int) -> str:
        return f"{self._layout.rank_name(rank)} on {self._places[rank].host}"


def _still_running(served: list[Any], seconds: float) -> list[Any]:
    """The ranks that still run after so many seconds."""
    running: list[Any] = ray.wait(served, num_returns=len(served), timeout=seconds)[1] if served else []
    return running


def _free_resources() -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in cluster_resources(free=True).items()) + " are free"


def _ray_reason(served: Any) -> str:
    """Why a process that ended did, in Ray's words."""
    try:
        ray.get(served)
    except Exception as error:
        return str(error).strip().rpartition("\n")[2]
    return "it ended"


_ANSWER_SECONDS = 5.0
"""How long a cluster whose address is given may take to answer: Ray itself would wait for minutes."""


def connect_to_cluster(address: str) -> None:
    """Be a part of the cluster there: `host:port` of its head, `auto` for the one that this machine belongs to, `local`
    for one of our own. "" leaves it to RAY_ADDRESS, and then to `auto`.

    Raises:
        InvalidArgument: that is no address, or one of Ray's client.
        Unavailable: there is no cluster, or this machine is not a part of it.
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


def own_address() -> str:
    """This machine's address among the others'."""
    return str(ray.util.get_node_ip_address())


def node_addresses() -> dict[str, str]:
    """Address of every machine that is there, by the name that Ray has for it."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def cluster_resources(free: bool = False) -> dict[str, float]:
    """CPUs and GPUs of all machines; with `free` those that are not taken."""
    known = ray.available_resources() if free else ray.cluster_resources()
    return {kind: float(known.get(kind, 0.0)) for kind in ("CPU", "GPU")}


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
