"""The extensions of one server's routes, as one: their routes, what they measure, and the time that they run. Also what
crosses of them to workers, each of which forwards most of their requests.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from starlette.routing import Route

from ..core.extension_contracts import EndpointFunction, ExtensionHost, RoutesPlan, ServedRoutes, StateStore
from ..core.gateway import Administration
from ..core.metrics import Measurement
from ..core.request_context import RequestContext


class RouteExtensions:
    """The extensions of `plans`; `serve` is called once, before all else. `state`: what `--state-dir` keeps."""

    def __init__(self, plans: Iterable[RoutesPlan] = (), state: StateStore | None = None) -> None:
        self.plans = tuple(plans)
        self._state = state
        self._served: list[ServedRoutes] = []

    def serve(self, administration: Administration, endpoints: Mapping[str, EndpointFunction]) -> list[Any]:
        """The routes of all. `endpoints`: the server's own, by path."""
        host = ExtensionHost(administration, endpoints, self._state)
        self._served = [plan.serve(host) for plan in self.plans]
        static = [route for plan in self.plans for route in plan.static_routes()]
        return [*static, *(route for served in self._served for route in served.routes)]

    @property
    def listed(self) -> Mapping[str, str]:
        """The names and paths that they add to the list of endpoints."""
        return {name: paths for plan in self.plans for name, paths in plan.listed.items()}

    def in_workers(self) -> "WorkerRoutes":
        """The routes that a worker forwards, once they are served here. Raises `TypeError` for one that no worker
        could."""
        routes = [route for served in self._served for route in served.routes]
        for route in routes:
            if not isinstance(route, Route):
                raise TypeError(f"{route!r} of an extension is no Route, and several workers can forward no other")
        static = tuple(plan.static_routes for plan in self.plans)
        return WorkerRoutes(static, tuple(map(ForwardedRoute.of, routes)), self.listed)

    def measure(self) -> Iterator[Measurement]:
        """The readings of a scrape."""
        for served in self._served:
            if served.measure is not None:
                yield from served.measure()

    def end_listeners(self) -> list[tuple[Callable[[RequestContext], None], bool]]:
        """The functions that are called with each request that has ended; whether those to routes are enough."""
        return [(served.request_ended, served.of_routes) for served in self._served if served.request_ended is not None]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run what they do beside their endpoints, during the block."""
        async with AsyncExitStack() as stack:
            for served in self._served:
                await stack.enter_async_context(served.running())
            yield


class ForwardedRoute(NamedTuple):
    """A route as a worker knows it that forwards its requests. `path`: with the names in it."""

    path: str
    methods: tuple[str, ...]

    @classmethod
    def of(cls, route: Route) -> "ForwardedRoute":
        return cls(route.path, tuple(sorted(route.methods or ())))

    def answered_by(self, forward: EndpointFunction) -> Route:
        return Route(self.path, forward, methods=[*self.methods])


class WorkerRoutes(NamedTuple):
    """The extensions as a worker knows them: what it answers by itself, what it forwards, and what it lists."""

    static_routes: tuple[Callable[[], Sequence[Any]], ...]
    forwarded: tuple[ForwardedRoute, ...]
    listed: Mapping[str, str]

    def routes(self, forward: EndpointFunction) -> list[Any]:
        """Made once. `forward`: answers in place of endpoints that are not the worker's."""
        static = [route for made in self.static_routes for route in made()]
        return [*static, *(route.answered_by(forward) for route in self.forwarded)]
