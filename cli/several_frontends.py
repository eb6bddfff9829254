"""The frontends of a server that has several: how they are set up, and what such a server does not do."""

from dataclasses import replace
from functools import partial

from ..api.app import all_routes, routed_app
from ..api.metadata import ServerInfo
from ..api.prometheus import MetricRegistries
from ..core.errors import InvalidArgument
from ..frontends.forwarding import answer_rpc
from ..frontends.hub import FrontendHub
from ..frontends.supervisor import FrontendPool
from ..repository.gateway import InProcessGateway
from .frontend_process import FrontendSetup, main
from .options import is_true
from .plan import ServePlan
from .ports import ReservedPorts

_REUSE_PORT = "grpc.so_reuseport"


def check_frontends(plan: ServePlan) -> None:
    """Raises `InvalidArgument` for what one frontend does and several do not; the message names the flag."""
    options = plan.options
    if options.server.frontends == 1:
        return
    refused = {
        "--files-dir": options.files.files_dir is not None,
        "--allow-sagemaker": is_true(options.cloud.allow_sagemaker),
        "--allow-vertex-ai": is_true(options.cloud.allow_vertex_ai),
    }
    for flag, given in refused.items():
        if given:
            raise InvalidArgument(f"{flag}: is not served by several frontends (--frontends)")


def frontend_pool(
    plan: ServePlan,
    gateway: InProcessGateway,
    ports: ReservedPorts,
    info: ServerInfo,
    metrics: MetricRegistries,
) -> FrontendPool:
    """The frontends that `plan` asks for, on the reserved ports. `metrics`: what endpoints show and explain."""
    server, settings = plan.options.server, plan.endpoints
    app = routed_app(all_routes(gateway, info, settings.http, metrics))
    hub = FrontendHub(gateway, app, partial(answer_rpc, gateway))
    options = [option for option in settings.grpc.channel_options if option[0] != _REUSE_PORT]
    grpc = settings.grpc._replace(channel_options=(*options, (_REUSE_PORT, 1)))
    http_port, grpc_port = (None if sock is None else sock.getsockname()[1] for sock in (ports.http, ports.grpc))
    setup = FrontendSetup(
        replace(settings, grpc=grpc),
        info,
        server.http_address,
        http_port,
        grpc_port,
        metrics.shown is not None,
        is_true(server.allow_client_shm),
        gateway.shared_state.traces.sends_spans,
        server.max_loop_lag_secs,
        server.log_settings,
    )
    return FrontendPool(hub, server.frontends, main, setup)
