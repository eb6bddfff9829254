"""The published tritonclient drives every RPC of a real server: identity and an LLM, sync and aio."""

import asyncio
import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.utils.shared_memory as shared_memory
from tritonclient.utils import InferenceServerException

from .models import FAKE, write_labelled, write_model
from .serving import Server, served_well
from .tensors import given, lent

NUMBERS = np.arange(32, dtype=np.float32).reshape(2, 16)


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "trace.json"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokenizer_only: Path, trace_file: Path) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    write_labelled(repository, "identity", "spare")
    write_model(repository, "llm", tokenizer_only, **FAKE)
    flags = ["--model-repository", str(repository), "--model-control-mode", "explicit", "--allow-client-shm=true"]
    flags += ["--load-model", "identity", "--load-model", "llm", "--trace-config", f"triton,file={trace_file}"]
    flags += ["--log-requests", "all"]
    with served_well(tmp_path_factory.mktemp("g") / "t", *flags) as running:
        yield running


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    with triton.InferenceServerClient(server.grpc_address) as connected:
        yield connected


def numbers(data: Any = NUMBERS) -> Any:
    return given(triton, "INPUT0", data)


def texts(*words: bytes) -> Any:
    return given(triton, "INPUT1", np.array([words], np.object_))


def refused(code: str, text: str) -> Any:
    return pytest.raises(InferenceServerException, match=f"(?s)StatusCode.{code}.*{text}")


def test_who_is_there(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("identity", "1")
    assert client.get_server_metadata().name == "triton"
    metadata = client.get_model_metadata("identity")
    assert (list(metadata.versions), metadata.platform) == (["1"], "identity")
    assert [(each.name, list(each.shape)) for each in metadata.inputs] == [("INPUT0", [-1, 16]), ("INPUT1", [-1, -1])]
    config = client.get_model_config("identity").config
    assert (config.name, config.max_batch_size, config.backend) == ("identity", 8, "identity")
    assert config.instance_group[0].count >= 1
    assert client.get_model_config("llm").config.model_transaction_policy.decoupled


def test_tensors_come_back(client: Any) -> None:
    words = (b"a", b"", b"\xff\0\xfe", "ü".encode())
    outputs = [triton.InferRequestedOutput("OUTPUT1"), triton.InferRequestedOutput("OUTPUT0")]
    for wanted in (None, outputs):
        result = client.infer("identity", [numbers(NUMBERS[:1]), texts(*words)], request_id="7", outputs=wanted)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), NUMBERS[:1])
        assert result.as_numpy("OUTPUT1").tolist() == [[*words]]
        response = result.get_response()
        assert (response.id, response.model_name, response.model_version) == ("7", "identity", "1")
    result = client.infer("identity", [numbers()], outputs=[triton.InferRequestedOutput("OUTPUT0")])
    assert [output.name for output in result.get_response().outputs] == ["OUTPUT0"]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(client: Any, algorithm: str) -> None:
    result = client.infer("identity", [numbers()], compression_algorithm=algorithm)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), NUMBERS)


def test_parameters_of_a_request(client: Any) -> None:
    result = client.infer(
        "identity",
        [numbers()],
        priority=3,
        timeout=1_000_000,
        sequence_id="s",
        sequence_start=True,
        parameters={"x": 1},
    )
    assert result.as_numpy("OUTPUT0").shape == (2, 16)
    heard: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.async_infer("identity", [numbers()], lambda result, error: heard.put((result, error)), client_timeout=60)
    result, error = heard.get(timeout=60)
    assert error is None
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), NUMBERS)


def test_classes(client: Any) -> None:
    wanted = triton.InferRequestedOutput("OUTPUT0", class_count=2)
    data = np.zeros((1, 16), np.float32)
    data[0, :3] = 0.5, 2.25, 1
    result = client.infer("identity", [numbers(data)], outputs=[wanted])
    assert result.as_numpy("OUTPUT0").tolist() == [[b"2.250000:1:one", b"1.000000:2"]]


@pytest.mark.parametrize(
    ("inputs", "code", "text"),
    [
        ([numbers(NUMBERS[:, :8].copy())], "INVALID_ARGUMENT", r"unexpected shape for input 'INPUT0'"),
        ([texts(b"a")], "INVALID_ARGUMENT", "missing required input"),
        ([numbers(np.zeros((9, 16), np.float32))], "INVALID_ARGUMENT", "inference request batch-size must be <= 8"),
    ],
)
def test_what_does_not_fit(client: Any, inputs: Any, code: str, text: str) -> None:
    with refused(code, text):
        client.infer("identity", inputs)


