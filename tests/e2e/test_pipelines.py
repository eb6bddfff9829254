"""Python models, classic models and language models in one graph: over HTTP, SSE and gRPC, loaded and unloaded."""

import json
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton

from .models import FAKE, write_model
from .serving import Server, serving

DOUBLE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_INT32", "dims": [-1]})
        config.add_output({"name": "Y", "data_type": "TYPE_INT32", "dims": [-1]})
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        return config

    def execute(self, requests):
        found = [pb_utils.get_input_tensor_by_name(r, "X").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", 2 * each)]) for each in found]
"""
MARK = """
import os

import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily("texts_marked", "Texts that were marked", pb_utils.MetricFamily.COUNTER)
        self.family, self.marked = family, family.Metric(labels={"model": args["model_name"]})

    def is_ready(self):
        return not os.path.exists(os.path.join(pb_utils.get_model_dir(), "closed"))

    def execute(self, requests):
        self.marked.increment(len(requests))
        answers = []
        for r in requests:
            text = pb_utils.get_input_tensor_by_name(r, "TEXT").as_numpy()
            marked = np.array([b"<" + item + b">" for item in text.ravel()], dtype=object).reshape(text.shape)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("MARKED", marked)]))
        return answers
"""
ASKS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            asked = pb_utils.InferenceRequest(model_name="marked", requested_output_names=["text_output"],
                inputs=[pb_utils.get_input_tensor_by_name(r, "text_input"),
                        pb_utils.Tensor("stream", np.array([True]))], parameters={"max_tokens": 5})
            for part in asked.exec(decoupled=True):
                if part.has_error():
                    sender.send(pb_utils.InferenceResponse(error=part.error()))
                elif part.output_tensors():
                    sender.send(pb_utils.InferenceResponse(part.output_tensors()))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SAYS = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for r in requests:
            turns = json.loads(pb_utils.get_input_tensor_by_name(r, "messages").as_numpy().item())
            warmth = pb_utils.get_input_tensor_by_name(r, "temperature")
            said = f"{len(turns)} {turns[-1]['content']} {None if warmth is None else warmth.as_numpy().item()}"
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([said], object))]))
        return answers
"""
CONFIGS = {
    "echo": """
backend: "identity"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
""",
    "mark": """
backend: "python"
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "MARKED" data_type: TYPE_STRING dims: [ -1 ] } ]
""",
    "twice": """
platform: "ensemble"
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "echo" model_version: -1
    input_map { key: "INPUT0" value: "IN" } output_map { key: "OUTPUT0" value: "same" } },
  { model_name: "double" model_version: -1
    input_map { key: "X" value: "same" } output_map { key: "Y" value: "OUT" } }
] }
""",
    "both": """
platform: "ensemble"
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "TWICE" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "LEFT" data_type: TYPE_INT32 dims: [ -1 ] },
         { name: "RIGHT" data_type: TYPE_INT32 dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "double" model_version: -1
    input_map { key: "X" value: "IN" } output_map { key: "Y" value: "TWICE" } },
  { model_name: "double" model_version: -1
    input_map { key: "X" value: "TWICE" } output_map { key: "Y" value: "LEFT" } },
  { model_name: "double" model_version: -1
    input_map { key: "X" value: "TWICE" } output_map { key: "Y" value: "RIGHT" } }
] }
""",
    "marked": """
platform: "ensemble"
parameters { key: "openai" value: { string_value: "chat" } }
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
        { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "fake" model_version: -1
    input_map { key: "text_input" value: "text_input" } input_map { key: "stream" value: "stream" }
    input_map { key: "sampling_parameters" value: "sampling_parameters" }
    output_map { key: "text_output" value: "text" } },
  { model_name: "mark" model_version: -1
    input_map { key: "TEXT" value: "text" } output_map { key: "MARKED" value: "text_output" } }
] }
""",
    "says": """
backend: "python"
parameters { key: "openai" value: { string_value: "chat" } }
input [ { name: "messages" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "temperature" data_type: TYPE_FP32 dims: [ 1 ] optional: true } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
""",
    "asks": """
backend: "python"
parameters { key: "openai" value: { string_value: "completions" } }
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
""",
}
CONFIGS["narrow"] = CONFIGS["marked"].replace("ensemble_scheduling {", "ensemble_scheduling { max_inflight_requests: 1")
SOURCES = {"double": DOUBLE, "mark": MARK, "asks": ASKS, "says": SAYS}
SCALE = """
import factors

import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_INT32", "dims": [-1]})
        config.add_output({"name": "Y", "data_type": "TYPE_INT32", "dims": [-1]})
        return config

    def initialize(self, args):
        self.factor = factors.read(pb_utils.get_model_dir())

    def execute(self, requests):
        found = [pb_utils.get_input_tensor_by_name(r, "X").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", self.factor * each)]) for each in found]
"""


