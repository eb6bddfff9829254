"""The extensions of one server's routes, as one: their routes, what they measure, and the time that they run. Also what
crosses of them to workers, each of which forwards most of their requests.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.routing import Route

from ..core.extension_contracts import EndpointFunction, ExtensionHost, RoutesPlan, ServedRoutes
from ..core.gateway import ModelLookup
from ..core.metrics import Measurement


class RouteExtensions:
    """What `plans` serve: nothing before `serve` was called, which happens once."""

    def __init__(self, plans: Iterable[RoutesPlan] = ()) -> None:
        self.plans = tuple(plans)
        self._served: list[ServedRoutes] = []

    def serve(self, gateway: ModelLookup, endpoints: Mapping[str, EndpointFunction]) -> list[Any]:
        """The routes of all. `endpoints`: the server's own, by path."""
        host = ExtensionHost(gateway, endpoints)
        self._served = [plan.serve(host) for plan in self.plans]
        return [route for served in self._served for route in served.routes]

    def in_workers(self) -> "tuple[WorkerRoutes, ...]":
        """What a worker is told of each, once it is served here."""
        return tuple(map(WorkerRoutes.of, self.plans, self._served))

    def measure(self) -> Iterator[Measurement]:
        """The readings of a scrape."""
        for served in self._served:
            if served.measure is not None:
                yield from served.measure()

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


@dataclass(frozen=True, slots=True)
class WorkerRoutes:
    """An extension as a worker knows it. `plan`: of one that answers in each worker, else None."""

    plan: RoutesPlan | None
    forwarded: tuple[ForwardedRoute, ...]
    listed: Mapping[str, str]

    @classmethod
    def of(cls, plan: RoutesPlan, served: ServedRoutes) -> "WorkerRoutes":
        """Raises `TypeError` for a route that no worker could forward."""
        if plan.in_each_worker:
            return cls(plan, (), plan.listed)
        for route in served.routes:
            if not isinstance(route, Route):
                raise TypeError(f"{route!r} of an extension is no Route, and several workers can forward no other")
        return cls(None, tuple(map(ForwardedRoute.of, served.routes)), plan.listed)


def worker_extensions(told: Sequence[WorkerRoutes], forward: EndpointFunction) -> RouteExtensions:
    """The extensions of a worker. `forward`: answers in place of endpoints that are not the worker's."""

    def forwarding(routes: WorkerRoutes) -> RoutesPlan:
        made = [route.answered_by(forward) for route in routes.forwarded]
        return RoutesPlan(serve=lambda _: ServedRoutes(routes=made), listed=routes.listed)

    return RouteExtensions(routes.plan or forwarding(routes) for routes in told)
