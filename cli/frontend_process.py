"""The process of one of several frontends: sockets and text, over the hub's models. The hub starts it, and it ends with
the hub."""

import asyncio
import io
import logging
import os
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection

from ..api.app import build_worker_app
from ..api.extensions import ForwardedRoute, WorkerRoutes
from ..api.grpc.server import GrpcServer
from ..api.http.server import HttpServer
from ..api.metadata import ServerInfo
from ..api.triton.clouds import CloudMiddleware
from ..core.errors import CharoniaError
from ..core.tasks import end_within, wait_for_first
from ..http_workers.forwarding import HttpForwarder, forwarded_rpcs
from ..http_workers.remote_gateway import RemoteGateway
from ..http_workers.state_messages import LogText, WorkerListening
from ..processes import gc_tuning
from ..processes.client_shared_memory import SharedMemoryRegistry
from ..processes.host import map_large_blocks_separately, raise_open_file_limit
from ..telemetry.logging_setup import LogSettings, logging_to
from ..telemetry.loop_lag import LoopLag
from ..telemetry.request_log import LoggedRequests
from ..telemetry.shared_state import SharedState
from .options import CloudOptions
from .plan import EndpointSettings, parse_clouds
from .ports import SOCKETS_CLOSE_SECONDS, bind_port

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrontendSetup:
    """What a frontend is told when it starts."""

    settings: EndpointSettings
    info: ServerInfo
    http_address: str

    http_port: int | None
    """None where HTTP is not wanted."""

    grpc_port: int | None
    """None where gRPC is not wanted."""

    clouds: CloudOptions
    """The clouds whose endpoints are wanted, on `cloud_ports`."""

    cloud_ports: tuple[int, ...]

    forwarded: tuple[ForwardedRoute, ...]
    """The server's routes that the hub answers."""

    allows_client_memory: bool

    sends_spans: bool
    """Whether the hub sends spans."""

    max_lag: float
    """Seconds of silence of the hub, or of late answers, after which nothing is ready."""

    logs: LogSettings
    logged_requests: LoggedRequests
    extensions: WorkerRoutes


class LogRelay(io.StringIO):
    """A stream whose text the hub writes into the server's log; for any thread."""

    def __init__(self) -> None:
        self._gateway: RemoteGateway | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def connect(self, gateway: RemoteGateway) -> None:
        """Hand lines to `gateway` from now on; called in the thread of its event loop."""
        self._gateway, self._loop = gateway, asyncio.get_running_loop()

    def write(self, text: str) -> int:
        """Raises `ValueError` while nothing takes it, or nothing does any more."""
        gateway, loop = self._gateway, self._loop
        if gateway is None or loop is None or loop.is_closed():
            raise ValueError("no hub takes the log")
        loop.call_soon_threadsafe(gateway.connection.send, LogText(text))
        return len(text)


def main(setup: FrontendSetup, name: str, connection: Connection, mine: int, theirs: int) -> None:
    """Serve until the hub says so, or is gone. `name`: of this frontend, for the log. `mine`, `theirs`: files of this
    end's shared memory, and the hub's."""
    import uvloop

    relay = LogRelay()
    with logging_to(relay, setup.logs, requests=setup.logged_requests):
        uvloop.run(_serve(setup, name, connection, (mine, theirs), relay))


async def _serve(
    setup: FrontendSetup, name: str, connection: Connection, files: tuple[int, int], relay: LogRelay
) -> None:
    raise_open_file_limit()
    map_large_blocks_separately()
    lag = LoopLag(setup.max_lag, name=f"the event loop of {name}")
    shared = SharedState(SharedMemoryRegistry(setup.allows_client_memory))
    shared.traces.send_spans(setup.sends_spans)
    gateway = RemoteGateway(shared, files, setup.max_lag, lag)
    hub = gateway.connection
    sock = socket.socket(fileno=os.dup(connection.fileno()))
    connection.close()
    await asyncio.get_running_loop().create_unix_connection(lambda: hub.link, sock=sock)
    relay.connect(gateway)
    with lag:
        await wait_for_first(gateway.informed.wait(), hub.lost.wait())
        servers = _make_servers(setup, gateway)
        gc_tuning.collect_and_freeze(frozen_too=False)
        try:
            for server in reversed(servers):  # gRPC's takes longest: HTTP's clients are not to wait for that
                await server.start()
        except CharoniaError as error:
            log.error("%s", error.message)
            hub.link.close()
            return
        hub.send(WorkerListening())
        await wait_for_first(gateway.stop_requested.wait(), hub.lost.wait(), *(server.ended() for server in servers))
        if await end_within(SOCKETS_CLOSE_SECONDS, *(server.stop(gateway.stop_by_force) for server in servers)):
            log.warning("%s ends before its sockets are closed", name)
        for handler in logging.getLogger().handlers:
            await asyncio.to_thread(handler.flush)
        hub.link.close()


def _make_servers(setup: FrontendSetup, gateway: RemoteGateway) -> list[HttpServer | GrpcServer]:
    settings, servers = setup.settings, list[HttpServer | GrpcServer]()
    forwarder = HttpForwarder(gateway.connection, setup.info.max_input_size)
    timeout = settings.http.body_timeout
    extensions = setup.extensions.routes(forwarder.answer_in_pieces)
    forwarded = [route.answered_by(forwarder.answer) for route in setup.forwarded]
    app = build_worker_app(
        gateway, setup.info, settings.keys, settings.http, forwarded, extensions, setup.extensions.listed
    )
    if setup.http_port is not None:
        sock = bind_port(setup.http_address, setup.http_port, "--http-port", shared=True)
        servers.append(HttpServer(app, sock, access_log=True, tls=settings.tls, body_timeout=timeout))
    # Their functions cannot be sent, so they are made again of the same environment.
    for cloud, port in zip(parse_clouds(setup.clouds, os.environ), setup.cloud_ports, strict=True):
        translated = CloudMiddleware(app, cloud, lambda: [config.name for config in gateway.model_configs()])
        sock = bind_port(setup.http_address, port, cloud.flag, shared=True)
        servers.append(HttpServer(translated, sock, access_log=True, body_timeout=timeout))
    if setup.grpc_port is not None:
        sock = bind_port(settings.grpc.address, setup.grpc_port, "--grpc-port", shared=True)
        rpcs = forwarded_rpcs(gateway)
        servers.append(GrpcServer(gateway, setup.info, settings.grpc, sock, settings.grpc_policy, rpcs))
    return servers
