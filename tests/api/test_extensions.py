"""Extensions of the server's routes: how their endpoints are found, who may ask them, and when they run."""

import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from charonia.api.api_keys import Keyring, Tenant
from charonia.api.app import all_routes, build_app, build_worker_app, protected_app, routed_app
from charonia.api.extensions import RouteExtensions
from charonia.api.header_rules import RequiredHeader
from charonia.api.http.rules import HttpRules
from charonia.api.metadata import ServerInfo
from charonia.core.errors import NotFound
from charonia.core.extension_contracts import ExtensionHost, PathAccess, RoutesPlan, ServedRoutes
from charonia.core.metrics import Measurement, Reading

KEYS = Keyring([("secret", Tenant("alpha"))])


async def hello(request: Request) -> Response:
    return PlainTextResponse(f"hello {request.path_params.get('name', '')}")


async def missing(request: Request) -> Response:
    raise NotFound("no such greeting")


def served(*routes: Any, **named: Any) -> RoutesPlan:
    return RoutesPlan(serve=lambda _: ServedRoutes(routes=routes), **named)


async def answers(app: Any, *calls: str, **headers: str) -> list[tuple[int, str]]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        made = [await client.request(*call.split()) for call in calls]
    return [(answer.status_code, answer.text) for answer in made]


async def test_routes_of_an_extension_come_before_the_servers(gateway: Any) -> None:
    mine = served(Route("/hello/{name}", hello, methods=["GET", "POST"]), Route("/version", hello))
    app = build_app(gateway, ServerInfo("triton", "9.9"), extensions=RouteExtensions([mine]))
    assert await answers(app, "GET /hello/a", "POST /hello/b", "GET /version") == [
        (200, "hello a"),
        (200, "hello b"),
        (200, "hello "),
    ]
    assert (await answers(app, "GET /hello/a%0A"))[0][0] == 200
    assert (await answers(app, "GET /version/a"))[0][0] == 404


async def test_fastapi_makes_endpoints_of_functions(gateway: Any) -> None:
    router = APIRouter()

    @router.post("/sum")
    async def add(one: int, other: int) -> dict[str, int]:
        return {"sum": one + other}

    app = build_app(gateway, ServerInfo(), extensions=RouteExtensions([served(*router.routes)]))
    assert await answers(app, "POST /sum?one=1&other=2") == [(200, '{"sum":3}')]
    assert (await answers(app, "POST /sum?one=1"))[0][0] == 422


async def test_functions_of_plain_routes_may_want_a_thread(gateway: Any) -> None:
    def slow(request: Request) -> Response:
        return Response(f"slow {request.method}")

    extensions = RouteExtensions([served(Route("/slow", slow, methods=["GET", "POST"]))])
    app = build_app(gateway, ServerInfo(), extensions=extensions)
    assert await answers(app, "GET /slow", "POST /slow") == [(200, "slow GET"), (200, "slow POST")]


async def test_what_may_change_something_is_answered_when_all_know(gateway: Any) -> None:
    """However its route was made, and whether or not it succeeds."""
    router, settled = APIRouter(), list[str]()

    @router.put("/fast")
    def fast() -> str:
        return "fast"

    @router.get("/fast")
    def read() -> str:
        return "read"

    async def settle() -> None:
        settled.append("settled")

    own = Route("/hello", hello, methods=["POST", "GET"]), Route("/missing", missing, methods=["POST"])
    extensions = RouteExtensions([served(*own, *router.routes)])
    routes = all_routes(gateway, ServerInfo(), HttpRules(), extensions=extensions, settle=settle)
    app = protected_app(routed_app(routes), gateway, None, HttpRules())
    changing = ["POST /hello", "POST /missing", "PUT /fast", "POST /v2/logging", "POST /v2/repository/models/x/load"]
    for count, call in enumerate(changing, 1):
        await answers(app, call)
        assert len(settled) == count, call
    await answers(
        app, "GET /fast", "GET /v2/logging", "POST /v2/repository/index", "POST /v2/models/x/infer", "GET /v2"
    )
    assert len(settled) == len(changing)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_error_is_told_as_the_servers_own_are(gateway: Any, method: str) -> None:
    plan = served(Route("/v1/none", missing, methods=["GET", "POST"]))
    app = build_app(gateway, ServerInfo(), extensions=RouteExtensions([plan]))
    [(status, text)] = await answers(app, f"{method} /v1/none")
    assert (status, "no such greeting" in text) == (404, True)


