"""The console's page, and the graphs of models, as an extension of the server's routes."""

from functools import partial
from typing import TYPE_CHECKING

from ...core.errors import InvalidArgument
from ...core.extension_contracts import (
    ExtensionHost,
    PathAccess,
    RoutesExtension,
    RoutesPlan,
    ServedRoutes,
    ServerFacts,
)
from .options import ConsoleOptions

if TYPE_CHECKING:
    from starlette.routing import Route

_ACCESS = (PathAccess("/console", needs_key=False, restricted_api="metadata"),)


def plan_console(options: ConsoleOptions, server: ServerFacts) -> RoutesPlan:
    """Raises `InvalidArgument` for a flag that has no effect without another, and as `parse_console_hosts`."""
    if not options.console:
        if options.console_host:
            raise InvalidArgument("--console-host has no effect without --console")
        return RoutesPlan(serve=_serve_graphs, access=_ACCESS)
    if not server.serves_http:
        raise InvalidArgument("--console is served over HTTP, which --allow-http false turns off")
    from .routes import parse_console_hosts

    hosts = parse_console_hosts(options.console_host, server.http_address)
    return RoutesPlan(
        serve=_serve_graphs,
        static_routes=partial(_console_routes, hosts | {*server.host_names}),
        access=_ACCESS,
        host_names=hosts,
        pages={"Console": "/console"},
    )


def _console_routes(names: frozenset[str]) -> "list[Route]":
    """The routes in each worker: the hosts are those of a client's connection, which no other process knows."""
    from .routes import ConsoleRoutes

    return ConsoleRoutes(names).routes()


def _serve_graphs(host: ExtensionHost) -> ServedRoutes:
    from .graph_routes import GraphRoutes

    return ServedRoutes(routes=GraphRoutes(host.administration).routes())


EXTENSION = RoutesExtension(ConsoleOptions, "HTTP", plan_console)
