"""A route of a repository, through the endpoints of a real server, and its file changed while it runs."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc as triton_grpc

from charonia.bench.server_process import ServerAddress

from ..proofs.route_switches import SwitchedRoute, SwitchResult, run_switches
from .models import FAKE, write_config, write_model
from .tensors import given

IDENTITY = """
backend: "identity"
input { name: "A" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "B" data_type: TYPE_FP32 dims: [ 4 ] }
"""
ROUTES = """
routes:
  numbers:
    arms: [{model: a, version: 1, weight: WEIGHT}, {model: a, version: 2, weight: 1}]
    rules: [{header: x-beta, to: {model: a, version: 2}}, {field: tier, equals: gold, to: {model: a, version: 2}}]
  chat:
    arms: [{model: one, weight: 1}, {model: two, weight: 1}]
    sticky: {header: x-user}
    rules: [{field: metadata.tier, equals: gold, to: {model: two}}, {field: user, equals: beta, to: {model: two}}]
"""
BODY = {"inputs": [{"name": "A", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}]}


def test_a_route_is_served_like_a_model(serve: Callable[..., Any], tokenizer_only: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    for version in "12":
        write_config(repository, "a", IDENTITY, version)
    for name in ("one", "two"):
        write_model(repository, name, tokenizer_only, **FAKE)
    file = repository / "routes.yaml"
    file.write_text(ROUTES.replace("WEIGHT", "3"))
    polled = "--model-control-mode", "poll", "--repository-poll-secs", "1"
    flags = "--model-repository", str(repository), *polled, "--state-dir", str(tmp_path / "state")
    with serve(*flags) as server, httpx.Client(base_url=server.url) as client:
        assert "whoever reaches this server over HTTP may change its routes" in server.said

        def infer(**headers: str) -> str:
            answer = client.post("/v2/models/numbers/infer", json=BODY, headers=headers)
            body = answer.json()
            assert body["model_name"] == "numbers"
            assert answer.headers["x-charonia-arm"] == f"a:{body['model_version']}"
            return str(body["model_version"])

        def chat(user: str, **asked: object) -> httpx.Response:
            body = {"model": "chat", "prompt": "a", "max_tokens": 2, **asked}
            return client.post("/v1/completions", json=body, headers={"x-user": user})

        assert Counter(infer() for _ in range(8)) == {"1": 6, "2": 2}
        assert infer(**{"X-Beta": "1"}) == "2"
        assert "x-charonia-arm" not in client.post("/v2/models/a/infer", json=BODY).headers
        refused = client.post("/v2/models/numbers/infer", json={"inputs": []}, headers={"X-Beta": "1"})
        assert (refused.status_code, refused.headers["x-charonia-arm"]) == (400, "a:2")
        too_long = chat("user-0", prompt="a " * 9000, stream=True)
        assert (too_long.status_code, "x-charonia-arm" in too_long.headers) == (400, True)
        assert client.get("/v2/models/numbers/ready").status_code == 200
        for path in ("", "/config"):
            assert client.get(f"/v2/models/numbers{path}").json()["name"] == "numbers"
        answers = [chat(f"user-{number}") for number in range(12)]
        assert {each.json()["model"] for each in answers} == {"chat"}
        served = [each.headers["x-charonia-arm"] for each in answers]
        assert set(served) == {"one:1", "two:1"}
        assert [chat(f"user-{number}", stream=True).headers["x-charonia-arm"] for number in range(12)] == served
        assert "chat" in [each["id"] for each in client.get("/v1/models").json()["data"]]
        generated = client.post("/v2/models/chat/generate", json={"text_input": "a", "max_tokens": 2})
        assert generated.json()["model_name"] == "chat"
        assert generated.headers["x-charonia-arm"] in {"one:1", "two:1"}
        with triton_grpc.InferenceServerClient(server.grpc_address) as grpc:
            asked = [given(triton_grpc, "A", np.arange(4, dtype=np.float32))]
            answer = grpc.infer("numbers", asked, headers={"x-beta": "1"}).get_response()
            assert (answer.model_name, answer.model_version) == ("numbers", "2")
            assert answer.parameters["charonia_arm"].string_param == "a:2"
            answer = grpc.infer("numbers", asked, parameters={"tier": "gold"}).get_response()
            assert (answer.model_version, answer.parameters["charonia_arm"].string_param) == ("2", "a:2")
        answer = client.post("/v2/models/numbers/infer", json={**BODY, "parameters": {"tier": "gold"}})
        assert (answer.json()["model_version"], answer.headers["x-charonia-arm"]) == ("2", "a:2")
        assert {chat("user-0", metadata={"tier": "gold"}).headers["x-charonia-arm"] for _ in range(4)} == {"two:1"}
        for form in ("generate", "generate_stream"):
            asked = {"text_input": "a", "max_tokens": 2, "user": "beta"}
            generated = client.post(f"/v2/models/chat/{form}", json=asked)
            assert (generated.status_code, generated.headers["x-charonia-arm"]) == (200, "two:1"), generated.text

        scraped = httpx.get(f"{server.metrics_url}").text
        counted = 'charonia_route_requests_total{model="a",outcome="done",route="numbers",version="%s"} %d\n'
        assert counted % ("1", 6) in scraped
        assert counted % ("2", 6) in scraped

        statistics = client.get("/v2/models/numbers/stats").json()["model_stats"]
        told = [(each["name"], each["arm"], each["inference_stats"]["success"]["count"]) for each in statistics]
        assert told == [("numbers", "a:1", 6), ("numbers", "a:2", 6)]
        assert 'charonia_route_request_seconds_count{model="a",route="numbers",version="1"} 6' in scraped
        assert 'charonia_route_time_to_first_token_seconds_count{model="two",route="chat"' in scraped

        change_routes(client, infer)

        switched = asyncio.run(switch_routes(server))
        assert switched.holds, switched

        file.write_text(ROUTES.replace("WEIGHT", "-1"))
        server.until(lambda: "the routes stay as they are" in server.said)
        assert "weight must be a finite number" in server.said
        file.write_text(ROUTES.replace("WEIGHT", "0"))
        deadline = time.monotonic() + 60
        while {infer() for _ in range(4)} != {"2"}:
            assert time.monotonic() < deadline


async def switch_routes(server: Any) -> SwitchResult:
    """The long proof, shortened."""
    numbers = SwitchedRoute("numbers", ({"model": "a", "version": 1}, {"model": "a", "version": 2}))
    chat = SwitchedRoute("chat", ({"model": "one"}, {"model": "two"}))
    place = ServerAddress(*server.address, 0)
    return await run_switches(place, 9, 2, numbers, chat)


def change_routes(client: httpx.Client, infer: Callable[[], str]) -> None:
    """Leaves `numbers` to version 1."""
    shown = client.get("/v2/routes").json()["routes"]
    assert [(each["name"], each["version"], each["changed_by"]) for each in shown] == [
        ("chat", 1, "routes.yaml"),
        ("numbers", 1, "routes.yaml"),
    ]
    route = shown[1]["route"]
    route["arms"][1]["weight"] = 0
    assert set(route) == {"arms", "rules"}
    changed = client.put("/v2/routes/numbers", params={"version": 1}, json={"arms": route["arms"]})
    assert (changed.status_code, changed.json()["version"]) == (200, 2)
    assert client.get("/v2/routes/numbers").json() == changed.json()
    assert {infer() for _ in range(4)} == {"1"}
    assert client.put("/v2/routes/new/name", json={"arms": [{"model": "a", "weight": 1}]}).json()["version"] == 1
    for status, method, path, sent in (
        (409, "PUT", "numbers?version=1", route),
        (409, "DELETE", "numbers?version=1", None),
        (400, "PUT", "numbers?version=x", route),
        (400, "PUT", "numbers", {"arms": []}),
        (400, "PUT", "numbers", [route]),
        (400, "PUT", "a", route),
        (404, "GET", "none", None),
        (404, "DELETE", "none", None),
        (200, "DELETE", "new/name?version=1", None),
    ):
        answer = client.request(method, f"/v2/routes/{path}", json=sent)
        assert (answer.status_code, "error" in answer.json()) == (status, status != 200), answer.text
    assert {infer() for _ in range(4)} == {"1"}
