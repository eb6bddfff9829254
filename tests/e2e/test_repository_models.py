"""A Triton user's repository, served as it is: ONNX with versions and labels, TorchScript, exported programs."""

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from numpy.typing import NDArray

from .serving import serving
from .tensors import given

CLASSIFIER = """
name: "classifier"
platform: "onnxruntime_onnx"
max_batch_size: 16
version_policy { all { } }
input [ { name: "INPUT" data_type: TYPE_FP32 dims: [ 5 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "labels.txt" } ]
instance_group [ { count: 2 kind: KIND_CPU } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 200 }
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
"""
SCALER = """
platform: "pytorch_libtorch"
max_batch_size: 8
input [
  { name: "INPUT__0" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "INPUT__1" data_type: TYPE_FP32 dims: [ 1 ] }
]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


class Scale(torch.nn.Module):
    def forward(self, value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return value * factor


class Served:
    """Where it serves, and what its models should compute."""

    def __init__(self, server: Any, layers: dict[str, Any]) -> None:
        self.server = server
        self.layers = layers

    def expected(self, version: str, batch: NDArray[Any]) -> NDArray[Any]:
        (first, bias), (second, other) = self.layers[version]
        return np.asarray(np.maximum(batch @ first + bias, 0) @ second + other)


@pytest.fixture(scope="module")
def served(sibling: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    models = sibling("onnx_models.py")
    repository = tmp_path_factory.mktemp("triton") / "models"
    write(repository / "classifier" / "config.pbtxt", CLASSIFIER)
    write(repository / "classifier" / "labels.txt", "cat\ndog\nferry\n")
    files = {version: repository / "classifier" / version / "model.onnx" for version in ("1", "3")}
    layers = {version: models.write_mlp(file, [5, 7, 3], seed=int(version)) for version, file in files.items()}
    models.write_mlp(repository / "bare" / "1" / "model.onnx", [4, 2])
    write(repository / "scaler" / "config.pbtxt", SCALER)
    write_torch(repository)
    with serving(repository.parent / "t", "--model-repository", str(repository)) as server:
        yield Served(server, layers)
        assert server.stop() == 0


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def write_torch(repository: Path) -> None:
    (repository / "scaler" / "1").mkdir()
    (repository / "exported" / "1").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Scale()).save(str(repository / "scaler" / "1" / "model.pt"))
    free = {0: torch.export.Dim("batch")}
    program = torch.export.export(Scale(), (torch.zeros(2, 3), torch.zeros(2, 1)), dynamic_shapes=(free, free))
    torch.export.save(program, repository / "exported" / "1" / "model.pt2")


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with triton.InferenceServerClient(served.server.http_address) as client:
        yield client


BATCH = np.random.default_rng(1).random((3, 5), np.float32)


@pytest.mark.parametrize("version", ["1", "3"])
def test_each_version_computes_its_own(served: Served, client: Any, version: str) -> None:
    made = client.infer("classifier", [given(triton, "INPUT", BATCH)], model_version=version)
    np.testing.assert_allclose(made.as_numpy("OUTPUT"), served.expected(version, BATCH), rtol=1e-5)
    assert made.get_response()["model_version"] == version


def test_the_latest_version_is_meant_without_one(served: Served, client: Any) -> None:
    made = client.infer("classifier", [given(triton, "INPUT", BATCH)])
    np.testing.assert_allclose(made.as_numpy("OUTPUT"), served.expected("3", BATCH), rtol=1e-5)


def test_many_clients_share_batches_and_get_their_own(served: Served) -> None:
    address = served.server.http_address
    rows = np.random.default_rng(2).random((64, 1, 5), np.float32)
    with triton.InferenceServerClient(address, concurrency=16) as client:
        pending = [client.async_infer("classifier", [given(triton, "INPUT", row)]) for row in rows]
        made = [each.get_result(timeout=30).as_numpy("OUTPUT") for each in pending]
    expected = [served.expected("3", row) for row in rows]
    np.testing.assert_allclose(np.array(made), np.array(expected), rtol=1e-4)


def test_grpc_computes_the_same(served: Served) -> None:
    with triton_grpc.InferenceServerClient(served.server.grpc_address) as client:
        made = client.infer("classifier", [given(triton_grpc, "INPUT", BATCH)], client_timeout=30)
    np.testing.assert_allclose(made.as_numpy("OUTPUT"), served.expected("3", BATCH), rtol=1e-5)


def test_classes_have_their_labels(served: Served, client: Any) -> None:
    wanted = [triton.InferRequestedOutput("OUTPUT", class_count=1)]
    made = client.infer("classifier", [given(triton, "INPUT", BATCH[:1])], outputs=wanted).as_numpy("OUTPUT")
    index = int(served.expected("3", BATCH[:1]).argmax())
    value, place, label = made.ravel()[0].decode().split(":")
    assert (int(place), label) == (index, ["cat", "dog", "ferry"][index])
    assert float(value) == pytest.approx(float(served.expected("3", BATCH[:1]).max()), rel=1e-4)


def test_a_model_without_a_config_is_completed_from_its_file(served: Served, client: Any) -> None:
    config = client.get_model_config("bare")
    assert (config["backend"], config["platform"]) == ("onnxruntime", "onnxruntime_onnx")
    assert (config["max_batch_size"], "dynamic_batching" in config) == (4, True)
    assert [(each["name"], each["data_type"], each["dims"]) for each in config["input"]] == [
        ("INPUT", "TYPE_FP32", [4])
    ]
    made = client.infer("bare", [given(triton, "INPUT", np.ones((2, 4), np.float32))])
    assert made.as_numpy("OUTPUT").shape == (2, 2)


@pytest.mark.parametrize(("model", "names"), [("scaler", ("INPUT__0", "INPUT__1")), ("exported", ("value", "factor"))])
def test_pytorch_models(client: Any, model: str, names: tuple[str, str]) -> None:
    tensors = np.array([[1, 2, 3]], np.float32), np.array([[2]], np.float32)
    made = client.infer(model, [given(triton, name, tensor) for name, tensor in zip(names, tensors, strict=True)])
    assert made.as_numpy("OUTPUT__0").tolist() == [[2, 4, 6]]


def test_statistics_count_each_version_apart(served: Served, client: Any) -> None:
    before = client.get_inference_statistics("classifier", "1")["model_stats"][0]["inference_count"]
    client.infer("classifier", [given(triton, "INPUT", BATCH)], model_version="1")
    after = client.get_inference_statistics("classifier", "1")["model_stats"][0]["inference_count"]
    assert after - before == len(BATCH)


def test_a_wrong_shape_is_the_clients_fault(served: Served) -> None:
    body = {"inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
    answer = httpx.post(f"{served.server.url}/v2/models/classifier/infer", content=json.dumps(body))
    assert answer.status_code == 400
    assert "INPUT" in answer.json()["error"]
