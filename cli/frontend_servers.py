"""The servers of one process, over one gateway: HTTP, gRPC and the clouds' for requests, another one for metrics."""

import asyncio
import logging
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from .. import __version__
from ..api.app import all_routes, protected_app, routed_app
from ..api.extensions import RouteExtensions
from ..api.grpc.control_rpcs import BoundRpc, bound_rpcs
from ..api.grpc.server import GrpcServer
from ..api.http.server import HttpServer
from ..api.metadata import ServerInfo
from ..api.prometheus import MetricRegistries, MetricsSource, build_registry, metrics_app
from ..api.triton.clouds import CloudMiddleware
from ..core.metrics import Measurement, Reading
from ..core.tasks import end_within, wait_for_first
from ..processes.shared_port import spare_first_listener
from ..repository.gateway import InProcessGateway
from .model_host import machine_metric_sources
from .options import is_true
from .plan import ServePlan
from .ports import SOCKETS_CLOSE_SECONDS, ReservedPorts

if TYPE_CHECKING:
    from ..http_workers.growing_pool import GrowingPool
    from ..http_workers.supervisor import WorkerPool

log = logging.getLogger(__name__)

_QUESTION = '{"text_input": "How do I remove duplicates from a list?"}'
_PROMPT = '{"text_input": "def fibonacci(n):", "max_tokens": 64}'


