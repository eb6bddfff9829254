"""The frontends of a server that has several, or may get several, as they are set up."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from starlette.types import ASGIApp

from ..api.app import control_routes
from ..api.extensions import ForwardedRoute, RouteExtensions
from ..api.grpc.control_rpcs import BoundRpc
from ..api.grpc.settings import GrpcSettings
from ..api.metadata import ServerInfo
from ..api.prometheus import MetricRegistries
from ..http_workers.forwarding import answer_rpc
from ..http_workers.hub import ControlHub
from ..http_workers.supervisor import WorkerPool
from ..repository.gateway import InProcessGateway
from .frontend_process import FrontendSetup, main
from .options import is_true
from .plan import ServePlan
from .ports import ReservedPorts

_REUSE_PORT = "grpc.so_reuseport"


def frontend_pool(
    plan: ServePlan,
    gateway: InProcessGateway,
    ports: ReservedPorts,
    info: ServerInfo,
    app: ASGIApp,
    rpcs: Mapping[str, BoundRpc],
    metrics: MetricRegistries,
    extensions: RouteExtensions,
) -> WorkerPool:
    """The frontends that `plan` asks for, on the reserved ports. `app`, `rpcs`: answer what is no inference; `metrics`:
    what endpoints show and explain."""
    server, settings = plan.options.server, plan.endpoints
    hub = ControlHub(gateway, app, partial(answer_rpc, rpcs))
    http_port, grpc_port = (None if sock is None else sock.getsockname()[1] for sock in (ports.http, ports.grpc))
    setup = FrontendSetup(
        replace(settings, grpc=on_shared_port(settings.grpc), clouds=()),
        info,
        server.http_address,
        http_port,
        grpc_port,
        plan.options.cloud,
        tuple(sock.getsockname()[1] for sock in ports.clouds),
        tuple(map(ForwardedRoute.of, control_routes(gateway, info, settings.http, metrics))),
        is_true(server.allow_client_shm),
        gateway.shared_state.traces.sends_spans,
        server.max_loop_lag_secs,
        server.log_settings,
        server.log_requests,
        extensions.in_workers(),
    )
    return WorkerPool(hub, plan.frontends.most, main, setup)


def on_shared_port(grpc: GrpcSettings) -> GrpcSettings:
    """The settings of a process that listens on a port with others of ours."""
    options = [option for option in grpc.channel_options if option[0] != _REUSE_PORT]
    return grpc._replace(channel_options=(*options, (_REUSE_PORT, 1)))