def write_backends(directory: Path) -> Path:
    """The backend `scale`, and one that has a name of ours."""
    for name in ("scale", "identity"):
        (directory / name).mkdir(parents=True)
        (directory / name / "model.py").write_text(SCALE)
    (directory / "scale" / "factors.py").write_text("def read(path): return int(open(path + '/factor').read())")
    return directory


def write_repository(directory: Path, tokenizer_only: Path) -> Path:
    (directory / "scaled" / "1").mkdir(parents=True)
    (directory / "scaled" / "config.pbtxt").write_text('backend: "scale"')
    (directory / "scaled" / "1" / "factor").write_text("7")
    for name in {*CONFIGS, *SOURCES}:
        (directory / name / "1").mkdir(parents=True)
        if name in CONFIGS:
            (directory / name / "config.pbtxt").write_text(CONFIGS[name])
        if name in SOURCES:
            (directory / name / "1" / "model.py").write_text(SOURCES[name])
    write_model(directory, "fake", tokenizer_only, **FAKE, fake_step_seconds=0.02)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tokenizer_only: Path) -> Path:
    return write_repository(tmp_path_factory.mktemp("pipelines") / "models", tokenizer_only)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Server]:
    flags = ("--backend-directory", str(write_backends(tmp_path_factory.mktemp("backends"))))
    with serving(tmp_path_factory.mktemp("p") / "t", "--model-repository", str(models), *flags) as running:
        yield running
        assert running.stop() == 0, running.said
        assert list(running.scratch.iterdir()) == []


def ints(name: str, *rows: list[int]) -> triton.InferInput:
    array = np.array(rows, np.int32)
    tensor = triton.InferInput(name, list(array.shape), "INT32")
    return tensor.set_data_from_numpy(array)


def stream(server: Server, model: str, **body: Any) -> list[str]:
    with httpx.stream("POST", f"{server.url}/v2/models/{model}/generate_stream", json=body, timeout=30) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: "))["text_output"] for line in lines]


def unmarked(parts: list[str]) -> str:
    """The text of a stream; tokens that came while a part was on its way share the next one."""
    assert all(part[0] + part[-1] == "<>" for part in parts)
    return "".join(part[1:-1] for part in parts)


def test_tensors_pass_a_classic_and_a_python_model(server: Server) -> None:
    with triton.InferenceServerClient(server.http_address) as client:
        result = client.infer("twice", [ints("IN", [1, 2], [3, 4])], request_id="7")
        assert result.as_numpy("OUT").tolist() == [[2, 4], [6, 8]]
        assert result.get_response()["id"] == "7"
        with pytest.raises(triton.InferenceServerException, match=r"expected 1 inputs but got 0"):
            client.infer("twice", [])
        config = client.get_model_config("twice")
        assert [step["model_name"] for step in config["ensemble_scheduling"]["step"]] == ["echo", "double"]
        assert client.get_model_config("double")["max_batch_size"] == 8
        for name in ("twice", "echo", "double"):
            [statistics] = client.get_inference_statistics(name)["model_stats"]
            assert statistics["inference_stats"]["success"]["count"] == 1, name
            assert statistics["inference_count"] == 2, name


def test_two_steps_wait_for_the_same_tensor(server: Server) -> None:
    with triton.InferenceServerClient(server.http_address) as client:
        for _ in range(3):
            result = client.infer("both", [ints("IN", [1, 2])])
            got = [result.as_numpy(name).tolist() for name in ("TWICE", "LEFT", "RIGHT")]
            assert got == [[[2, 4]], [[4, 8]], [[4, 8]]]


def test_a_backend_in_python_has_models_that_are_data(server: Server) -> None:
    with triton.InferenceServerClient(server.http_address) as client:
        tensor = triton.InferInput("X", [2], "INT32").set_data_from_numpy(np.array([1, 2], np.int32))
        assert client.infer("scaled", [tensor]).as_numpy("Y").tolist() == [7, 14]
        assert client.get_model_config("scaled")["backend"] == "scale"
        assert client.is_model_ready("echo")  # of our own identity


