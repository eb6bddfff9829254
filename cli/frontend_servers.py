"""The doors of one server, over one hub: HTTP and gRPC for requests, a third for who measures."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractAsyncContextManager

from prometheus_client import CollectorRegistry

from .. import __version__
from ..api.app import build_app
from ..api.grpc.server import GrpcServer
from ..api.http.metrics_server import machine_metric_sources, serve_metrics
from ..api.http.server import HttpServer, ListeningServer, ServerGroup
from ..api.metadata import ServerInfo
from ..api.prometheus import MetricsSource, build_registry
from ..api.triton.cloud_middleware import CloudMiddleware
from ..repository.gateway import InProcessGateway
from .announcement import base_url, print_ready, reachable_address
from .plan import ServePlan
from .ports import ReservedPorts
from .server_options import is_true


class FrontendServers:
    """On ports that are reserved for them; closed at first. Metrics are those of `sources` and of the machine.

    Raises:
        InvalidArgument: gRPC's files of TLS are no good any more.
    """

    def __init__(
        self, plan: ServePlan, hub: InProcessGateway, ports: ReservedPorts, sources: Iterable[MetricsSource]
    ) -> None:
        self._plan, self._hub, self._ports = plan, hub, ports
        server = plan.server
        self._info = ServerInfo(server.id, __version__, server.http_max_input_size, server.max_raw_input_size)
        self._registry: CollectorRegistry | None = None
        if is_true(plan.server.allow_metrics):
            measured, vllm = (*sources, *machine_metric_sources(plan.server)), plan.server.metrics_names == "vllm"
            self._registry = build_registry(measured, vllm, plan.metrics.hidden)
        self._grpc: GrpcServer | None = None
        if ports.grpc is not None:
            self._grpc = GrpcServer(hub, self._info, plan.grpc, ports.grpc, plan.endpoints.grpc)

    def metrics(self) -> AbstractAsyncContextManager[None]:
        """Metrics are served on their own port during the block, if they are wanted."""
        return serve_metrics(self._registry, self._ports.metrics)

    async def start(self) -> ServerGroup:
        """Open those for requests, whatever is loaded by now."""
        doors = ServerGroup(*self._wanted())
        await doors.start()
        if self._ports.http is not None:
            print(f"Listening on {self._url}", flush=True)
        return doors

    def _wanted(self) -> Iterator[ListeningServer]:
        entry = self._plan.endpoints
        app = build_app(self._hub, self._info, entry.keys, entry.http, self._registry)
        patience = entry.http.body_timeout
        if self._ports.http is not None:
            yield HttpServer(app, self._ports.http, access_log=True, tls=entry.tls, body_timeout=patience)
        for cloud, sock in zip(entry.clouds, self._ports.clouds, strict=True):
            yield HttpServer(CloudMiddleware(app, cloud, self._models), sock, access_log=True, body_timeout=patience)
        if self._grpc is not None:
            yield self._grpc

    def _models(self) -> list[str]:
        return [config.name for config in self._hub.model_configs()]

    def print_addresses(self) -> None:
        """Say where it serves."""
        entry, options = self._plan.endpoints, self._plan.server
        if self._grpc is not None:
            print(f"gRPC on {reachable_address(self._plan.grpc.grpc_address, self._grpc.port)}")
        for cloud, sock in zip(entry.clouds, self._ports.clouds, strict=True):
            print(f"{cloud.name} on {base_url(options.http_address, sock.getsockname()[1])}")
        if self._ports.http is None:
            print("Serving without HTTP", flush=True)
            return
        print_ready(self._hub, self._url, bool(entry.keys))

    @property
    def _url(self) -> str:
        http = self._ports.http
        port = 0 if http is None else http.getsockname()[1]
        return base_url(self._plan.server.http_address, port, self._plan.endpoints.tls is not None)
