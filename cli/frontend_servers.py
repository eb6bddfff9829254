"""The servers of one process, over one gateway: HTTP, gRPC and the clouds' for requests, another one for metrics."""

import asyncio
import os
import shlex
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

from prometheus_client import CollectorRegistry

from .. import __version__
from ..api.app import build_app
from ..api.grpc.server import GrpcServer
from ..api.http.server import HttpServer
from ..api.metadata import ServerInfo
from ..api.prometheus import MetricsApp, MetricsSource, build_registry
from ..api.triton.clouds import CloudMiddleware
from ..core.cancellation import wait_for_first
from ..repository.gateway import InProcessGateway
from ..telemetry.gpus import Gpus
from ..telemetry.host_metrics import HostMetrics
from ..telemetry.shared_state import ServerGateway
from .plan import ServePlan
from .ports import ReservedPorts
from .server_options import ServerOptions, is_true

_NO_GPUS = "TRITON_SERVER_CPU_ONLY"
"""The environment variable that, set to anything, turns the gauges of GPUs off, as in tritonserver."""


class ListeningServer(Protocol):
    """A server of one port."""

    async def start(self) -> None:
        """Return when it listens."""

    async def ended(self) -> None:
        """Return, or raise, when serving ends."""

    async def stop(self, force: bool = False) -> None:
        """Accept no more requests; with `force`, cancel those that still run."""


class ServerGroup:
    """Several servers that start, end and stop together."""

    def __init__(self, *servers: ListeningServer) -> None:
        self._servers = servers

    async def start(self) -> None:
        for server in self._servers:
            await server.start()

    async def ended(self) -> None:
        await wait_for_first(*(server.ended() for server in self._servers))

    async def stop(self, force: bool = False) -> None:
        await asyncio.gather(*(server.stop(force) for server in self._servers))


class FrontendServers:
    """The servers of one process, on ports that are reserved for them; `start` opens those for requests.

    Metrics are those of `sources` and of the machine.
    """

    def __init__(
        self, plan: ServePlan, gateway: InProcessGateway, ports: ReservedPorts, sources: Iterable[MetricsSource]
    ) -> None:
        self._plan, self._gateway, self._ports = plan, gateway, ports
        server = plan.server
        self._info = ServerInfo(server.id, __version__, server.http_max_input_size, server.max_raw_input_size)
        self._registry: CollectorRegistry | None = None
        if is_true(plan.server.allow_metrics):
            measured, vllm = (*sources, *machine_metric_sources(plan.server)), plan.server.metrics_names == "vllm"
            self._registry = build_registry(measured, vllm, plan.metrics.hidden)
        self._grpc: GrpcServer | None = None
        if ports.grpc is not None:
            self._grpc = GrpcServer(gateway, self._info, plan.endpoints.grpc, ports.grpc, plan.endpoints.grpc_policy)

    @asynccontextmanager
    async def metrics(self) -> AsyncIterator[None]:
        """Serve metrics on their own port during the block, if they are wanted."""
        if self._registry is None or self._ports.metrics is None:
            yield
            return
        server = HttpServer(MetricsApp(self._registry), self._ports.metrics, access_log=False)
        await server.start()
        print(f"Metrics on {base_url(*self._ports.metrics.getsockname()[:2])}/metrics")
        try:
            yield
        finally:
            await server.stop(force=True)

    async def start(self) -> ServerGroup:
        """Open the servers for requests, whatever is loaded by now."""
        servers = ServerGroup(*self._wanted())
        await servers.start()
        if self._ports.http is not None:
            print(f"Listening on {self._url}", flush=True)
        return servers

    def _wanted(self) -> Iterator[ListeningServer]:
        settings = self._plan.endpoints
        app = build_app(self._gateway, self._info, settings.keys, settings.http, self._registry)
        timeout = settings.http.body_timeout
        if self._ports.http is not None:
            yield HttpServer(app, self._ports.http, access_log=True, tls=settings.tls, body_timeout=timeout)
        for cloud, sock in zip(settings.clouds, self._ports.clouds, strict=True):
            yield HttpServer(CloudMiddleware(app, cloud, self._models), sock, access_log=True, body_timeout=timeout)
        if self._grpc is not None:
            yield self._grpc

    def _models(self) -> list[str]:
        return [config.name for config in self._gateway.model_configs()]

    def print_addresses(self) -> None:
        """Print the URLs, once models are loaded."""
        settings, options = self._plan.endpoints, self._plan.server
        if self._grpc is not None:
            print(f"gRPC on {reachable_address(settings.grpc.address, self._grpc.port)}")
        for cloud, sock in zip(settings.clouds, self._ports.clouds, strict=True):
            print(f"{cloud.name} on {base_url(options.http_address, sock.getsockname()[1])}")
        if self._ports.http is None:
            print("Serving without HTTP", flush=True)
            return
        print_ready(self._gateway, self._url, bool(settings.keys))

    @property
    def _url(self) -> str:
        http = self._ports.http
        port = 0 if http is None else http.getsockname()[1]
        return base_url(self._plan.server.http_address, port, self._plan.endpoints.tls is not None)


def machine_metric_sources(
    options: ServerOptions, environment: Mapping[str, str] = os.environ
) -> Iterator[MetricsSource]:
    """The sources of the machine's metrics that `options` ask for."""
    if is_true(options.allow_cpu_metrics):
        yield HostMetrics().measure
    if is_true(options.allow_gpu_metrics) and _NO_GPUS not in environment:
        yield Gpus().measure


def reachable_address(address: str, port: int) -> str:
    """The address and port by which a client on this machine reaches what listens on `address`."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def base_url(address: str, port: int, encrypted: bool = False) -> str:
    return f"{'https' if encrypted else 'http'}://{reachable_address(address, port)}"


def print_ready(gateway: ServerGateway, at: str, guarded: bool) -> None:
    """Print the URL, and a command line to try; `guarded`: it needs a key."""
    key = "-H 'Authorization: Bearer <key>' " if guarded else ""
    print(f"Serving on {at}")
    for config in gateway.model_configs():
        if any(spec.name == "text_input" for spec in config.inputs):
            body = shlex.quote('{"text_input": "def fibonacci(n):", "max_tokens": 64}')
            print(f"Try: curl -N {key}{at}/v2/models/{config.name}/generate_stream -d {body}")
            break
    sys.stdout.flush()