class FrontendServers:
    """The servers of one process, on ports that are reserved for them: they start, end and stop together.

    Metrics are those of `sources` and of the machine.
    """

    def __init__(
        self, plan: ServePlan, gateway: InProcessGateway, ports: ReservedPorts, sources: Iterable[MetricsSource]
    ) -> None:
        self._plan = plan
        self._gateway = gateway
        self._ports = ports
        self._workers: WorkerPool | None = None
        self._pool: WorkerPool | GrowingPool | None = None
        """What starts the workers: they themselves, or what watches whether they are wanted."""
        server = plan.options.server
        self._extensions = RouteExtensions(plan.extensions, plan.selection.state)
        sources = (*sources, self._extensions.measure, self._measure_frontends)
        shown = self._metrics = None
        if ports.metrics is not None:
            measured = *sources, *machine_metric_sources(server)
            vllm, custom = server.metrics_names == "vllm", gateway.shared_state.metrics
            shown = build_registry(measured, vllm, plan.metrics.hidden, custom, plan.extension_families)
            self._metrics = HttpServer(metrics_app(shown), ports.metrics, access_log=False)
        metrics = MetricRegistries(shown, build_registry(sources))
        sizes = server.http_max_input_size, server.max_raw_input_size, server.max_response_bytes
        info = ServerInfo(server.id, __version__, *sizes)
        several, rules = plan.frontends.most > 1, plan.endpoints.http
        routes = all_routes(gateway, info, rules, metrics, self._extensions, self.settle if several else None)
        app, rpcs = routed_app(routes), bound_rpcs(gateway, self.settle if several else None)
        self._servers: list[HttpServer | GrpcServer] = []
        if plan.frontends.grows or not several:
            self._servers += self._own_servers(info, app, rpcs)
        if several:
            self._set_up_workers(info, app, rpcs, metrics)
        for listener, of_routes in self._extensions.end_listeners():
            gateway.add_end_listener(listener, of_routes)

    def _set_up_workers(
        self, info: ServerInfo, app: ASGIApp, rpcs: Mapping[str, BoundRpc], metrics: MetricRegistries
    ) -> None:
        """Make the frontends that there are from the start, or are started when this process is busy. Raises
        `TypeError` as `RouteExtensions.in_workers`, where they are to be there."""
        from ..http_workers.growing_pool import GrowingPool
        from .several_frontends import frontend_pool

        frontends = self._plan.frontends
        try:
            pool = frontend_pool(self._plan, self._gateway, self._ports, info, app, rpcs, metrics, self._extensions)
        except TypeError as error:
            if not frontends.grows:
                raise
            log.warning("this server stays one process: %s", error)
            return
        self._workers = pool
        self._pool = GrowingPool(pool, frontends.limit, self._give_connections_away) if frontends.grows else pool

    def _give_connections_away(self, frontends: int) -> None:
        """Have so many frontends, which listen by now, take new connections in place of this process."""
        if not is_true(self._plan.options.server.reuse_http_port):  # else others of the group may be another server's
            for sock in filter(None, (self._ports.http, *self._ports.clouds)):
                spare_first_listener(sock, frontends)
        for server in self._servers:
            if isinstance(server, HttpServer):
                server.give_connections_away()

    def _own_servers(
        self, info: ServerInfo, app: ASGIApp, rpcs: Mapping[str, BoundRpc]
    ) -> "list[HttpServer | GrpcServer]":
        """The servers of a process that does all by itself."""
        gateway = self._gateway
        settings = self._plan.endpoints
        ports = self._ports
        servers: list[HttpServer | GrpcServer] = []
        app = protected_app(app, gateway, settings.keys, settings.http)
        timeout = settings.http.body_timeout
        if ports.http is not None:
            servers.append(HttpServer(app, ports.http, access_log=True, tls=settings.tls, body_timeout=timeout))
        for cloud, sock in zip(settings.clouds, ports.clouds, strict=True):
            translated = CloudMiddleware(app, cloud, self._model_names)
            servers.append(HttpServer(translated, sock, access_log=True, body_timeout=timeout))
        if ports.grpc is not None:
            grpc = settings.grpc
            if self._plan.frontends.grows:
                from .several_frontends import on_shared_port

                grpc = on_shared_port(grpc)
            servers.append(GrpcServer(gateway, info, grpc, ports.grpc, settings.grpc_policy, rpcs))
        return servers

    def _measure_frontends(self) -> Iterator[Measurement]:
        frontends, serving = self._plan.frontends, 0
        if self._workers is not None:
            serving = self._workers.listening
            yield from self._workers.measure()
        own = Reading("charonia_frontends", serving or 1, {"setting": str(frontends.setting)})
        yield Measurement({}, [own, Reading("charonia_frontends_auto", frontends.auto)])

    @asynccontextmanager
    async def metrics(self) -> AsyncIterator[None]:
        """Serve metrics on their own port during the block, if they are wanted."""
        if self._metrics is None or self._ports.metrics is None:
            yield
            return
        await self._metrics.start()
        say(f"Metrics on {base_url(*self._ports.metrics.getsockname()[:2])}/metrics")
        try:
            yield
        finally:
            await self._metrics.stop(force=True)

    async def start(self) -> None:
        """Open the servers for requests, whatever is loaded by now."""
        for server in (*self._servers, *self._pools()):
            await server.start()
        if self._ports.http is not None:
            say(f"Listening on {bound_url(self._ports.http, self._plan.endpoints.tls is not None)}")
        self._write_url()

    async def ended(self) -> None:
        """Return, or raise, when one of the servers for requests ends."""
        await wait_for_first(*(server.ended() for server in (*self._servers, *self._pools())))

    def _pools(self) -> "Iterator[WorkerPool | GrowingPool]":
        if self._pool is not None:
            yield self._pool

    async def settle(self) -> None:
        """Return when requests for all that is loaded can be answered."""
        if self._workers is not None:
            await self._workers.hub.settle()

    def extensions(self) -> AbstractAsyncContextManager[None]:
        """Run what extensions do beside their endpoints during the block, now that models are loaded."""
        return self._extensions.running()

    def _write_url(self) -> None:
        """Write where a client on this machine reaches the server; a file that cannot be written costs a warning."""
        path, ports = self._plan.options.server.url_file, self._ports
        if path is None:
            return
        url = ""
        if ports.http is not None:
            url = self._url(ports.http)
        elif ports.grpc is not None:
            url = f"grpc://{reachable_address(self._plan.endpoints.grpc.address, ports.grpc.getsockname()[1])}"
        try:
            path.write_text(f"{url}\n")
        except OSError as error:
            log.warning("--url-file %s cannot be written: %s", path, error.strerror)

    async def stop(self, force: bool) -> None:
        """Accept no more requests; with `force`, cancel those that still run."""
        if self._plan.options.server.url_file is not None:
            with suppress(OSError):
                self._plan.options.server.url_file.unlink(missing_ok=True)
        own = end_within(SOCKETS_CLOSE_SECONDS, *(server.stop(force) for server in self._servers))
        late, *_ = await asyncio.gather(own, *(pool.stop(force) for pool in self._pools()))
        if late:
            log.warning("the server ends before its sockets are closed")

    def print_addresses(self) -> None:
        """Print the URLs, and a command line to try, once models are loaded."""
        settings, ports = self._plan.endpoints, self._ports
        lines = []
        if ports.grpc is not None:
            lines.append(f"gRPC on {reachable_address(settings.grpc.address, ports.grpc.getsockname()[1])}")
        for cloud, sock in zip(settings.clouds, ports.clouds, strict=True):
            lines.append(f"{cloud.name} on {base_url(self._plan.options.server.http_address, sock.getsockname()[1])}")
        if ports.http is None:
            lines.append("Serving without HTTP")
        else:
            url = self._url(ports.http)
            lines += [f"Serving on {url}", *self._example(url)]
            lines += [f"{name} on {url}{path}" for plan in self._plan.extensions for name, path in plan.pages.items()]
        say(*lines)

    def _example(self, url: str) -> Iterator[str]:
        """The line that shows how to ask the first model that generates text, or writes sounds down, if one does."""
        key = "-H 'Authorization: Bearer <key>' " if self._plan.endpoints.keys else ""
        for config in self._gateway.model_configs():
            if config.transcribes:
                model = f"-F file=@speech.wav -F model={shlex.quote(config.name)}"
                yield f"Try: curl {key}{url}/v1/audio/transcriptions {model}"
                return
            inputs, outputs = ({spec.name for spec in specs} for specs in (config.inputs, config.outputs))
            if "text_input" in inputs and "text_output" in outputs:
                body = shlex.quote(_QUESTION if config.openai_api == "chat" else _PROMPT)
                yield f"Try: curl -N {key}{url}/v2/models/{config.name}/generate_stream -d {body}"
                return

    def _url(self, http: socket.socket) -> str:
        encrypted = self._plan.endpoints.tls is not None
        return base_url(self._plan.options.server.http_address, http.getsockname()[1], encrypted)

    def _model_names(self) -> list[str]:
        return [config.name for config in self._gateway.model_configs()]


def say(*lines: str) -> None:
    """Write `lines` to standard output at once and in one piece: no line of the log falls into them."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def reachable_address(address: str, port: int) -> str:
    """The address and port by which a client on this machine reaches what listens on `address`."""
    return _address({"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address), port)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound_url(sock: socket.socket, encrypted: bool = False) -> str:
    """The URL of the address that a socket is bound to, which may stand for all of the machine's."""
    host, port = sock.getsockname()[:2]
    return f"{'https' if encrypted else 'http'}://{_address(host, port)}"


def base_url(address: str, port: int, encrypted: bool = False) -> str:
    return f"{'https' if encrypted else 'http'}://{reachable_address(address, port)}"