async def test_a_path_says_who_may_ask_it(gateway: Any) -> None:
    access = (PathAccess("/open", needs_key=False), PathAccess("/part", restricted_api="metadata"))
    rules = HttpRules(extensions=access)
    paths = [f"/{name}{more}" for name in ("open", "part", "opener") for more in ("", "/a")]
    extensions = RouteExtensions([served(*(Route(path, hello) for path in paths), access=access)])
    calls = [f"GET {path}" for path in paths]
    app = build_app(gateway, ServerInfo(), KEYS, rules, extensions=extensions)
    assert [status for status, _ in await answers(app, *calls)] == [200, 200, 401, 401, 401, 401]
    required = {"metadata": RequiredHeader("x-pass", "v")}
    rules = HttpRules(required_headers=required, extensions=access)
    app = build_app(gateway, ServerInfo(), rules=rules, extensions=extensions)
    assert [status for status, _ in await answers(app, *calls)] == [200, 200, 403, 403, 200, 200]


async def test_the_list_of_endpoints_has_them(gateway: Any) -> None:
    app = build_app(gateway, ServerInfo(), extensions=RouteExtensions([served(listed={"greetings": "/hello"})]))
    [(_, text)] = await answers(app, "GET /")
    assert '"greetings":"/hello"' in text


async def test_they_know_the_servers_endpoints_and_run_while_it_serves(gateway: Any) -> None:
    said: list[str] = []

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        said.append("begins")
        yield
        said.append("ends")

    def serve(host: ExtensionHost) -> ServedRoutes:
        said.append(str("/v1/chat/completions" in host.endpoints and host.administration is gateway))
        return ServedRoutes(running=running, measure=lambda: [Measurement({}, (Reading("greetings", 1),))])

    extensions = RouteExtensions([RoutesPlan(serve=serve), served()])
    assert list(extensions.measure()) == []
    build_app(gateway, ServerInfo(), extensions=extensions)
    async with extensions.running():
        said.append("serves")
    assert said == ["True", "begins", "serves", "ends"]
    assert [measurement.readings[0].family for measurement in extensions.measure()] == ["greetings"]


def static_routes() -> list[Route]:
    return [Route("/static", hello)]


async def test_a_worker_forwards_all_but_what_every_worker_answers(gateway: Any) -> None:
    post = served(Route("/hello", missing, methods=["POST"]), listed={"more": "/more"})
    control = RouteExtensions([RoutesPlan(static_routes=static_routes), post])
    assert [route.path for route in control.serve(gateway, {})] == ["/static", "/hello"]

    async def forward(request: Request) -> Response:
        return PlainTextResponse(f"forwarded {request.url.path}")

    told = pickle.loads(pickle.dumps(control.in_workers()))
    app = build_worker_app(gateway, ServerInfo(), None, HttpRules(), [], told.routes(forward), told.listed)
    assert await answers(app, "GET /static", "POST /hello") == [(200, "hello "), (200, "forwarded /hello")]
    assert '"more":"/more"' in (await answers(app, "GET /"))[0][1]


def test_what_no_worker_can_forward_is_an_error(gateway: Any) -> None:
    extensions = RouteExtensions([served(Mount("/files", app=lambda *_: None))])
    extensions.serve(gateway, {})
    with pytest.raises(TypeError, match="is no Route"):
        extensions.in_workers()
