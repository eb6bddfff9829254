"""Queues, batches and streams of classic models, as clients of a real server see them."""

import asyncio
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from .models import write_config
from .serving import serving
from .tensors import given

_ENDS = """\
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: 1 }
output { name: "OUT" data_type: TYPE_FP32 dims: 1 }
"""
_SLOW = 'backend: "identity"\nparameters { key: "execute_delay_ms" value { string_value: "150" } }\n' + _ENDS
_MODELS = {
    "batched": _SLOW + "dynamic_batching { }",
    "short": _SLOW + "dynamic_batching { default_queue_policy { max_queue_size: 1 } }",
    "hasty": _SLOW + "dynamic_batching { default_queue_policy { default_timeout_microseconds: 20000 } }",
    "repeat": 'backend: "repeat"',
    "square": 'backend: "square"',
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("models")
    for name, config in _MODELS.items():
        write_config(models, name, config)
    with serving(Path(tmp_path_factory.mktemp("t") / "t"), "--model-repository", str(models)) as server:
        yield server


async def ask(client: httpx.AsyncClient, model: str, number: float) -> httpx.Response:
    tensor = {"name": "IN", "shape": [1, 1], "datatype": "FP32", "data": [number]}
    return await client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]})


async def ask_all(server: Any, model: str, count: int) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        return await asyncio.gather(*(ask(client, model, number) for number in range(count)))


def statistics(server: Any, model: str) -> Any:
    [stats] = httpx.get(f"{server.url}/v2/models/{model}/stats").json()["model_stats"]
    return stats


async def test_requests_share_executions_and_get_their_own_answers(server: Any) -> None:
    answers = await ask_all(server, "batched", 8)
    assert [answer.json()["outputs"][0]["data"] for answer in answers] == [[float(number)] for number in range(8)]
    stats = statistics(server, "batched")
    assert stats["inference_count"] == 8
    assert stats["execution_count"] < 8
    assert sum(each["batch_size"] * each["compute_infer"]["count"] for each in stats["batch_stats"]) == 8


async def test_a_full_queue_is_told_in_tritons_words(server: Any) -> None:
    answers = await ask_all(server, "short", 8)
    refused = [answer for answer in answers if answer.status_code == 503]
    assert refused
    assert {each.json()["error"] for each in refused} == {"[request id: <id_unknown>] Exceeds maximum queue size"}
    assert {answer.status_code for answer in answers} == {200, 503}


async def test_time_that_ran_out_in_the_queue_is_told_in_tritons_words(server: Any) -> None:
    answers = await ask_all(server, "hasty", 24)
    late = [answer for answer in answers if answer.status_code == 503]
    assert late
    assert {each.json()["error"] for each in late} == {"Request timeout expired"}
    assert {answer.status_code for answer in answers} == {200, 503}
    assert statistics(server, "hasty")["inference_stats"]["fail"]["count"] == len(late)


async def test_who_leaves_is_out_of_the_queue(server: Any) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        before = statistics(server, "short")["inference_stats"]["success"]["count"]
        running = asyncio.create_task(ask(client, "short", 1))
        await asyncio.sleep(0.05)
        gone = asyncio.create_task(ask(client, "short", 2))
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert (await running).status_code == 200
        assert (await ask(client, "short", 3)).status_code == 200
        assert statistics(server, "short")["inference_stats"]["success"]["count"] - before <= 3
    server.until(lambda: pending(server, "short") == 0)


def pending(server: Any, model: str) -> float:
    series = f'nv_inference_pending_request_count{{model="{model}",version="1"}} '
    [line] = [line for line in httpx.get(server.metrics_url).text.splitlines() if line.startswith(series)]
    return float(line.removeprefix(series))


async def test_a_decoupled_model_streams_as_events(server: Any) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        answer = await client.post("/v2/models/square/generate_stream", json={"IN": 3})
        none = await client.post("/v2/models/square/generate_stream", json={"IN": 0})
        once = await client.post("/v2/models/square/infer", json={"inputs": []})
    assert answer.text == 'data: {"OUT":3,"model_name":"square","model_version":"1"}\n\n' * 3
    assert (none.status_code, none.text) == (200, "")
    assert once.status_code == 501


def test_a_decoupled_model_streams_over_grpc(server: Any) -> None:
    import tritonclient.grpc as triton

    answers: queue.Queue[Any] = queue.Queue()
    tensors = {"IN": (np.int32, [5, 6]), "DELAY": (np.uint32, [1, 1]), "WAIT": (np.uint32, [0])}
    with triton.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        inputs = [given(triton, name, np.array(values, datatype)) for name, (datatype, values) in tensors.items()]
        client.async_stream_infer("repeat", inputs, enable_empty_final_response=True, request_id="r")
        got = [answers.get(timeout=60) for _ in range(3)]
        client.stop_stream()
    assert [error for _, error in got] == [None] * 3
    assert [result.as_numpy("OUT").tolist() for result, _ in got[:2]] == [[5], [6]]
    assert [result.as_numpy("IDX").tolist() for result, _ in got[:2]] == [[0], [1]]
    assert [result.get_response().parameters["triton_final_response"].bool_param for result, _ in got] == [
        False,
        False,
        True,
    ]
