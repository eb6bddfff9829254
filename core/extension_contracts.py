"""What entry points of `charonia.routes` and `charonia.request_observers` name: endpoints of HTTP that another package
adds to the server, and what follows its requests.

    EXTENSION = RoutesExtension(GreetingOptions, "Greetings", plan_greetings)

Its flags are those of its dataclass. The server calls `plan` with them before it opens a port, and `RoutesPlan.serve`
once in the process that has the models. Knows no library of HTTP: routes are Starlette's or FastAPI's.
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
"""Takes a request, and returns the response, which is an application, or raises `CharoniaError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What the server's own flags say, as far as extensions plan by it."""

    serves_http: bool
    """Whether there is HTTP at all."""
    http_address: str
    """What it listens on."""
    host_names: Collection[str]
    """Names that this server is known by, `*` for any: those of `--allowed-hosts`."""
    tenants: int
    """How many tenants the API keys name; 0 where every client may ask."""


class StateStore(Protocol):
    """Keeps structs by name, beyond the server's end."""

    def read(self, name: str, kind: type[Kept]) -> Kept | None:
        """What was written by that name; None if nothing was. Raises `InvalidArgument` for a file that is damaged."""

    def write(self, name: str, kept: msgspec.Struct) -> None:
        """Keep it in place of what was written by that name; blocks. Raises `Internal` if the disk refuses: then
        nothing changed."""


@dataclass(frozen=True, slots=True)
class ExtensionHost:
    """The server, as its extensions know it."""

    administration: Administration
    """The models, for a request and as they are."""
    endpoints: Mapping[str, EndpointFunction]
    """The server's own endpoints by path, for what asks them as a client would."""
    state: StateStore | None = None
    """What `--state-dir` keeps; None without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRoutes:
    """What an extension serves from now on."""

    routes: Sequence[Any] = ()
    """Routes of Starlette or FastAPI, which are tried before the server's own. The endpoint of a plain
    `starlette.routing.Route` for POST is called without FastAPI's middleware, as the server's are."""
    running: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext
    """A block around the time in which models are served: it begins when those of the start are loaded, and ends when
    the server begins to exit, before it waits for requests that run."""
    measure: Callable[[], Iterable[Measurement]] | None = None
    """Called at each scrape."""
    request_ended: Callable[[RequestContext], None] | None = None
    """Called with the context of every request to a model, at its end."""


def serve_nothing(host: ExtensionHost) -> ServedRoutes:
    return ServedRoutes()


class PathAccess(NamedTuple):
    """Who may ask a path, and those below it."""

    path: str
    needs_key: bool = True
    """Whether a client has to show an API key, where there are some."""
    restricted_api: str = ""
    """The part of the API that it belongs to, as `--http-restricted-api` names it; empty for none."""
    is_private: bool = False
    """Whether web pages from elsewhere are kept away where there are no keys, even from reading: it has clients' data,
    or changes the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesPlan:
    """What an extension will serve, as its flags have it. Nothing runs yet."""

    serve: Callable[[ExtensionHost], ServedRoutes] = serve_nothing
    """Called once, in the event loop of the process that has the models; of several workers each forwards to there."""
    static_routes: Callable[[], Sequence[Any]] = tuple
    """Routes that depend on no model and on no state: each worker answers them by itself. Called in every process that
    answers HTTP, so it has to be one that `pickle` takes."""
    access: Sequence[PathAccess] = ()
    """Of paths that are not open to every client with a key."""
    host_names: Collection[str] = ()
    """Names of this server, beside those of `ServerFacts`."""
    listed: Mapping[str, str] = field(default_factory=dict)
    """A name and the paths for the list of endpoints on `/`."""
    pages: Mapping[str, str] = field(default_factory=dict)
    """A name and the path of each page for people, which are told when the server has started."""
    metrics: Sequence[MetricFamily] = ()
    """The families of what is measured."""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of an extension that has no flags."""


@dataclass(frozen=True, slots=True)
class RoutesExtension(Generic[OptionsT]):
    """An extension of the server's routes."""

    options: type[OptionsT]
    """A frozen dataclass with keyword-only fields that have defaults: each is a flag of `charonia serve`, as cyclopts
    reads it, and the text under it is its help. `NoOptions` has none."""
    heading: str
    """What its flags stand under in the help."""
    plan: Callable[[OptionsT, ServerFacts], RoutesPlan]
    """Raises `CharoniaError` for flags that mean nothing. It is the place to import what takes long."""


class ResidentHandle(ModelHandle, Protocol):
    """A version that is in memory, held by a request that is no client's."""

    @property
    def generates_text(self) -> bool: ...

    @property
    def asks_models(self) -> bool:
        """Whether it computes nothing itself."""


class ResidentModels(Protocol):
    """The models in memory, for requests that no client waits for."""

    def acquire_resident(self, context: RequestContext, name: str, version: str = "") -> ResidentHandle | None:
        """As `ModelLookup.acquire`, but nothing is loaded, and the server's end does not wait for the request. None for
        a model that is not in memory, which its next request would load."""


class RouteObserver(Protocol):
    """Follows the requests for one route."""

    def follow(
        self, request: InferRequest | GenerateRequest, context: RequestContext, responses: ResponseStream[Item]
    ) -> ResponseStream[Item]:
        """The responses as the client gets them."""


class RequestObserver(Protocol):
    """Follows the requests of the server. Lives in the event loop of the process that has the models."""

    def observe_route(self, name: str, route: Mapping[str, Any]) -> RouteObserver | None:
        """What follows the requests for a route from now on, None for nothing. Called when a route comes and when it
        changes; `route`: as `routes.yaml` has it."""

    def forget_others(self, routes: Container[str]) -> None:
        """Drop what was counted of routes that are none of these."""

    def measure(self) -> Iterable[Measurement]:
        """The readings of a scrape."""

    def close(self) -> None:
        """The server begins to exit."""


@dataclass(frozen=True, slots=True)
class ObserverExtension:
    """An extension that follows requests."""

    observe: Callable[[ResidentModels], RequestObserver]
    """Called once, before there is a route."""
    metrics: Sequence[MetricFamily] = ()
    """The families of what it measures."""
    route_fields: frozenset[str] = frozenset()
    """Those of `charonia.routing.route.OBSERVED_FIELDS` that it serves."""
