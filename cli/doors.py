"""The doors of one server, over one hub: HTTP and gRPC for requests, a third for who measures."""

from contextlib import AbstractAsyncContextManager

from .. import __version__
from ..api.announcement import reachable, say_ready, url
from ..api.app import build_app
from ..api.grpc_server import GrpcServer
from ..api.metadata import ServerInfo
from ..api.metrics import Source, build_registry
from ..api.metrics_server import metrics_served, of_machine
from ..api.ports import Ports
from ..api.server import HttpServer, Servers, StopSignals
from ..api.serving import serve
from ..core import garbage
from ..repository.gateway import Hub
from .plan import Plan


class Doors:
    """On ports that are reserved for them; closed at first.

    Raises:
        InvalidArgument: an option of gRPC means nothing.
    """

    def __init__(self, plan: Plan, hub: Hub, ports: Ports) -> None:
        self._plan, self._hub, self._ports = plan, hub, ports
        self._info = ServerInfo(plan.server.id, __version__, plan.server.http_max_input_size)
        self._grpc = GrpcServer(hub, self._info, plan.grpc, ports.grpc, plan.entry.keys)

    def metrics(self, *sources: Source) -> AbstractAsyncContextManager[None]:
        """Metrics of these and of the machine are served during the block, if they are wanted."""
        server, hidden = self._plan.server, self._plan.metrics.hidden
        registry = build_registry((*sources, *of_machine(server)), server.metrics_names == "vllm", hidden)
        return metrics_served(registry, self._ports.metrics)

    async def serve(self, stop: StopSignals) -> None:
        """Open those for requests and say so; return when somebody asked to stop and they are closed."""
        entry, options = self._plan.entry, self._plan.server
        app = build_app(self._hub, self._info, entry.keys, entry.rules)
        doors = Servers(HttpServer(app, self._ports.http, access_log=True, tls=entry.tls), self._grpc)
        garbage.settle()
        await doors.start()
        self._announce()
        await serve(self._hub, doors, stop, options.exit_timeout_secs)

    def _announce(self) -> None:
        entry, http = self._plan.entry, self._ports.http.getsockname()[1]
        print(f"gRPC on {reachable(self._plan.grpc.grpc_address, self._grpc.port)}")
        at = url(self._plan.server.http_address, http, entry.tls is not None)
        say_ready(self._hub, at, bool(entry.keys))
