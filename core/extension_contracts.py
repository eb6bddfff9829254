"""What packages add to the server by entry points: HTTP endpoints (`charonia.routes`), and observers of requests.

    EXTENSION = RoutesExtension(GreetingOptions, "Greetings", plan_greetings)

The server calls `plan` with the options' flags before it opens a port, then `RoutesPlan.serve` once, in the process
that has the models. Routes are Starlette's or FastAPI's.
"""

from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from .gateway import Administration, ModelHandle, ResponseStream
from .metrics import Measurement, MetricFamily
from .request import GenerateChunk, GenerateRequest, InferRequest, InferResponse
from .request_context import RequestContext

OptionsT = TypeVar("OptionsT")
Item = TypeVar("Item", InferResponse, GenerateChunk)
Kept = TypeVar("Kept", bound=msgspec.Struct)

EndpointFunction: TypeAlias = Callable[[Any], Awaitable[Any]]
"""Takes a request and returns a response, which is an ASGI application. Raises `CharoniaError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """The server's own flags, as far as extensions depend on them."""

    serves_http: bool
    """Whether the server answers HTTP."""
    http_address: str
    """The address that it listens on."""
    host_names: Collection[str]
    """The names of this server by `--allowed-hosts`; `*` is any."""
    tenants: int
    """The number of tenants that have API keys; 0 without keys."""


class StateStore(Protocol):
    """Stores structs by name; they outlive the server."""

    def read(self, name: str, kind: type[Kept]) -> Kept | None:
        """The struct stored by that name, or None. Raises `InvalidArgument` for a damaged file."""

    def write(self, name: str, kept: msgspec.Struct) -> None:
        """Store a struct by that name; blocks. Raises `Internal` if the disk refuses: then nothing changed."""


@dataclass(frozen=True, slots=True)
class ExtensionHost:
    """The server, as its extensions see it."""

    administration: Administration
    """The server's models."""
    endpoints: Mapping[str, EndpointFunction]
    """The server's own endpoints by path, to be called as a client would."""
    state: StateStore | None = None
    """The store of `--state-dir`; None without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRoutes:
    routes: Sequence[Any] = ()
    """Routes of Starlette or FastAPI, tried before the server's own. A plain `starlette.routing.Route` for POST is
    called without FastAPI's middleware, as the server's are."""
    running: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext
    """A block around the time in which models are served: from the end of the first loads until the server begins to
    exit, before it waits for running requests."""
    measure: Callable[[], Iterable[Measurement]] | None = None
    """Called at each scrape."""
    request_ended: Callable[[RequestContext], None] | None = None
    """Called with the context of every request to a model when it ends."""
    of_routes: bool = False
    """`request_ended` is called with requests to routes alone: small ones to models need no context then."""


def serve_nothing(host: ExtensionHost) -> ServedRoutes:
    return ServedRoutes()


class PathAccess(NamedTuple):
    """Who may use a path and those below it."""

    path: str
    needs_key: bool = True
    """Whether a client must show an API key, if the server has keys."""
    restricted_api: str = ""
    """Its part of the API in `--http-restricted-api`; empty for none."""
    is_private: bool = False
    """Whether foreign web pages are refused on a server without keys, even for reading: it has clients' data or changes
    the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesPlan:
    """What an extension will serve by its flags. Nothing runs yet."""

    serve: Callable[[ExtensionHost], ServedRoutes] = serve_nothing
    """Called once, in the event loop of the process that has the models; HTTP workers forward requests there."""
    static_routes: Callable[[], Sequence[Any]] = tuple
    """Routes without state, which every worker answers itself. Must be picklable, since each process calls it."""
    access: Sequence[PathAccess] = ()
    """Paths that are not open to every client with a key."""
    host_names: Collection[str] = ()
    """More names of this server, beside those in `ServerFacts`."""
    listed: Mapping[str, str] = field(default_factory=dict)
    """Names and paths for the list of endpoints on `/`."""
    pages: Mapping[str, str] = field(default_factory=dict)
    """Names and paths of pages for people, printed when the server has started."""
    metrics: Sequence[MetricFamily] = ()
    """The families of its measurements."""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of an extension that has no flags."""


@dataclass(frozen=True, slots=True)
class RoutesExtension(Generic[OptionsT]):
    options: type[OptionsT]
    """A frozen dataclass with keyword-only fields that have defaults: each is a flag of `charonia serve`, read by
    cyclopts, and the string under it is its help."""
    heading: str
    """The heading of its flags in the help."""
    plan: Callable[[OptionsT, ServerFacts], RoutesPlan]
    """Raises `CharoniaError` for wrong flags. Slow imports belong here."""


class ResidentHandle(ModelHandle, Protocol):
    """A loaded version, held by a request that no client waits for."""

    @property
    def generates_text(self) -> bool: ...

    @property
    def asks_models(self) -> bool:
        """Whether it only asks other models."""


class ResidentModels(Protocol):
    """The loaded models, for requests that no client waits for."""

    def acquire_resident(self, context: RequestContext, name: str, version: str = "") -> ResidentHandle | None:
        """As `ModelLookup.acquire`, but it loads nothing, and the server exits without waiting for the request. None if
        the model is not in memory."""


class RouteObserver(Protocol):
    """Follows the requests for one route."""

    def follow(
        self, request: InferRequest | GenerateRequest, context: RequestContext, responses: ResponseStream[Item]
    ) -> ResponseStream[Item]:
        """The responses as the client gets them."""


class RequestObserver(Protocol):
    """Follows the server's requests, in the event loop of the process that has the models."""

    def observe_route(self, name: str, route: Mapping[str, Any]) -> RouteObserver | None:
        """The observer of a route's requests, or None. Called when a route is added or changes, with the route as in
        `routes.yaml`."""

    def forget_others(self, routes: Container[str]) -> None:
        """Drop the counts of all other routes."""

    def measure(self) -> Iterable[Measurement]:
        """The readings of a scrape."""

    def close(self) -> None:
        """Called when the server begins to exit."""


@dataclass(frozen=True, slots=True)
class ObserverExtension:
    observe: Callable[[ResidentModels], RequestObserver]
    """Called once, before there are routes."""
    metrics: Sequence[MetricFamily] = ()
    """The families of its measurements."""
    route_fields: frozenset[str] = frozenset()
    """The fields of `charonia.routing.route.OBSERVED_FIELDS` that it serves."""
