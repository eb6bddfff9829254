"""Ranks on the machines of a Ray cluster: Ray starts and ends them; messages go over connections of our own.

They belong to this process: when it ends, Ray ends them and takes the places back. Loaded only where Ray is wanted.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, TypeAlias

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...core.errors import InvalidArgument, Unavailable
from ..config import EngineConfig
from .layout import RankLayout
from .rank_connections import RankListener, shut_down, wait_until_closed
from .ray_rank import RankActor, RankPlacement, RankResources, place_ranks, rank_resources, remote_rank_args

log = logging.getLogger(__name__)

Actor: TypeAlias = Any
"""Ray has no type for a handle that a checker without Ray could read."""


@dataclass(frozen=True, slots=True)
class RayTimeouts:
    """Seconds that the cluster may take to find `room`, and then the ranks to `join`."""

    room: float = 300.0
    join: float = 300.0


_WARN_SECONDS = 10.0
"""After which it is logged that ranks wait for room."""
_POLL_SECONDS = 0.5
_DEATH_SECONDS = 5.0
"""How long Ray may take to end a process: on a machine that is gone it never does."""


class RayRanks:
    """`LaunchedRanks` on a Ray cluster, one bundle of a placement group for each rank.

    Raises:
        InvalidArgument: the configuration does not say where the cluster is, or what a rank needs.
        Unavailable: there is no cluster, no room in it, or a rank does not start; nothing is left of the others.
    """

    def __init__(self, config: EngineConfig, layout: RankLayout, timeouts: RayTimeouts = RayTimeouts()) -> None:
        self._layout, self._timeouts = layout, timeouts
        self._actors: list[Actor] = []
        self._served: list[Any] = []
        self._connected: dict[int, Connection] = {}
        self._group: Any = None
        connect_to_cluster(config.parallel.ray_address)
        self._listener = RankListener(str(ray.util.get_node_ip_address()))
        try:
            asked = rank_resources(config, layout, _cluster_resources(ray.cluster_resources()))
            self._places = self._place_ranks(asked)
            for rank, place in enumerate(self._places):
                scheduling = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place.bundle)
                options = {"num_cpus": asked.cpus, "num_gpus": asked.gpus, "scheduling_strategy": scheduling}
                actor = ray.remote(RankActor).options(**options, max_restarts=0, max_task_retries=0).remote()
                self._actors.append(actor)
                args = remote_rank_args(config, asked, layout, place, self._listener.token(rank))
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
        self._listener.close()
        for connection in self._connected.values():
            connection.close()
        ray.shutdown()

    def _place_ranks(self, asked: RankResources) -> list[RankPlacement]:
        """Every rank's place, once the cluster has room for all."""
        self._group = placement_group([asked.bundle] * self._layout.world, strategy="PACK")
        wanted, room = f"{self._layout} want {asked} each of the Ray cluster", self._timeouts.room
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
        """Have a connection to every rank."""
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
