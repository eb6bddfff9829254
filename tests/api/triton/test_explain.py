"""The route that explains a model, over metrics that the test turns."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from charonia.api.app import build_app
from charonia.api.metadata import ServerInfo
from charonia.api.prometheus import MetricRegistries, build_registry
from charonia.api.triton import explain as endpoint
from charonia.cli.options import HttpOptions
from charonia.cli.plan import parse_http_rules
from charonia.core.metrics import Histogram, Measurement, Reading
from charonia.telemetry.roofline import StepRoofline
from charonia.telemetry.shared_state import SharedState


class Busy:
    """A server whose metrics grow with each reading: a second passes, in which five sequences are in this state, and a
    step was computed."""

    def __init__(self, state: str = "no_row") -> None:
        self.readings, self.state = 0, state
        self.steps = {name: Histogram((1,)) for name in ("seconds", "tokens", "sequences")}

    def measure(self) -> Iterator[Measurement]:
        self.readings += 1
        yield Measurement({}, [Reading("charonia_uptime_seconds", float(self.readings))])
        spent = Reading("charonia_sequence_seconds_total", 5.0 * self.readings, {"state": self.state})
        weight = Reading("charonia_tenant_weight", 1.0, {"tenant": "secret"})
        for steps in self.steps.values():
            steps.observe(1.0)
        steps = [Reading(f"charonia_step_{name}", steps) for name, steps in self.steps.items()]
        readings = [Reading("charonia_model_ready", 1), spent, weight, *steps]
        yield Measurement({"model": "numbers", "version": "3"}, readings)


@asynccontextmanager
async def served(gateway: Any, busy: Busy, **flags: Any) -> AsyncIterator[httpx.AsyncClient]:
    metrics = MetricRegistries(None, build_registry([busy.measure]))
    app = build_app(gateway, ServerInfo(), rules=parse_http_rules(HttpOptions(**flags)), metrics=metrics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://charonia") as client:
        yield client


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_SECONDS", 0.0)
    monkeypatch.setattr(endpoint, "_LEAST", 0.0)


@pytest.mark.usefixtures("no_pause")
async def test_two_readings_explain_and_the_next_request_goes_on_from_the_last(gateway: Any) -> None:
    busy = Busy()
    async with served(gateway, busy) as client:
        for path, readings in (("explain", 2), ("versions/3/explain", 3), ("explain?seconds=0", 5)):
            response = await client.get(f"/v2/models/numbers/{path}")
            [report] = response.json()["reports"]
            assert (report["model"], report["version"], report["seconds"]) == ("numbers", "3", 1.0)
            assert report["bottlenecks"][0]["cause"] == "queue"
            assert busy.readings == readings


@pytest.mark.usefixtures("no_pause")
async def test_a_model_whose_machine_is_known_is_held_against_it(gateway: Any) -> None:
    gateway.shared_state = SharedState(rooflines={"numbers": StepRoofline(weights=0.9)})
    async with served(gateway, Busy("running")) as client:
        [report] = (await client.get("/v2/models/numbers/explain")).json()["reports"]
    told = [(bottleneck["cause"], bottleneck["share"]) for bottleneck in report["bottlenecks"]]
    assert told == [("memory_bandwidth", pytest.approx(0.9)), ("computation", pytest.approx(0.1))]


@pytest.mark.usefixtures("no_pause")
async def test_what_is_wrong_is_told(gateway: Any) -> None:
    async with served(gateway, Busy()) as client:
        for path, status, error in (
            ("no/explain", 404, "'no' is not found"),
            ("llm/explain", 400, "'llm' has no metrics of its own"),
            ("numbers/explain?seconds=31", 400, "seconds must be from 0.0 to 30, got '31'"),
            ("numbers/explain?seconds=x", 400, "seconds must be"),
            ("numbers/explain?seconds=nan", 400, "seconds must be"),
        ):
            response = await client.get(f"/v2/models/{path}")
            assert (response.status_code, error in response.json()["error"]) == (status, True), path


@pytest.mark.usefixtures("no_pause")
async def test_only_who_may_read_statistics_is_told(gateway: Any) -> None:
    async with served(gateway, Busy(), http_restricted_api=("statistics:pass=word",)) as client:
        response = await client.get("/v2/models/numbers/explain")
        assert (response.status_code, "secret" in response.text) == (403, False)
        assert (await client.get("/v2/models/numbers/explain", headers={"pass": "word"})).status_code == 200


async def test_only_so_many_watch_at_a_time(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_MOST_WAITING", 2)
    async with served(gateway, Busy()) as client:
        asked = [client.get("/v2/models/numbers/explain?seconds=0.1") for _ in range(3)]
        assert sorted(each.status_code for each in await asyncio.gather(*asked)) == [200, 200, 503]
        assert (await client.get("/v2/models/numbers/explain?seconds=0.1")).status_code == 200
