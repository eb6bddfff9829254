"""The published tritonclient drives every endpoint of a real server over HTTP: identity and an LLM, sync and aio."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
import tritonclient.utils.shared_memory as shared_memory
from tritonclient.utils import InferenceServerException

from .models import FAKE, write_config, write_labelled, write_model
from .serving import Server, served_well
from .tensors import given, lent

ANYTHING = """
name: "anything"
backend: "identity"
input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }
"""
NUMBERS = np.arange(32, dtype=np.float32).reshape(2, 16)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokenizer_only: Path) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    write_labelled(repository, "identity", "spare")
    write_config(repository, "anything", ANYTHING)
    write_model(repository, "llm", tokenizer_only, **FAKE)
    flags = ["--model-repository", str(repository), "--model-control-mode", "explicit", "--allow-client-shm=true"]
    for name in ("identity", "anything", "llm"):
        flags += ["--load-model", name]
    flags += ["--http-restricted-api", "logging:let=me", "--http-header-forward-pattern", "^x-"]
    with served_well(tmp_path_factory.mktemp("h") / "t", *flags) as running:
        yield running


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    with triton.InferenceServerClient(server.http_address, network_timeout=30) as connected:
        yield connected


def numbers(data: Any = NUMBERS, binary: bool = True) -> Any:
    return given(triton, "INPUT0", data, binary_data=binary)


def refused(status: int, text: str) -> Any:
    return pytest.raises(InferenceServerException, match=f"(?s){status}.*{text}")


def test_who_is_there(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("identity", "1")
    assert not client.is_model_ready("no")
    assert client.get_server_metadata()["name"] == "triton"
    metadata = client.get_model_metadata("identity")
    assert list(metadata) == ["name", "versions", "platform", "inputs", "outputs"]
    assert (metadata["versions"], metadata["platform"]) == (["1"], "identity")
    assert metadata["inputs"][0] == {"name": "INPUT0", "datatype": "FP32", "shape": [-1, 16]}
    config = client.get_model_config("identity")
    assert (config["name"], config["max_batch_size"], config["backend"]) == ("identity", 8, "identity")


@pytest.mark.parametrize("binary_out", [False, True])
@pytest.mark.parametrize("binary_in", [False, True])
def test_infer_in_every_mixture(client: Any, binary_in: bool, binary_out: bool) -> None:
    words = given(triton, "INPUT1", np.array([["h\u00e9"], [""]], np.object_), binary_data=not binary_in)
    outputs = [
        triton.InferRequestedOutput("OUTPUT0", binary_data=binary_out),
        triton.InferRequestedOutput("OUTPUT1", binary_data=not binary_out),
    ]
    result = client.infer("identity", [numbers(binary=binary_in), words], outputs=outputs, request_id="7")
    assert np.array_equal(result.as_numpy("OUTPUT0"), NUMBERS)
    said = [each if isinstance(each, str) else each.decode() for each in result.as_numpy("OUTPUT1").ravel()]
    assert said == ["h\u00e9", ""]
    assert (result.get_response()["id"], result.get_response()["model_version"]) == ("7", "1")


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression(client: Any, algorithm: str) -> None:
    result = client.infer(
        "identity",
        [numbers()],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert np.array_equal(result.as_numpy("OUTPUT0"), NUMBERS)


def test_classes_with_labels(client: Any) -> None:
    result = client.infer("identity", [numbers()], outputs=[triton.InferRequestedOutput("OUTPUT0", class_count=16)])
    classes = result.as_numpy("OUTPUT0")
    assert classes.shape == (2, 16)
    assert classes[0][0] == b"15.000000:15"
    assert classes[1][-2:].tolist() == [b"17.000000:1:one", b"16.000000:0:zero"]


def test_many_at_once(client: Any) -> None:
    asked = [client.async_infer("identity", [numbers()], request_id=str(number)) for number in range(8)]
    answers = [each.get_result() for each in asked]
    assert [answer.get_response()["id"] for answer in answers] == [str(number) for number in range(8)]


def test_a_raw_request(server: Any) -> None:
    data = np.arange(5, dtype=np.int32)
    url = f"{server.url}/v2/models/anything/infer"
    response = httpx.post(url, content=data.tobytes(), headers={"Inference-Header-Content-Length": "0"})
    head = int(response.headers["inference-header-content-length"])
    assert response.content[head:] == data.tobytes()


def test_a_body_of_megabytes(client: Any) -> None:
    data = np.arange(2_000_000, dtype=np.int32)
    assert np.array_equal(client.infer("anything", [given(triton, "IN", data)]).as_numpy("OUT"), data)


def test_tensors_in_shared_memory(server: Server, client: Any) -> None:
    size = NUMBERS.nbytes
    with lent(client, "there", size) as there, lent(client, "back", size) as back:
        shared_memory.set_shared_memory_region(there, [NUMBERS])
        asked = triton.InferInput("INPUT0", [2, 16], "FP32")
        asked.set_shared_memory("there", size)
        wanted = triton.InferRequestedOutput("OUTPUT0")
        wanted.set_shared_memory("back", size)
        client.infer("identity", [asked], outputs=[wanted])
        assert np.array_equal(shared_memory.get_contents_as_numpy(back, np.float32, [2, 16]), NUMBERS)
        assert [each["name"] for each in client.get_system_shared_memory_status()] == ["there", "back"]
        with refused(400, "already in manager"):
            client.register_system_shared_memory("there", "/x", 8)
    server.until(lambda: client.get_system_shared_memory_status() == [])
    assert client.get_cuda_shared_memory_status() == []
    client.unregister_cuda_shared_memory()
    with refused(400, "GPUs not supported"):
        client.register_cuda_shared_memory("r", b"AAAA", 0, 8)


def test_the_repository(client: Any) -> None:
    assert {entry["name"]: entry.get("state") for entry in client.get_model_repository_index()}["identity"] == "READY"
    client.load_model("spare")
    assert client.is_model_ready("spare")
    client.unload_model("spare")
    assert not client.is_model_ready("spare")
    [spare] = [entry for entry in client.get_model_repository_index() if entry["name"] == "spare"]
    assert spare["reason"] == "unloaded"
    with refused(500, "failed to load 'no', failed to poll from model repository"):
        client.load_model("no")
    with refused(500, "failed to load 'spare', failed to poll from model repository: Invalid config override"):
        client.load_model("spare", config="{")


def test_statistics(client: Any) -> None:
    def successes() -> int:
        [said] = client.get_inference_statistics("identity")["model_stats"]
        return int(said["inference_stats"]["success"]["count"])

    before = successes()
    client.infer("identity", [numbers()])
    assert successes() == before + 1
    assert {each["name"] for each in client.get_inference_statistics()["model_stats"]} >= {"identity", "llm"}
    with refused(400, "requested model 'no' is not available"):
        client.get_inference_statistics("no")
    with refused(400, "requested model version is not available for model 'identity'"):
        client.get_inference_statistics("identity", "9")


def test_settings(client: Any) -> None:
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.update_trace_settings("identity", {"trace_rate": "7"})["trace_rate"] == "7"
    assert client.get_trace_settings()["trace_rate"] == "1000"
    with refused(403, "This API is restricted, expecting header 'let'"):
        client.get_log_settings()
    let = {"let": "me"}
    assert client.get_log_settings(let)["log_verbose_level"] == 0
    assert client.update_log_settings({"log_verbose_level": 0}, let)["log_info"] is True


def test_a_language_model(client: Any) -> None:
    prompt = given(triton, "text_input", np.array([b"hi"], np.object_))
    result = client.infer("llm", [prompt], parameters={"max_tokens": 4, "temperature": 0})
    assert result.as_numpy("text_output").shape == (1,)
    stream = given(triton, "stream", np.array([True]))
    with refused(501, "HTTP end point doesn't support models with decoupled transaction policy"):
        client.infer("llm", [prompt, stream])


def test_generate_for_any_model(server: Any) -> None:
    for path in ("generate", "generate_stream"):
        response = httpx.post(f"{server.url}/v2/models/anything/{path}", json={"IN": [1, 2, 3], "id": "x"})
        assert response.text.removeprefix("data: ").strip() == (
            '{"OUT":[1,2,3],"id":"x","model_name":"anything","model_version":"1"}'
        )


IN = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": [0.0] * 16}
IDS = "[request id: 7] "
UNKNOWN = "[request id: <id_unknown>] "
CORE_ERRORS: list[tuple[str, Any, int, str]] = [
    ("no", {"inputs": [IN]}, 404, "Request for unknown model: 'no' is not found"),
    ("identity/versions/9", {"inputs": [IN]}, 404, "Request for unknown model: 'identity' version 9 is not found"),
    ("spare", {"inputs": [IN]}, 404, "Request for unknown model: 'spare' has no available versions"),
    (
        "identity",
        {"inputs": []},
        400,
        UNKNOWN + "expected number of inputs between 1 and 2 but got 0 inputs for model 'identity'. "
        "Got input(s) [], but missing required input(s) ['INPUT0']. Please provide all required input(s).",
    ),
    (
        "anything",
        {"inputs": []},
        400,
        UNKNOWN + "expected 1 inputs but got 0 inputs for model 'anything'. "
        "Got input(s) [], but missing required input(s) ['IN']. Please provide all required input(s).",
    ),
    ("identity", {"inputs": [IN, {**IN, "name": "X"}]}, 400, "unexpected inference input 'X' for model 'identity'"),
    (
        "identity",
        {"inputs": [IN], "outputs": [{"name": "X"}]},
        400,
        "unexpected inference output 'X' for model 'identity'",
    ),
    (
        "identity",
        {"id": "7", "inputs": [{**IN, "datatype": "INT32", "data": [0] * 16}]},
        400,
        IDS + "inference input 'INPUT0' data-type is 'INT32', but model 'identity' expects 'FP32'",
    ),
    (
        "identity",
        {"inputs": [{**IN, "shape": [1, 17], "data": [0.0] * 17}]},
        400,
        UNKNOWN + "unexpected shape for input 'INPUT0' for model 'identity'. Expected [-1,16], got [1,17]. ",
    ),
    (
        "identity",
        {"inputs": [{**IN, "shape": [9, 16], "data": [0.0] * 144}]},
        400,
        UNKNOWN + "inference request batch-size must be <= 8 for 'identity'",
    ),
    (
        "identity",
        {"inputs": [IN, {"name": "INPUT1", "datatype": "BYTES", "shape": [2, 1], "data": ["a", "b"]}]},
        400,
        UNKNOWN + "input 'INPUT1' batch size does not match other inputs for 'identity'",
    ),
    (
        "identity",
        {"inputs": [{**IN, "shape": [], "data": [0.0]}]},
        400,
        UNKNOWN + "input 'INPUT0' has no shape but model requires batch dimension for 'identity'",
    ),
]


@pytest.mark.parametrize(("model", "body", "status", "text"), CORE_ERRORS)
def test_what_core_refuses(server: Any, model: str, body: Any, status: int, text: str) -> None:
    response = httpx.post(f"{server.url}/v2/models/{model}/infer", json=body)
    assert response.status_code == status
    assert response.json()["error"].startswith(text)


async def test_aio(server: Any) -> None:
    async with triton_aio.InferenceServerClient(server.http_address) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("identity")
        assert (await client.get_server_metadata())["name"] == "triton"
        assert (await client.get_model_metadata("identity"))["name"] == "identity"
        assert (await client.get_model_config("identity"))["max_batch_size"] == 8
        result = await client.infer("identity", [numbers()])
        assert np.array_equal(result.as_numpy("OUTPUT0"), NUMBERS)
        assert (await client.get_inference_statistics("identity"))["model_stats"][0]["version"] == "1"
        assert "identity" in [entry["name"] for entry in await client.get_model_repository_index()]
        await client.load_model("spare")
        await client.unload_model("spare")
        assert (await client.get_trace_settings())["trace_mode"] == "triton"
        assert (await client.get_log_settings({"let": "me"}))["log_error"] is True
        assert await client.get_system_shared_memory_status() == []
        assert await client.get_cuda_shared_memory_status() == []
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'no' is not found"):
            await client.get_model_metadata("no")
