"""The frontends of a server that has several, as they are set up."""

from dataclasses import replace
from functools import partial

from ..api.app import all_routes, control_routes, routed_app
from ..api.extensions import ForwardedRoute, RouteExtensions
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
    metrics: MetricRegistries,
    extensions: RouteExtensions,
) -> WorkerPool:
    """The frontends that `plan` asks for, on the reserved ports. `metrics`: what endpoints show and explain."""
    server, settings = plan.options.server, plan.endpoints
    app = routed_app(all_routes(gateway, info, settings.http, metrics, extensions))
    hub = ControlHub(gateway, app, partial(answer_rpc, gateway))
    options = [option for option in settings.grpc.channel_options if option[0] != _REUSE_PORT]
    grpc = settings.grpc._replace(channel_options=(*options, (_REUSE_PORT, 1)))
    http_port, grpc_port = (None if sock is None else sock.getsockname()[1] for sock in (ports.http, ports.grpc))
    setup = FrontendSetup(
        replace(settings, grpc=grpc, clouds=()),
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
    return WorkerPool(hub, server.frontends, main, setup)
