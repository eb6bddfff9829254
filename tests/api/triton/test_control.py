"""Configs, statistics, repository, shared memory and settings over HTTP; and who may ask for them."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.api.app import build_app
from charonia.api.header_rules import APIS
from charonia.api.metadata import ServerInfo
from charonia.api.triton import control
from charonia.cli.options import HttpOptions
from charonia.cli.plan import parse_http_rules
from charonia.core.errors import DiskFull, Internal, InvalidArgument
from charonia.core.gateway import ModelState, RepositoryIndexEntry
from charonia.core.metrics import InferenceStatistics, ModelStatistics, StatisticDuration, VersionStatistics
from charonia.processes.client_shared_memory import SharedMemoryRegistry
from charonia.telemetry.shared_state import SharedState

LOAD = "/v2/repository/models/m/load"
UNLOAD = "/v2/repository/models/m/unload"
LOGGING = "/v2/logging"
TRACE = "/v2/trace/setting"
SYSTEM = "/v2/systemsharedmemory"
CUDA = "/v2/cudasharedmemory"
DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."


@asynccontextmanager
async def served(gateway: Any, max_input_size: int = 2000, **flags: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(gateway, ServerInfo(max_input_size=max_input_size), rules=parse_http_rules(HttpOptions(**flags)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://charonia") as client:
        yield client


# Models


async def test_config(client: httpx.AsyncClient) -> None:
    wanted = {"name": "numbers", "max_batch_size": 4, "input": [{"name": "MATRIX", "data_type": "TYPE_FP32"}]}
    for path in ("/v2/models/numbers/config", "/v2/models/numbers/versions/3/config"):
        response = await client.get(path)
        assert (list(response.json()), response.json()) == (list(wanted), wanted)
    response = await client.get("/v2/models/no/config")
    assert (response.status_code, response.json()["error"]) == (404, "Request for unknown model: 'no' is not found")


async def test_statistics(client: httpx.AsyncClient, gateway: Any) -> None:
    said = VersionStatistics(
        inference=InferenceStatistics(success=StatisticDuration(3, 30)), explain={"shapes_differ": 2}
    )
    gateway.counted = [ModelStatistics("a", "1", said), ModelStatistics("b", "2", VersionStatistics())]
    response = await client.get("/v2/models/stats")
    [a, b] = response.json()["model_stats"]
    assert (a["name"], a["inference_stats"]["success"]) == ("a", {"count": 3, "ns": 30})
    assert (list(a)[-1], a["explain"]) == ("explain", {"shapes_differ": 2})
    assert "explain" not in b
    for path in ("/v2/models/b/stats", "/v2/models/b/versions/2/stats"):
        assert [each["name"] for each in (await client.get(path)).json()["model_stats"]] == ["b"]


# Repository


async def test_index(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.indexed = [
        RepositoryIndexEntry("a", "1", ModelState.READY),
        RepositoryIndexEntry("b", "3", ModelState.UNAVAILABLE, "unloaded"),
        RepositoryIndexEntry("c"),
    ]
    everything = [
        {"name": "a", "version": "1", "state": "READY"},
        {"name": "b", "version": "3", "state": "UNAVAILABLE", "reason": "unloaded"},
        {"name": "c"},
    ]
    for path in ("/v2/repository/index", "/v2/repository/any/index"):
        assert (await client.post(path)).json() == everything
        assert (await client.post(path, json={"ready": False})).json() == everything
        assert (await client.post(path, json={"ready": True})).json() == everything[:1]
    for loads, mode in ((True, "explicit"), (False, "none")):
        gateway.loads_on_request = loads
        answer = await client.post("/v2/repository/index")
        assert answer.headers["x-charonia-model-control"] == mode
    response = await client.post("/v2/repository/index", json={"ready": 1})
    assert response.status_code == 400
    expected = "Invalid value for 'ready': expected a boolean, attempt to access JSON non-boolean as boolean"
    assert response.json() == {"error": expected}


@pytest.mark.parametrize("depth", [900, 2000, 40_000])
async def test_an_index_request_that_is_nested_deeply(gateway: Any, depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    app = build_app(gateway, ServerInfo())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://charonia") as client:
        response = await client.post("/v2/repository/index", content=b'{"ready": %b}' % nested)
        expected = "Invalid value for 'ready': expected a boolean, attempt to access JSON non-boolean as boolean"
        assert (response.status_code, response.json()) == (400, {"error": expected})
        response = await client.post("/v2/repository/index", content=b'{"x": %b}' % nested)
        assert (response.status_code, "it is nested too deeply" in response.text) == (
            200 if depth == 900 else 400,
            depth > 900,
        )


async def test_load_and_unload(client: httpx.AsyncClient, gateway: Any) -> None:
    lines = base64.encodebytes(b"\0model" * 20).decode()
    assert lines.count("\n") > 1
    files = {"config": "{}", "file:1/model.onnx": lines}
    for path, body in (
        (LOAD, None),
        (LOAD, {}),
        (LOAD, {"parameters": files}),
        (UNLOAD, None),
        (UNLOAD, {"parameters": {"unload_dependents": True}}),
    ):
        response = await (client.post(path) if body is None else client.post(path, json=body))
        assert (response.status_code, response.content) == (200, b""), response.text
    assert gateway.loads == [
        ("m", None, {}),
        ("m", None, {}),
        ("m", "{}", {"1/model.onnx": b"\0model" * 20}),
        ("m", False),
        ("m", True),
    ]


@given(st.binary(max_size=40), st.sampled_from(["", "\n", "=", "==", "A", "?", "é"]), st.integers(0, 60))
def test_a_file_in_pieces_is_the_one_at_once(content: bytes, put: str, at: int) -> None:
    text = base64.b64encode(content).decode()
    text = text[:at] + put + text[at:]
    try:
        expected = base64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        expected = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "_PIECE", 7)
        try:
            assert control._decoded("file:x", text) == expected
        except InvalidArgument:
            assert expected is None or len("".join(text.split())) % 4  # what Python makes of "AAAA="


async def test_the_config_of_a_load_has_so_many_values(gateway: Any) -> None:
    long = [json.dumps({"version_policy": {"specific": {"versions": [1] * count}}}) for count in (30_000, 40_000)]
    async with served(gateway, 1 << 20) as client:
        for config, status in ((long[0], 200), (long[1], 400), ("[" * 100_000, 400)):
            response = await client.post(LOAD, json={"parameters": {"config": config}})
            assert response.status_code == status
            assert status == 200 or response.json()["error"].startswith("config: ")
    assert [load[1] for load in gateway.loads] == long[:1]


REPOSITORY_ERRORS = [
    (LOAD, {"parameters": 1}, 400, "Unable to parse 'parameters': attempt to access JSON non-object as object"),
    (LOAD, {"parameters": {"config": 1}}, 400, "Unable to parse 'config': attempt to access JSON non-string as string"),
    (LOAD, {"parameters": {"what": "x"}}, 400, "unrecognized load parameter 'what'"),
    (LOAD, {"parameters": {"config": "{}", "file:1/m": "?"}}, 400, "load parameter 'file:1/m' is not base64"),
    (UNLOAD, {"parameters": {"what": True}}, 400, "unrecognized unload parameter 'what'"),
    (
        UNLOAD,
        {"parameters": {"unload_dependents": 1}},
        400,
        "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean",
    ),
    ("/v2/repository/r/models/m/load", {}, 501, "'repository_name' specification is not supported"),
    ("/v2/repository/r/models/m/unload", {}, 501, "'repository_name' specification is not supported"),
]


@pytest.mark.parametrize(("path", "body", "status", "text"), REPOSITORY_ERRORS)
async def test_repository_errors(
    client: httpx.AsyncClient, gateway: Any, path: str, body: Any, status: int, text: str
) -> None:
    response = await client.post(path, json=body)
    assert (response.status_code, response.json()) == (status, {"error": text})
    assert not gateway.loads


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Internal("failed to load 'm', failed to poll from model repository"), 500),
        (InvalidArgument("load failed"), 400),
        (DiskFull("failed to load 'm': the disk is full"), 507),
    ],
)
async def test_what_the_gateway_refuses(client: httpx.AsyncClient, gateway: Any, error: Any, status: int) -> None:
    gateway.error = error
    response = await client.post(LOAD)
    assert (response.status_code, response.json()) == (status, {"error": error.message})


# Settings


async def test_log_settings(client: httpx.AsyncClient) -> None:
    said = (await client.get(LOGGING)).json()
    assert list(said) == ["log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format"]
    changed = {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
    assert (await client.post(LOGGING, json=changed)).json() == said | changed
    assert (await client.get(LOGGING)).json() == said | changed


async def test_trace_settings(client: httpx.AsyncClient) -> None:
    said = (await client.get(TRACE)).json()
    assert said == {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "",
        "trace_mode": "triton",
    }
    changed = {"trace_level": ["TIMESTAMPS"], "trace_rate": "5"}
    mine = "/v2/models/llm/trace/setting"
    assert (await client.post(mine, json=changed)).json() == said | changed
    assert (await client.get(TRACE)).json() == said
    assert (await client.post(mine, json={"trace_rate": None})).json() == said | changed | {"trace_rate": "1000"}


SETTING_ERRORS = [
    (LOGGING, {"log_file": "x"}, 501, "log file location can not be updated through network protocol"),
    (LOGGING, {"log_format": "x"}, 503, "invalid argument for --log_format, got: x"),
    (LOGGING, {"log_info": 1}, 400, "Unable to parse 'log_info': attempt to access JSON non-boolean as boolean"),
    (
        LOGGING,
        {"log_verbose_level": -1},
        400,
        "Unable to parse 'log_verbose_level': attempt to access JSON non-unsigned-integer as unsigned-integer",
    ),
    (LOGGING, {"what": 1}, 400, "unknown log setting 'what'"),
    (TRACE, {"trace_file": "x"}, 501, "trace file location can not be updated through network protocol"),
    (TRACE, {"trace_rate": "x"}, 400, "Unable to parse 'trace_rate', got: x"),
    (TRACE, {"trace_rate": 5}, 400, "Unable to parse 'trace_rate': attempt to access JSON non-string as string"),
    (TRACE, {"trace_level": "OFF"}, 400, "Unable to parse 'trace_level': attempt to access JSON non-array as array"),
    (TRACE, {"trace_level": ["OFF", "TIMESTAMPS"]}, 400, "Expect only one trace level 'OFF' is specified"),
    ("/v2/models/no/trace/setting", {}, 400, "Request for unknown model : no"),
    ("/v2/models/llm/versions/1/trace/setting", {}, 404, "Not Found"),
]


@pytest.mark.parametrize(("path", "body", "status", "text"), SETTING_ERRORS)
async def test_setting_errors(client: httpx.AsyncClient, path: str, body: Any, status: int, text: str) -> None:
    response = await client.post(path, json=body)
    assert (response.status_code, response.json()) == (status, {"error": text})


# Shared memory


async def test_regions_come_and_go(gateway: Any, shared_memory: str) -> None:
    gateway.shared_state = SharedState(shared_memory=SharedMemoryRegistry(allowed=True))
    region = f"{SYSTEM}/region/r"
    async with served(gateway) as client:
        assert (await client.get(f"{SYSTEM}/status")).json() == []
        body = {"key": shared_memory, "offset": 8, "byte_size": 16}
        for path, sent in (
            (f"{region}/register", body),
            (f"{CUDA}/unregister", {}),
            (f"{CUDA}/region/r/unregister", {}),
        ):
            response = await client.post(path, json=sent)
            assert (response.status_code, response.content) == (200, b"")
        told = [{"name": "r", "key": shared_memory, "offset": 8, "byte_size": 16}]
        assert (await client.get(f"{SYSTEM}/status")).json() == told
        assert (await client.get(f"{region}/status")).json() == told
        again = await client.post(f"{region}/register", json=body)
        assert (again.status_code, again.json()["error"]) == (400, "shared memory region 'r' already in manager")
        for path in (f"{region}/unregister", f"{SYSTEM}/unregister", f"{SYSTEM}/region/unknown/unregister"):
            response = await client.post(path)
            assert (response.status_code, response.content) == (200, b"")
        assert (await client.get(f"{SYSTEM}/status")).json() == []


async def test_regions_of_gpus_come_and_go(gateway: Any, gpu_regions: SharedMemoryRegistry, on_gpu: Any) -> None:
    gateway.shared_state = SharedState(shared_memory=gpu_regions)
    body = {"raw_handle": {"b64": on_gpu.raw_handle.decode()}, "device_id": 1, "byte_size": 16}
    async with served(gateway) as client:
        made = await client.post(f"{CUDA}/region/r/register", json=body)
        assert (made.status_code, made.content) == (200, b"")
        told = [{"name": "g", "device_id": 0, "byte_size": 4096}, {"name": "r", "device_id": 1, "byte_size": 16}]
        assert (await client.get(f"{CUDA}/status")).json() == told
        assert (await client.get(f"{CUDA}/region/r/status")).json() == told[1:]
        assert (await client.get(f"{SYSTEM}/status")).json() == []
        again = await client.post(f"{CUDA}/region/g/register", json=body)
        assert (again.status_code, again.json()["error"]) == (400, "shared memory region 'g' already in manager")
        wrong = await client.post(f"{CUDA}/region/s/register", json={**body, "byte_size": 5000})
        text = "failed to register shared memory region 's': invalid args: byte_size is 5000, and there are 4096 bytes"
        assert (wrong.status_code, wrong.json()) == (400, {"error": text})
        for path, left in ((f"{SYSTEM}/unregister", 2), (f"{CUDA}/region/r/unregister", 1), (f"{CUDA}/unregister", 0)):
            response = await client.post(path)
            assert (response.status_code, response.content) == (200, b"")
            assert len((await client.get(f"{CUDA}/status")).json()) == left


HANDLE = {"b64": "AAAA"}
MEMORY_ERRORS = [
    ("GET", f"{SYSTEM}/region/r/status", {}, 404, "Unable to find system shared memory region: 'r'"),
    ("GET", f"{CUDA}/region/r/status", {}, 404, "Unable to find cuda shared memory region: 'r'"),
    ("POST", f"{SYSTEM}/region/r/register", {}, 400, "Shared memory register request has no 'key' field"),
    (
        "POST",
        f"{SYSTEM}/region/r/register",
        {"key": "/x"},
        400,
        "Shared memory register request has no 'byte_size' field",
    ),
    (
        "POST",
        f"{SYSTEM}/region/r/register",
        {"key": "/charonia_no", "byte_size": 8},
        500,
        "Unable to open shared memory region: '/charonia_no'",
    ),
    ("POST", f"{CUDA}/region/r/register", {}, 400, "Shared memory register request has no 'raw_handle' field"),
    (
        "POST",
        f"{CUDA}/region/r/register",
        {"raw_handle": HANDLE, "device_id": 0},
        400,
        "Shared memory register request has no 'byte_size' field",
    ),
    (
        "POST",
        f"{CUDA}/region/r/register",
        {"raw_handle": {"b64": "?"}, "byte_size": 8},
        400,
        "'b64' of 'raw_handle' is not base64",
    ),
    (
        "POST",
        f"{CUDA}/region/r/register",
        {"raw_handle": HANDLE, "device_id": 0, "byte_size": 8},
        400,
        "failed to register CUDA shared memory region: 'r', GPUs not supported",
    ),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "text"), MEMORY_ERRORS)
async def test_memory_errors(gateway: Any, method: str, path: str, body: Any, status: int, text: str) -> None:
    gateway.shared_state = SharedState(shared_memory=SharedMemoryRegistry(allowed=True))
    async with served(gateway) as client:
        response = await client.request(method, path, json=body)
    assert (response.status_code, response.json()) == (status, {"error": text})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"{SYSTEM}/region/r/register", {"key": "/x", "byte_size": 8}),
        (f"{SYSTEM}/unregister", {}),
        (f"{CUDA}/region/r/register", {"raw_handle": HANDLE, "device_id": 0, "byte_size": 8}),
        (f"{CUDA}/unregister", {}),
    ],
)
async def test_memory_is_not_lent_unless_the_server_wants_it(client: httpx.AsyncClient, path: str, body: Any) -> None:
    response = await client.post(path, json=body)
    assert (response.status_code, response.json()) == (501, {"error": DISABLED})
    assert (await client.get(f"{SYSTEM}/status")).json() == []


# Restricted

BELONGS = {
    "health": [
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/llm/ready",
        "/v2/models/llm/versions/1/ready",
        "/health",
        "/ping",
    ],
    "metadata": ["/v2", "/v2/models/llm", "/v2/models/llm/versions/1", "/v1/models", "/version", "/"],
    "inference": [
        "/v2/models/llm/infer",
        "/v2/models/llm/versions/1/generate",
        "/v2/models/llm/generate_stream",
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
    ],
    "shared-memory": [f"{SYSTEM}/status", f"{CUDA}/region/r/status"],
    "model-config": ["/v2/models/llm/config"],
    "model-repository": [
        "/v2/repository/index",
        LOAD,
        "/v2/routes",
        "/v2/routes/r",
        "/v2/routes/r/rollout",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ],
    "statistics": ["/metrics", "/v2/models/stats", "/v2/models/llm/stats", "/v2/models/llm/versions/1/stats"],
    "trace": [TRACE, "/v2/models/llm/trace/setting"],
    "logging": [LOGGING],
}


@pytest.mark.parametrize("name", APIS)
async def test_restricted(gateway: Any, name: str) -> None:
    async with served(gateway, http_restricted_api=(f"{name}:X-Key=se=cret",)) as client:
        for other, paths in BELONGS.items():
            for path in paths:
                for headers in ({}, {"x-key": "wrong"}):
                    response = await client.post(path, headers=headers)
                    assert (response.status_code == 403) is (other == name), path
                response = await client.post(path, headers={"X-Key": "se=cret"})
                assert response.status_code != 403
        response = await client.get(BELONGS[name][0])
        assert response.json() == {"error": "This API is restricted, expecting header 'X-Key'"}


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (("health",), "must be <api>"),
        (("health:key",), "must be <api>"),
        (("health:=value",), "must be <api>"),
        (("health:key=",), "must be <api>"),
        (("helth:key=value",), "unknown restricted api 'helth', there are health, "),
        (
            ("health,metadata:a=b", "metadata:c=d"),
            "restricted api 'metadata' can not be specified in multiple config groups",
        ),
    ],
)
def test_restrictions_that_mean_nothing(groups: tuple[str, ...], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text) as raised:
        parse_http_rules(HttpOptions(http_restricted_api=groups))
    assert raised.value.message.startswith("--http-restricted-api")
    assert "value" not in raised.value.message.replace("<value>", "")


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(InvalidArgument, match="--http-header-forward-pattern: '\\(' is no regular expression"):
        parse_http_rules(HttpOptions(http_header_forward_pattern="("))
