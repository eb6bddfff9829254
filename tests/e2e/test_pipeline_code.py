"""Pipelines written in Python: tensors and text through models of every kind, streamed, abandoned, loaded anew."""

import json
import queue
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton

from .models import FAKE, write_config, write_model
from .serving import Server, serving

ECHO = """
backend: "identity"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""
SUM = """
backend: "pipeline"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "WORDS" data_type: TYPE_STRING dims: [ 1 ] } ]
parameters { key: "models" value { string_value: "echo" } }
"""
SUM_CODE = """
from . import words

async def run(request, lookup):
    echoed = await lookup("echo").infer({"INPUT0": request["X"]})
    total = echoed["OUTPUT0"].sum(axis=1, keepdims=True, dtype="int32")
    return {"SUM": total, "WORDS": [[words.SAYS] for _ in total]}
"""
GUIDE = """
model_transaction_policy { decoupled: true }
input [ { name: "question" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
parameters { key: "models" value { string_value: "echo, fake" } }
"""
GUIDE_CODE = """
from pathlib import Path

from charonia.ensembles import InvalidArgument, Lookup, NamedTensors

LEFT = Path(__file__).parents[3] / "left"

async def run(request: NamedTensors, lookup: Lookup):
    question = request.text("question")
    if "secret" in question:
        raise InvalidArgument("that is a secret")
    if "bug" in question:
        {}["a bug"]
    if "stranger" in question:
        lookup("stranger")
    echoed = await lookup("echo").infer({"INPUT0": [len(question)]})
    try:
        yield {"text_output": f"[{echoed.item('OUTPUT0')}] "}
        async for chunk in lookup("fake").stream({"text_input": question}):
            yield {"text_output": chunk["text_output"]}
    finally:
        with LEFT.open("a") as file:
            file.write(question + "\\n")
"""

CHAT = """
backend: "pipeline"
model_transaction_policy { decoupled: true }
input [ { name: "messages" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
parameters { key: "models" value { string_value: "fake" } }
parameters { key: "openai" value { string_value: "chat" } }
"""
CHAT_CODE = """
import json

async def run(request, lookup):
    said = json.loads(request.text("messages"))[-1]["content"]
    async for chunk in lookup("fake").stream({"text_input": said, "max_tokens": request.item("max_tokens", 4)}):
        yield chunk
"""


def documented(root: Path) -> tuple[str, str]:
    """The config and the code of the pipeline in the docs, of a language model that counts."""
    page = (root / "docs" / "pipelines.md").read_text()
    section = page[page.index("## Glue in Python") :]
    config, code = re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)[:2]
    return config.replace("demo", "fake"), code.replace("demo", "fake").replace('"max_tokens": 64', '"max_tokens": 4')


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tokenizer_only: Path, root: Path) -> Path:
    models = tmp_path_factory.mktemp("glue") / "models"
    write_config(models, "echo", ECHO)
    write_model(models, "fake", tokenizer_only, **FAKE, fake_step_seconds=0.02)
    summing = write_config(models, "sum", SUM)
    (summing / "pipeline.py").write_text(SUM_CODE)
    (summing / "words.py").write_text('SAYS = "the first"')
    (write_config(models, "guide", GUIDE) / "pipeline.py").write_text(GUIDE_CODE)
    (write_config(models, "chat", CHAT) / "pipeline.py").write_text(CHAT_CODE)
    config, code = documented(root)
    (write_config(models, "documented", config) / "pipeline.py").write_text(code)
    return models


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("p") / "t", "--model-repository", str(models)) as running:
        yield running
        assert running.stop() == 0, running.said


def stream(server: Server, model: str, **body: Any) -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{server.url}/v2/models/{model}/generate_stream", json=body, timeout=30) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_tensors_go_through_a_pipeline(server: Server) -> None:
    with triton.InferenceServerClient(server.http_address) as client:
        rows = np.array([[1, 2], [3, 4]], np.int32)
        result = client.infer("sum", [triton.InferInput("X", [2, 2], "INT32").set_data_from_numpy(rows)])
        assert result.as_numpy("SUM").tolist() == [[3], [7]]
        assert result.as_numpy("WORDS").tolist() == [[b"the first"]] * 2
        for name in ("sum", "echo"):
            [statistics] = client.get_inference_statistics(name)["model_stats"]
            assert statistics["inference_stats"]["success"]["count"] == 1, name
            assert statistics["inference_count"] == 2, name


def test_text_streams_through_a_pipeline(server: Server) -> None:
    alone = [part["text_output"] for part in stream(server, "fake", text_input="hello", max_tokens=6)]
    first, *parts = [part["text_output"] for part in stream(server, "guide", question="hello", max_tokens=6)]
    assert first == "[5] "
    assert len(parts) > 1
    assert "".join(parts) == "".join(alone)


def test_text_streams_over_grpc(server: Server) -> None:
    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        question = triton_grpc.InferInput("question", [1], "BYTES").set_data_from_numpy(np.array([b"hello"], object))
        asked = {"parameters": {"max_tokens": 3}, "request_id": "7", "enable_empty_final_response": True}
        client.async_stream_infer("guide", [question], **asked)
        parts: list[str] = []
        while True:
            result, error = arrived.get(timeout=30)
            assert error is None
            response = result.get_response()
            assert response.id == "7"
            if (found := result.as_numpy("text_output")) is not None:
                parts.append(found[0].decode())
            if response.parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    assert parts[0] == "[5] "
    alone = [part["text_output"] for part in stream(server, "fake", text_input="hello", max_tokens=3)]
    assert "".join(parts[1:]) == "".join(alone)


def test_a_pipeline_chats(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        messages: Any = [{"role": "user", "content": "hello"}]
        answer = client.chat.completions.create(model="chat", messages=messages, max_tokens=3)
        chunks = list(client.chat.completions.create(model="chat", messages=messages, max_tokens=3, stream=True))
    alone = [part["text_output"] for part in stream(server, "fake", text_input="hello", max_tokens=3)]
    assert answer.choices[0].message.content == "".join(alone)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "".join(alone)


def test_the_example_of_the_docs_does_what_they_say(server: Server) -> None:
    prompt = "Question: why?\nAnswer:"
    alone = [part["text_output"] for part in stream(server, "fake", text_input=prompt, max_tokens=4)]
    parts = [part["text_output"] for part in stream(server, "documented", question="why?")]
    assert "".join(parts) == "".join(alone)
    answer = httpx.post(f"{server.url}/v2/models/documented/generate", json={"question": " "})
    assert (answer.status_code, answer.json()["error"]) == (400, "there is no question")


@pytest.mark.parametrize(
    ("question", "status", "text"),
    [
        ("a secret", 400, "that is a secret"),
        ("a bug", 500, "pipeline 'guide' has failed (guide/1/pipeline.py:13): KeyError: 'a bug'"),
        ("a stranger", 500, "pipeline 'guide' asks model 'stranger', which its parameter 'models' does not name"),
        ("x", 400, "in pipeline 'guide', unknown parameter 'max_tokns'; did you mean 'max_tokens'?"),
    ],
)
def test_a_failure_has_its_status_and_its_place(server: Server, question: str, status: int, text: str) -> None:
    body = {"question": question, "max_tokns": 3}
    answer = httpx.post(f"{server.url}/v2/models/guide/generate", json=body)
    assert (answer.status_code, answer.json()["error"]) == (status, text)


def test_graphs_say_where_the_time_goes(server: Server) -> None:
    stream(server, "guide", question="hello", max_tokens=3)
    graph = httpx.get(f"{server.url}/v2/models/guide/graph?statistics=1").json()
    names = {node["id"]: node["model"] for node in graph["nodes"]}
    assert {(names[edge["source"]], names[edge["target"]]) for edge in graph["edges"]} == {
        ("guide", "echo"),
        ("guide", "fake"),
    }
    assert sum(node["times"]["share"] for node in graph["nodes"]) == pytest.approx(1)
    assert all(node["times"]["requests"] for node in graph["nodes"])
    command = [sys.executable, "-m", "charonia", "graph", "--url", server.url, "--statistics", "--model", "guide"]
    drawn = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert drawn.count("% of the time") == 2, drawn
    assert "guide · version 1<br/>pipeline · decoupled" in drawn


def test_leaving_ends_the_code_and_what_it_asked(server: Server, models: Path) -> None:
    body = {"question": "left early", "max_tokens": 100_000}
    with httpx.stream("POST", f"{server.url}/v2/models/guide/generate_stream", json=body, timeout=30) as response:
        next(response.iter_lines())
    running = 'charonia_requests_running{model="fake"'

    def idle() -> bool:
        lines = httpx.get(server.metrics_url).text.splitlines()
        return all(float(line.rpartition(" ")[2]) == 0 for line in lines if line.startswith(running))

    server.until(idle)
    left = models.parent / "left"
    server.until(lambda: left.exists() and "left early" in left.read_text())