def test_statistics(client: Any) -> None:
    def counted() -> Any:
        [said] = client.get_inference_statistics("identity").model_stats
        return said

    before = counted()
    client.infer("identity", [numbers()])
    after = counted()
    assert after.inference_count == before.inference_count + 2
    assert after.execution_count == before.execution_count + 1
    assert after.inference_stats.success.count == before.inference_stats.success.count + 1
    assert after.last_inference > 0
    assert {each.name for each in client.get_inference_statistics().model_stats} == {"identity", "llm"}
    with refused("INVALID_ARGUMENT", "requested model 'no' is not available"):
        client.get_inference_statistics("no")


def states(client: Any) -> dict[str, str]:
    return {model.name: model.state for model in client.get_model_repository_index().models}


def test_models_are_loaded_and_unloaded(server: Any, client: Any) -> None:
    assert states(client) == {"identity": "READY", "llm": "READY", "spare": ""}
    assert not any(
        model.name == "spare" for model in client.get_model_repository_index(as_json=False).models if model.state
    )
    with refused("NOT_FOUND", "Request for unknown model: 'spare'"):
        client.infer("spare", [numbers()])
    client.load_model("spare")
    np.testing.assert_array_equal(client.infer("spare", [numbers()]).as_numpy("OUTPUT0"), NUMBERS)
    override = {"backend": "identity", "max_batch_size": 1, **tensors()}
    client.load_model("spare", config=json.dumps(override))
    assert client.get_model_config("spare").config.max_batch_size == 1
    client.unload_model("spare")
    server.until(lambda: states(client)["spare"] == "UNAVAILABLE")
    with refused("INTERNAL", "failed to load 'no', failed to poll from model repository"):
        client.load_model("no")


def tensors() -> dict[str, Any]:
    tensor = {"data_type": "TYPE_FP32", "dims": [16]}
    return {"input": [{"name": "INPUT0", **tensor}], "output": [{"name": "OUTPUT0", **tensor}]}


def test_tensors_in_shared_memory(server: Any, client: Any) -> None:
    size = NUMBERS.nbytes
    with lent(client, "in", size) as theirs, lent(client, "out", 2 * size) as ours:
        shared_memory.set_shared_memory_region(theirs, [NUMBERS])
        there = triton.InferInput("INPUT0", [2, 16], "FP32")
        there.set_shared_memory("in", size)
        wanted = triton.InferRequestedOutput("OUTPUT0")
        wanted.set_shared_memory("out", size, offset=size)
        result = client.infer("identity", [there], outputs=[wanted])
        output = result.get_output("OUTPUT0")
        assert (output.datatype, list(output.shape)) == ("FP32", [2, 16])
        assert list(result.get_response().raw_output_contents) == [b""]
        written = shared_memory.get_contents_as_numpy(ours, np.float32, [2, 16], offset=size)
        np.testing.assert_array_equal(written, NUMBERS)
        assert {*client.get_system_shared_memory_status().regions} == {"in", "out"}
        wanted.set_shared_memory("out", 8)
        with refused("INTERNAL", r"request for output 'OUTPUT0' \(8 bytes\) should be at least 128 bytes"):
            client.infer("identity", [there], outputs=[wanted])
        wanted.set_shared_memory("out", size, offset=2 * size)
        with refused("INVALID_ARGUMENT", "Invalid offset for shared memory region: 'out'"):
            client.infer("identity", [there], outputs=[wanted])
        there.set_shared_memory("never", size)
        with refused("NOT_FOUND", "Unable to find shared memory region: 'never'"):
            client.infer("identity", [there])
    server.until(lambda: not client.get_system_shared_memory_status().regions)
    mapped = Path(f"/proc/{server.process.pid}/maps")
    server.until(lambda: "charonia_e2e" not in mapped.read_text())
    with refused("NOT_FOUND", "Unable to find system shared memory region: 'in'"):
        client.get_system_shared_memory_status("in")


def test_memory_of_gpus(client: Any) -> None:
    assert not client.get_cuda_shared_memory_status().regions
    with refused("INVALID_ARGUMENT", "failed to register CUDA shared memory region: 'g', GPUs not supported"):
        client.register_cuda_shared_memory("g", b"aGk=", 0, 8)
    client.unregister_cuda_shared_memory("g")


def test_log_settings(server: Any, client: Any) -> None:
    defaults = client.get_log_settings(as_json=True)["settings"]
    assert defaults["log_format"] == {"string_param": "default"}
    client.infer("identity", [numbers()], request_id="loud")
    client.update_log_settings({"log_info": False, "log_verbose_level": 1})
    client.infer("identity", [numbers()], request_id="quiet")
    client.update_log_settings({"log_info": True, "log_verbose_level": 0})
    client.infer("identity", [numbers()], request_id="again")
    server.until(lambda: "request_id=again" in server.said)
    assert "request_id=loud" in server.said
    assert "request_id=quiet" not in server.said
    assert client.get_log_settings(as_json=True)["settings"] == defaults
    with refused("UNIMPLEMENTED", "log file location can not be updated through network protocol"):
        client.update_log_settings({"log_file": "x"})
    with refused("INVALID_ARGUMENT", "invalid argument for log_format, got: x"):
        client.update_log_settings({"log_format": "x"})


