"""The console's files over HTTP: under which names, with which headers, and what they may not do."""

import asyncio
import json
import pickle
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from charonia.api.api_keys import Keyring, Tenant
from charonia.api.app import build_app, build_worker_app, control_routes
from charonia.api.extensions import RouteExtensions
from charonia.api.header_rules import RequiredHeader
from charonia.api.http.rules import HttpRules
from charonia.api.http.server import HttpServer
from charonia.api.metadata import ServerInfo
from charonia.core.errors import InvalidArgument
from charonia.core.extension_contracts import ServerFacts
from charonia.extras.console.extension import plan_console
from charonia.extras.console.options import ConsoleOptions
from charonia.extras.console.routes import parse_console_hosts

KEYS = Keyring([("secret", Tenant("alpha"))])
SERVED = ConsoleOptions(console=True, console_host=("Console.Example",))
PAGE = Path(__file__).parents[3] / "extras" / "console" / "page"
MOST_LINES, MOST_BYTES = 2_940, 113_000


def facts(http_address: str = "0.0.0.0", serves_http: bool = True) -> ServerFacts:
    return ServerFacts(serves_http=serves_http, http_address=http_address, host_names=(), tenants=0)


def console_app(
    gateway: Any,
    options: ConsoleOptions,
    address: str = "0.0.0.0",
    keys: Keyring | None = None,
    required: Mapping[str, RequiredHeader] = {},
) -> ASGIApp:
    plan = plan_console(options, facts(address))
    rules = HttpRules(required_headers=required, allowed_hosts=plan.host_names, extensions=tuple(plan.access))
    return build_app(gateway, ServerInfo("triton", "9.9"), keys, rules, extensions=RouteExtensions([plan]))


@asynccontextmanager
async def serving(
    gateway: Any,
    options: ConsoleOptions,
    keys: Keyring | None = None,
    required: Mapping[str, RequiredHeader] = {},
) -> AsyncIterator[httpx.AsyncClient]:
    app = console_app(gateway, options, "server.internal", keys, required)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = HttpServer(app, sock, access_log=False)
        await server.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}") as client:
            yield client
        await server.stop()


@pytest.fixture
async def client(gateway: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(gateway, SERVED) as served:
        yield served


async def test_there_is_none_unless_it_is_wanted(gateway: Any) -> None:
    async with serving(gateway, ConsoleOptions(), KEYS) as client:
        assert [(await client.get(path)).status_code for path in ("/console", "/console/main.js")] == [404, 404]


async def test_the_page_needs_no_key_and_what_it_asks_does(gateway: Any) -> None:
    async with serving(gateway, SERVED, KEYS) as client:
        assert [(await client.get(path)).status_code for path in ("/console", "/console/main.js")] == [200, 200]
        assert [(await client.get(path)).status_code for path in ("/v2", "/v1/models")] == [401, 401]


async def test_every_file_that_is_named_is_there(client: httpx.AsyncClient) -> None:
    page = await client.get("/console")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r'(?:src|href)="(console/[^"]+)"', page.text))
    for script in PAGE.glob("*.js"):
        named |= {f"console/{name}" for name in re.findall(r'from "\./([^"]+)"', script.read_text())}
    assert {name.rpartition("/")[2] for name in named} == {file.name for file in PAGE.iterdir()} - {"index.html"}
    kinds = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
    for name in named:
        answer = await client.get(f"/{name}")
        assert (answer.status_code, answer.headers["content-type"]) == (200, kinds[Path(name).suffix])
        assert answer.content == (PAGE / Path(name).name).read_bytes()


@pytest.mark.parametrize("path", ["/console", "/console/main.js"])
async def test_headers(client: httpx.AsyncClient, path: str) -> None:
    shown = (await client.get(path)).headers
    assert shown["content-security-policy"] == (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )
    assert (shown["x-content-type-options"], shown["referrer-policy"]) == ("nosniff", "no-referrer")
    assert "access-control-allow-origin" not in shown


async def test_a_slash_at_the_end_is_taken_away(client: httpx.AsyncClient) -> None:
    answer = await client.get("/console/")
    assert (answer.status_code, answer.headers["location"]) == (308, "../console")


CONTROL = ("/console/main.js%00", "/console/main.js%0a")
LEADING_OUT = (
    "/console/index.html",
    "/console/none.js",
    "/console/../app.py",
    "/console/..%2froutes.py",
    "/console/%2e%2e/routes.py",
    "/console/..",
    "/console/page/main.js",
    "/console//etc/passwd",
    *CONTROL,
    "/console/main.js/",
    "/console/MAIN.JS",
)