def test_tokens_stream_through_a_graph(server: Server) -> None:
    alone = stream(server, "fake", text_input="hello", max_tokens=6)
    parts = stream(server, "marked", text_input="hello", max_tokens=6)  # an absent `stream` means true here
    assert len(parts) > 1
    assert unmarked(parts) == "".join(alone)
    narrow = stream(server, "narrow", text_input="hello", max_tokens=6)
    assert unmarked(narrow) == "".join(alone)
    answer = httpx.post(f"{server.url}/v2/models/marked/generate", json={"text_input": "hello", "max_tokens": 6})
    assert answer.json()["text_output"] == f"<{''.join(alone)}>"
    lines = httpx.get(server.metrics_url).text.splitlines()
    assert "# TYPE texts_marked counter" in lines
    [count] = [float(line.rpartition(" ")[2]) for line in lines if line.startswith('texts_marked{model="mark"}')]
    assert count == len(parts) + len(narrow) + 1


def test_tokens_stream_over_grpc(server: Server) -> None:
    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        text = triton_grpc.InferInput("text_input", [1], "BYTES").set_data_from_numpy(np.array([b"hello"], object))
        wanted = triton_grpc.InferInput("stream", [1], "BOOL").set_data_from_numpy(np.array([True]))
        client.async_stream_infer(
            "marked", [text, wanted], parameters={"max_tokens": 3}, enable_empty_final_response=True
        )
        parts = []
        while True:
            result, error = arrived.get(timeout=30)
            assert error is None
            found = result.as_numpy("text_output")
            if found is not None:
                parts.append(found[0].decode())
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    assert len(parts) > 1
    assert unmarked(parts) == "".join(stream(server, "fake", text_input="hello", max_tokens=3))


def test_a_step_that_is_not_ready_makes_its_ensemble_unready(server: Server, models: Path) -> None:
    closed = models / "mark" / "1" / "closed"
    with (
        triton.InferenceServerClient(server.http_address) as http,
        triton_grpc.InferenceServerClient(server.grpc_address) as grpc,
    ):

        def ready() -> list[bool]:
            return [client.is_model_ready(name) for client in (http, grpc) for name in ("mark", "marked", "double")]

        assert ready() == [True] * 6
        closed.touch()
        assert ready() == [False, False, True] * 2
        assert http.is_server_ready()
        answer = httpx.get(f"{server.url}/v2/models/marked/ready")
        assert answer.json() == {"error": "Model 'mark' is not ready (user-defined check failed)."}
        closed.unlink()
        assert ready() == [True] * 6


def test_a_python_model_streams_what_an_ensemble_streams(server: Server) -> None:
    alone = stream(server, "fake", text_input="hello", max_tokens=5)
    parts = stream(server, "asks", text_input="hello")
    assert len(parts) > 1
    assert unmarked(parts) == "".join(alone)


def test_openais_client_talks_to_a_graph(server: Server) -> None:
    alone = "".join(stream(server, "fake", text_input="hello", max_tokens=5))
    turns: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    usage = {"include_usage": True}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=30, max_retries=0) as client:
        assert {"marked", "asks", "says"} <= {model.id for model in client.models.list()}
        chat = client.chat.completions.create(model="marked", messages=turns, max_tokens=5)
        assert chat.choices[0].message.content == f"<{alone}>"
        assert chat.choices[0].finish_reason == "length"
        *chunks, last = client.chat.completions.create(
            model="marked", messages=turns, max_tokens=5, stream=True, stream_options=usage
        )
        parts = [chunk.choices[0].delta.content for chunk in chunks]
        assert len(parts) > 3
        assert unmarked(list(filter(None, parts))) == alone
        assert chunks[-1].choices[0].finish_reason == "length"
        assert last.usage
        assert chat.usage
        assert last.usage.completion_tokens == chat.usage.completion_tokens == 5
        asked = client.completions.create(model="asks", prompt="hello", extra_body={"priority": 1})
        assert unmarked([asked.choices[0].text.replace("><", "")]) == alone
        assert asked.usage
        assert (asked.usage.completion_tokens, asked.usage.prompt_tokens) == (5, last.usage.prompt_tokens)
        said = client.chat.completions.create(model="says", messages=turns, temperature=0.5)
        assert said.choices[0].message.content == "2 hello 0.5"
        with pytest.raises(openai.BadRequestError, match="seed: model 'says' has no input of that name"):
            client.chat.completions.create(model="says", messages=turns, seed=1)
        with pytest.raises(openai.BadRequestError, match="'marked' serves chat, not completions"):
            client.completions.create(model="marked", prompt="hello")


