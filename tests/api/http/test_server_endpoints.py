"""Health, version and metrics where clients of vLLM and SageMaker look for them, and to whom each path belongs."""

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from charonia.api.api_keys import Keyring, Tenant
from charonia.api.app import build_app
from charonia.api.header_rules import _API, APIS
from charonia.api.http.rules import _OPEN
from charonia.api.metadata import ServerInfo
from charonia.api.prometheus import MetricRegistries
from charonia.cli.options import HttpOptions
from charonia.cli.plan import parse_http_rules

KEY = {"authorization": "Bearer secret"}
OPEN = ("/health", "/ping")
NEED_A_KEY = ("/", "/version", "/metrics", "/v1/models")


def app(gateway: Any, **named: Any) -> Any:
    registry = CollectorRegistry()
    Gauge("depth", "How deep", registry=registry).set(3)
    return build_app(gateway, ServerInfo("triton", "9.9"), metrics=MetricRegistries(registry), **named)


@pytest.fixture
async def asking(gateway: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app(gateway, keys=Keyring([("secret", Tenant("alpha"))])))
    async with httpx.AsyncClient(transport=transport, base_url="http://charonia") as client:
        yield client


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")])
async def test_health_is_200_or_503(asking: httpx.AsyncClient, gateway: Any, method: str, path: str) -> None:
    answer = await asking.request(method, path)
    assert (answer.status_code, answer.content) == (200, b"")
    gateway.is_ready = False
    answer = await asking.request(method, path)
    assert (answer.status_code, answer.json()) == (503, {"error": "the server is not ready"})
    gateway.is_exiting = True
    assert (await asking.request(method, path)).json() == {"error": "Server exiting"}


async def test_keys(asking: httpx.AsyncClient) -> None:
    assert [(await asking.get(path)).status_code for path in OPEN] == [200, 200]
    assert [(await asking.get(path)).status_code for path in NEED_A_KEY] == [401] * 4
    assert [(await asking.get(path, headers=KEY)).status_code for path in NEED_A_KEY] == [200] * 4


async def test_what_they_say(asking: httpx.AsyncClient) -> None:
    assert (await asking.get("/version", headers=KEY)).json() == {"version": "9.9"}
    scrape = await asking.get("/metrics", headers=KEY)
    assert scrape.headers["content-type"].startswith("text/plain")
    assert "depth 3.0" in scrape.text
    index = (await asking.get("/", headers=KEY)).json()
    assert (index["name"], index["server"], index["version"]) == ("triton", "charonia", "9.9")
    named = [path for paths in index["endpoints"].values() for path in re.findall(r"/[\w/{}]+", paths)]
    assert sorted(set(named) - {path for path, _ in routes(app(None))}) == []


async def test_without_metrics_there_are_none(client: httpx.AsyncClient) -> None:
    assert (await client.get("/metrics")).status_code == 404


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_slash_at_the_end_changes_nothing(client: httpx.AsyncClient, gateway: Any, path: str) -> None:
    body = {"model": "llm", "prompt": "x"}
    with_and_without = [await client.post(path + end, json=body) for end in ("", "/")]
    assert [answer.status_code for answer in with_and_without] == [200, 200]
    assert len({context.endpoint for context in gateway.contexts}) == 1
    assert len(gateway.contexts) == 2


async def test_a_slash_at_the_end_opens_nothing(gateway: Any) -> None:
    rules = parse_http_rules(HttpOptions(http_restricted_api=("inference,statistics,metadata:key=value",)))
    transport = httpx.ASGITransport(app(gateway, rules=rules))
    async with httpx.AsyncClient(transport=transport, base_url="http://charonia") as client:
        for path in ("/v1/completions/", "/metrics/", "/version/", "//"):
            assert (await client.get(path)).status_code == 403
        assert (await client.post("/v2/repository/models/m/unload/")).status_code == 404
    assert gateway.loads == []


def routes(served: Any) -> list[tuple[str, set[str]]]:
    """Every route's path, and its methods."""
    while not hasattr(served, "routes"):
        served = served._app
    return [(route.path, route.methods) for route in served.routes]


def test_every_route_belongs_to_an_api_and_health_alone_is_open() -> None:
    for path, _ in routes(app(None)):
        example = re.sub(r"\{\w+(:\w+)?\}", "1", path)
        found = _API.fullmatch(example)
        assert found, f"{path} belongs to no API that could be restricted"
        [api] = [name for name in APIS if found[name.replace("-", "_")] is not None]
        assert bool(_OPEN.fullmatch(example)) == (api == "health"), path