def test_trace_settings(client: Any, trace_file: Path) -> None:
    said = client.get_trace_settings(as_json=True)["settings"]
    assert (said["trace_level"], said["trace_file"]) == ({"value": ["OFF"]}, {"value": [str(trace_file)]})
    client.update_trace_settings("identity", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "2"})
    for number in range(3):
        client.infer("identity", [numbers()], request_id=f"t{number}")
    traces = json.loads(trace_file.with_name("trace.json.0").read_text())
    assert [trace["request_id"] for trace in traces if "request_id" in trace] == ["t0", "t1"]
    stamps = [trace["timestamps"] for trace in traces if "timestamps" in trace]
    assert all(each == sorted(each, key=lambda stamp: stamp["ns"]) for each in stamps)
    assert [(each[0]["name"], each[-1]["name"]) for each in stamps] == [("GRPC_WAITREAD_START", "GRPC_SEND_END")] * 2
    assert {"GRPC_WAITREAD_END", "REQUEST_START", "COMPUTE_END", "REQUEST_END"} <= {each["name"] for each in stamps[0]}
    client.update_trace_settings("identity", {"trace_level": ["TENSORS"], "trace_rate": "1", "trace_count": "1"})
    client.infer("identity", [numbers()], request_id="tensors")
    seen = json.loads(trace_file.with_name("trace.json.1").read_text())
    assert [each.get("activity") for each in seen] == [
        None,
        *(f"TENSOR_{at}PUT" for at in ("QUEUE_IN", "BACKEND_IN", "BACKEND_OUT")),
    ]
    assert all(each["tensor"]["shape"] == "2,16" and each["tensor"]["dtype"] == "FP32" for each in seen[1:])
    assert all(
        np.array_equal(np.fromstring(each["tensor"]["data"], np.float32, sep=","), NUMBERS.ravel()) for each in seen[1:]
    )
    cleared = {"trace_level": None, "trace_rate": None, "trace_count": None}
    assert client.update_trace_settings("identity", cleared, as_json=True)["settings"] == said
    with refused("INVALID_ARGUMENT", "Unable to parse 'trace_rate', got: x"):
        client.update_trace_settings(settings={"trace_rate": "x"})


def test_a_stream_serves_both_kinds(client: Any) -> None:
    heard: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: heard.put((result, error)))
    ids = given(triton, "input_ids", np.array([5], np.int32))
    for number in range(3):
        client.async_stream_infer("identity", [numbers(NUMBERS + number)], request_id=str(number))
    client.async_stream_infer("llm", [ids], request_id="llm", parameters={"max_tokens": 3})
    plain = []
    for _ in range(4):
        result, error = heard.get(timeout=60)
        assert error is None
        response = result.get_response()
        assert response.parameters["triton_final_response"].bool_param
        if response.id != "llm":
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), NUMBERS + int(response.id))
            plain.append(response.id)
    client.stop_stream()
    assert plain == ["0", "1", "2"], "plain models answer in the order of their requests"


async def test_the_aio_client(server: Any) -> None:
    async with triton_aio.InferenceServerClient(server.grpc_address) as client, asyncio.timeout(60):
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("identity")
        assert (await client.get_server_metadata()).name == "triton"
        assert (await client.get_model_metadata("identity")).name == "identity"
        assert (await client.get_model_config("identity")).config.max_batch_size == 8
        assert (await client.get_inference_statistics("identity")).model_stats[0].name == "identity"
        assert {model.name for model in (await client.get_model_repository_index()).models} >= {"identity", "spare"}
        await client.load_model("spare")
        await client.unload_model("spare")
        with refused("INTERNAL", "Unable to open shared memory region: '/charonia_no_such_key'"):
            await client.register_system_shared_memory("a", "/charonia_no_such_key", 8)
        assert not (await client.get_system_shared_memory_status()).regions
        await client.unregister_system_shared_memory()
        assert not (await client.get_cuda_shared_memory_status()).regions
        with refused("INVALID_ARGUMENT", "GPUs not supported"):
            await client.register_cuda_shared_memory("g", b"", 0, 8)
        await client.unregister_cuda_shared_memory()
        assert (await client.get_log_settings()).settings["log_info"].bool_param
        assert (await client.update_log_settings({"log_error": True})).settings["log_error"].bool_param
        assert (await client.get_trace_settings("identity")).settings["trace_rate"].value == ["1000"]
        await client.update_trace_settings("identity", {"trace_rate": "5"})
        await client.update_trace_settings("identity", {"trace_rate": None})
        results = await asyncio.gather(*(client.infer("identity", [numbers(NUMBERS + each)]) for each in range(20)))
        for each, result in enumerate(results):
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), NUMBERS + each)