def test_leaving_frees_what_the_graph_held(server: Server) -> None:
    for model in ("marked", "asks"):
        body = {"text_input": "hello", "max_tokens": 2000, "stream": True}
        with httpx.stream("POST", f"{server.url}/v2/models/{model}/generate_stream", json=body, timeout=30) as response:
            assert next(response.iter_lines()).startswith("data: ")
    turns: list[Any] = [{"role": "user", "content": "hello"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=30, max_retries=0) as client:
        begun = client.chat.completions.create(model="marked", messages=turns, max_tokens=2000, stream=True)
        next(iter(begun))
        begun.close()
    running = 'charonia_requests_running{model="fake"'

    def idle() -> bool:
        lines = httpx.get(server.metrics_url).text.splitlines()
        return all(float(line.rpartition(" ")[2]) == 0 for line in lines if line.startswith(running))

    server.until(idle)


def test_explicit_control_loads_what_an_ensemble_asks(
    serve: Callable[..., Any], tmp_path: Path, tokenizer_only: Path
) -> None:
    models = write_repository(tmp_path / "models", tokenizer_only)
    for name, step in (("ring", "gnir"), ("gnir", "ring")):
        (models / name / "1").mkdir(parents=True)
        (models / name / "config.pbtxt").write_text(CONFIGS["twice"].replace('"double"', f'"{step}"'))
    flags = ("--model-control-mode", "explicit", "--load-model", "twice")
    flags += ("--backend-directory", str(write_backends(tmp_path / "backends")))
    with (
        serve("--model-repository", str(models), *flags) as server,
        triton.InferenceServerClient(server.http_address) as client,
    ):

        def ready() -> list[str]:
            return sorted(each["name"] for each in client.get_model_repository_index() if each.get("state") == "READY")

        assert ready() == ["double", "echo", "twice"]
        client.unload_model("echo")
        server.until(lambda: not client.is_model_ready("twice"))
        client.load_model("twice")
        assert ready() == ["double", "echo", "twice"]
        client.unload_model("twice", unload_dependents=True)
        server.until(lambda: ready() == [])
        client.load_model("echo")
        client.load_model("twice")
        client.unload_model("twice")
        server.until(lambda: ready() == ["double", "echo"])
        client.load_model("twice")
        client.unload_model("twice", unload_dependents=True)
        server.until(lambda: ready() == ["echo"])
        client.unload_model("echo")
        with pytest.raises(
            triton.InferenceServerException, match="circular dependency between ensembles: ring -> gnir"
        ):
            client.load_model("ring")
        client.unload_model("ring", unload_dependents=True)
        server.until(lambda: ready() == [])
        files = {"file:1/model.py": DOUBLE.encode()}
        with pytest.raises(
            triton.InferenceServerException, match=r"'1/model\.py' of model 'x' is code, which is not taken"
        ):
            client.load_model("x", config="{}", files=files)
        files = {"file:1/other": DOUBLE.encode()}
        config = {"backend": "python", "default_model_filename": "other"}
        with pytest.raises(triton.InferenceServerException, match="'x' would be run as code, which is not taken from"):
            client.load_model("x", config=json.dumps(config), files=files)
        with pytest.raises(triton.InferenceServerException, match="'x' would be run as code, which is not taken from"):
            client.load_model("x", config=json.dumps({"backend": "scale"}), files=files)
        with pytest.raises(triton.InferenceServerException, match=r"unknown backend .no.; known are .* scale"):
            client.load_model("scaled", config=json.dumps({"backend": "no"}))
        config = {"backend": "python", "parameters": {"EXECUTION_ENV_PATH": {"string_value": "/tmp"}}}
        with pytest.raises(
            triton.InferenceServerException, match="'double' names a program to run, which is not taken"
        ):
            client.load_model("double", config=json.dumps(config))
        (models / "double" / "1" / "model.py").write_text("raise ValueError('broken')")
        with pytest.raises(triton.InferenceServerException, match="'twice' depends on 'double' which has no loaded"):
            client.load_model("twice")
        assert ready() == []
        (models / "double" / "1" / "model.py").write_text(DOUBLE)
        client.load_model("twice")
        one = CONFIGS["twice"].replace('model_name: "double"', 'model_name: "echo"')
        one = one.replace('key: "X"', 'key: "INPUT0"').replace('key: "Y"', 'key: "OUTPUT0"')
        (models / "twice" / "config.pbtxt").write_text(one)
        client.load_model("twice")
        server.until(lambda: ready() == ["double", "echo", "twice"])
