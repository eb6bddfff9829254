"""A Ray cluster, as the process that asks it for places sees it. Knows nothing of ranks.

Loaded only where Ray is wanted: it is an extra.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from ...core.errors import InvalidArgument, Unavailable

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
    """CPUs and GPUs of all machines; `free`: that nobody has."""
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
