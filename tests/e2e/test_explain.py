"""What limits a real server, as `charonia explain` and the route say it; of the other states there are recordings."""

import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from charonia.bench.server_process import ServerAddress
from charonia.cli.app import app
from charonia.telemetry.time_claims import Cause

from ..proofs.explain import KEYS, STATES, explained_server, first_named, scrape_state, scrape_when

DRIVEN = "instances_busy", "shapes"
"""All others are driven by `make proof`."""


@pytest.fixture(scope="module")
def place() -> Iterator[ServerAddress]:
    with explained_server(DRIVEN) as place:
        yield place


@pytest.mark.parametrize("name", DRIVEN)
def test_a_server_in_that_state_is_told_what_limits_it(place: ServerAddress, name: str) -> None:
    state = STATES[name]
    first = first_named(*scrape_state(place, state, seconds=1.5), state.model)
    assert (first.cause, state.word in first.text) == (state.cause, True), first.text


def test_command_and_route_look_themselves(place: ServerAddress, capsys: pytest.CaptureFixture[str]) -> None:
    state, stop = STATES["instances_busy"], threading.Event()
    threads = [threading.Thread(target=client, args=(place, stop)) for client in state.clients]
    url, key = f"http://{place.host}:{place.http_port}", KEYS["a"]["Authorization"]
    try:
        for thread in threads:
            thread.start()
        scrape_when(place, state.until)  # clients that begin late leave nothing to explain
        flags = "--seconds", "0.5", "--model", state.model, "--json"
        assert app(["explain", "--url", f"http://{place.host}:{place.metrics_port}", *flags]) == 0
        [report] = json.loads(capsys.readouterr().out)
        assert report["bottlenecks"][0]["cause"] == Cause.QUEUE
        assert app(["explain", "--url", url, "--header", f"Authorization: {key}", *flags]) == 0
        assert json.loads(capsys.readouterr().out)[0]["bottlenecks"][0]["cause"] == Cause.QUEUE
        assert app(["explain", "--url", url, *flags]) == 1
        assert "/metrics: 401" in capsys.readouterr().err
        path = f"{url}/v2/models/{state.model}/explain?seconds=0.5"
        assert httpx.get(path).status_code == 401
        [told] = httpx.get(path, headers={"authorization": key}).json()["reports"]
        assert told["bottlenecks"][0]["cause"] == Cause.QUEUE
        assert told["bottlenecks"][0]["turn"]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