async def raw_get(client: httpx.AsyncClient, path: str, *hosts: str) -> tuple[int, str]:
    """Status and text of an answer to what clients would tidy up before they send it."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    lines = [f"GET {path} HTTP/1.1", *(f"host: {host}" for host in hosts), "connection: close", "", ""]
    writer.write("\r\n".join(lines).encode("latin-1"))
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return int(answer.split()[1]), answer.partition("\r\n\r\n")[2]


async def test_no_path_leads_elsewhere(client: httpx.AsyncClient) -> None:
    assert (await raw_get(client, "/console/main.js", "localhost"))[0] == 200
    statuses = {path: (await raw_get(client, path, "localhost"))[0] for path in LEADING_OUT}
    assert statuses == dict.fromkeys(LEADING_OUT, 404) | {"/console/main.js/": 200, **dict.fromkeys(CONTROL, 400)}


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "console.localhost:1",
        "127.0.0.1:8000",
        "127.9.9.9",
        "[::1]:8000",
        "[::ffff:127.0.0.1]",
        "server.internal:80",
        "console.example",
        "console.example.:443",
    ],
)
async def test_names_of_its_own(client: httpx.AsyncClient, host: str) -> None:
    for path in ("/console", "/console/main.js"):
        assert (await raw_get(client, path, host))[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example:8000",
        "evil.example:80:80",
        "console.example@evil.example",
        "notlocalhost",
        "10.1.2.3",
        "[2001:db8::1]:8000",
        "[localhost]",
        "",
    ],
)
async def test_names_of_others(client: httpx.AsyncClient, host: str) -> None:
    for path in ("/console", "/console/", "/console/main.js", "/console/none.js"):
        status, text = await raw_get(client, path, host)
        assert (status, text[:9]) == (403, '{"error":')
    words = "the console is not served under the host name 'evil.example'; --console-host NAME adds one"
    assert json.loads((await raw_get(client, "/console", "evil.example"))[1]) == {"error": words}


@pytest.mark.parametrize("hosts", [(), ("localhost", "evil.example"), ("evil.example", "localhost")])
async def test_no_name_and_several_are_none(client: httpx.AsyncClient, hosts: tuple[str, ...]) -> None:
    status, text = await raw_get(client, "/console", *hosts)
    assert status in (400, 403)
    assert "console.css" not in text


async def test_the_address_that_a_client_reached_is_a_name(gateway: Any) -> None:
    """A server that listens on every address: the end of the connection tells which one it was."""
    app = console_app(gateway, ConsoleOptions(console=True))

    async def status(host: str) -> int:
        async def onto_a_network(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "server": ("10.1.2.3", 8000)}, receive, send)

        transport = httpx.ASGITransport(onto_a_network)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            return (await client.get("/console")).status_code

    assert [await status(host) for host in ("10.1.2.3:8000", "10.1.2.4:8000")] == [200, 403]


async def test_one_of_several_frontends_serves_it_by_itself_as_it_does_health(gateway: Any) -> None:
    """Another process knows neither the connection nor how late this one is."""

    async def forward(_: Request) -> Response:
        raise AssertionError("it was asked of the hub")

    control = RouteExtensions([plan_console(SERVED, facts())])
    build_app(gateway, ServerInfo(), extensions=control)
    extensions = pickle.loads(pickle.dumps(control.in_workers()))
    forwarded = [Route(route.path, forward) for route in control_routes(gateway, ServerInfo(), HttpRules())]
    app = build_worker_app(gateway, ServerInfo(), None, HttpRules(), forwarded, extensions.routes(forward))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        paths = "/console", "/console/", "/console/main.js", "/v2/health/ready", "/health", "/ping"
        assert [(await client.get(path)).status_code for path in paths] == [200, 308, 200, 200, 200, 200]


async def test_it_belongs_to_the_metadata(gateway: Any) -> None:
    async with serving(gateway, SERVED, required={"metadata": RequiredHeader("key", "value")}) as client:
        for path in ("/console", "/console/", "/console/main.js", "/console/none"):
            assert (await client.get(path)).status_code == 403
            assert (await client.get(path, headers={"key": "value"})).status_code != 403


@pytest.mark.parametrize(
    ("options", "serves_http", "error"),
    [
        (ConsoleOptions(console_host=("a",)), True, "--console-host has no effect without --console"),
        (ConsoleOptions(console=True, console_host=("a:1",)), True, "--console-host: 'a:1' is no host's name"),
        (ConsoleOptions(console=True), False, "which --allow-http false turns off"),
    ],
)
def test_flags_that_mean_nothing_are_refused(options: ConsoleOptions, serves_http: bool, error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        plan_console(options, facts(serves_http=serves_http))


def test_the_server_is_known_under_the_names_that_are_given() -> None:
    assert plan_console(ConsoleOptions(), facts()).host_names == ()
    assert plan_console(SERVED, facts()).host_names == {"console.example", "0.0.0.0"}


@pytest.mark.parametrize(
    "name", ["http://console.example", "console.example:8000", "a:1", "[::1]", "*", "", "a b", "a/b"]
)
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="--console-host: "):
        parse_console_hosts([name], "0.0.0.0")


FORBIDDEN = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|srcdoc|setHTML|\beval\("
    r"|new Function|localStorage|sessionStorage|indexedDB|document\.cookie|importScripts|WebSocket|sendBeacon"
)


def test_addresses_are_names_too() -> None:
    assert parse_console_hosts(["10.0.0.7", "2001:DB8:0::1"], "::") == {"10.0.0.7", "2001:db8::1", "::"}


def test_what_the_page_is_made_of() -> None:
    files = sorted(PAGE.iterdir())
    texts = {file.name: file.read_text() for file in files}
    assert sum(text.count("\n") for text in texts.values()) <= MOST_LINES
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES
    for name, text in texts.items():
        assert not re.findall(FORBIDDEN, text), name
        assert set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)) <= {"http://www.w3.org"}, name
    page = texts["index.html"]
    assert not re.findall(r"\s(?:style|on\w+)=|<style|<script(?! type=\"module\" src=\")", page)
