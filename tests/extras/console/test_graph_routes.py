"""The graph of a model over HTTP."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from charonia.api.app import build_app
from charonia.api.extensions import RouteExtensions
from charonia.api.metadata import ServerInfo
from charonia.core.extension_contracts import ServerFacts
from charonia.core.metrics import ModelStatistics, VersionStatistics
from charonia.extras.console.extension import plan_console
from charonia.extras.console.options import ConsoleOptions

FACTS = ServerFacts(serves_http=True, http_address="", host_names=(), tenants=0)


@pytest.fixture
async def client(gateway: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(gateway, ServerInfo(), extensions=RouteExtensions([plan_console(ConsoleOptions(), FACTS)]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://charonia") as connected:
        yield connected


async def test_graph(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.counted = [ModelStatistics("numbers", "3", VersionStatistics())]
    for path in ("/v2/models/numbers/graph", "/v2/models/numbers/versions/3/graph?format=json&statistics=1"):
        response = await client.get(path)
        [node] = response.json()["nodes"]
        assert (node["model"], node["version"], node["max_batch_size"]) == ("numbers", "3", 4)
        assert (node["times"] is not None) is ("statistics" in path)
    for form, kind, begin in (("mermaid", "text/plain; charset=utf-8", "flowchart"), ("svg", "image/svg+xml", "<svg ")):
        response = await client.get(f"/v2/models/numbers/graph?format={form}")
        assert (response.headers["content-type"], response.text[: len(begin)]) == (kind, begin)
    for path, status, error in (
        ("/v2/models/no/graph", 404, "Request for unknown model: 'no' is not found"),
        ("/v2/models/numbers/graph?format=dot", 400, "unknown format 'dot' of a graph; there are json, mermaid, svg"),
        ("/v2/models/numbers/graph?statistics=yes", 400, "statistics must be 0 or 1, got 'yes'"),
    ):
        response = await client.get(path)
        assert (response.status_code, response.json()["error"]) == (status, error)
