"""The example `ask`: what the READMEs promise of its pages, its encoders, and its answers over every protocol."""

import json
import queue
import re
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton_grpc

from .serving import Server

SIZE = 3e6
QUESTION = "How do I turn a JSON string into Python objects?"
DRAWN = {"max_tokens": 24, "seed": 5, "temperature": 0.8}


@pytest.fixture(scope="module")
def examples(root: Path) -> Path:
    return root / "examples"


@pytest.fixture(scope="module")
def held_out(examples: Path) -> dict[str, dict[str, str]]:
    return dict(json.loads((examples / "training/held_out_questions.json").read_text()))


@pytest.fixture(scope="module")
def code(examples: Path) -> dict[str, ModuleType]:
    """The modules beside pipeline.py."""
    made = {}
    for name in ("passages", "citations"):
        spec = spec_from_file_location(f"ask_{name}", examples / f"model_repository/ask/1/{name}.py")
        assert spec is not None
        assert spec.loader is not None
        made[name] = module_from_spec(spec)
        spec.loader.exec_module(made[name])
    return made


def ask(demo: Server, question: str, **settings: Any) -> dict[str, Any]:
    body = {"text_input": question, **settings}
    answer = httpx.post(f"{demo.url}/v2/models/ask/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_the_encoders_are_small(examples: Path) -> None:
    for name in ("embedder", "reranker"):
        files = [file for file in (examples / "model_repository" / name).rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) < SIZE, name


def test_passages_and_questions_are_told_apart(
    examples: Path, code: dict[str, ModuleType], held_out: dict[str, dict[str, str]]
) -> None:
    passages = code["passages"].read_passages(examples / "model_repository/ask/1")
    titles = {passage.title for passage in passages}
    assert len(passages) == len(titles) == len({passage.body for passage in passages}) >= 80
    assert all(len(passage.body.split()) > 15 for passage in passages)
    trained = json.loads((examples / "model_repository/ask/1/questions.json").read_text())
    words = [set(re.findall(r"\w+", question.lower())) for asked in trained.values() for question in asked]
    assert set(trained) == titles
    for asked in held_out.values():
        for question, title in asked.items():
            own = set(re.findall(r"\w+", question.lower()))
            assert title in titles
            assert max(len(own & word) / len(own | word) for word in words) <= 0.6, question


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_citations_are_of_sources(code: dict[str, ModuleType], size: int) -> None:
    citations = code["citations"].Citations(["one", "two"])
    said = "As [2] says, x[3] = y [3], [0]\n[1] and [17"
    shown = "".join(citations.add(said[start : start + size]) for start in range(0, len(said), size))
    assert shown + citations.end() == "As [2] says, x[3] = y,\n[1] and [17\n\n[1] one\n[2] two"


@pytest.mark.parametrize(("asked", "least"), [(2, 2), pytest.param(10, 8, marks=pytest.mark.proof)])
def test_the_right_passage_comes_first(
    demo: Server, held_out: dict[str, dict[str, str]], asked: int, least: int
) -> None:
    """Of the first of the questions, which have one right answer each."""
    assert len(held_out["committed"]) == 10
    right = 0
    for question, title in islice(held_out["committed"].items(), asked):
        answer = ask(demo, question, max_tokens=4)
        text, sources = answer["text_output"], answer["sources"]
        cited = [int(number) for number in re.findall(r"\s\[(\d+)\]", text)]
        listed = re.findall(r"^\[(\d+)\] (.*)$", text, re.MULTILINE)
        assert 1 in cited
        assert listed == [(str(number), sources[number - 1]) for number in sorted(set(cited))]
        assert answer["scores"] == sorted(answer["scores"], reverse=True)
        right += sources[0].startswith(f"{title} (")
    assert right >= least


def test_every_protocol_streams_the_same_text(demo: Server) -> None:
    whole = ask(demo, QUESTION, **DRAWN)
    assert ask(demo, QUESTION, **{**DRAWN, "seed": 6})["text_output"] != whole["text_output"]
    body = {"text_input": QUESTION, **DRAWN}
    with httpx.stream("POST", f"{demo.url}/v2/models/ask/generate_stream", json=body, timeout=60) as response:
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    assert len(events) > 1
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    assert events[-1]["sources"] == whole["sources"]
    assert over_grpc(demo) == whole["text_output"]
    client = openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none")
    chunks = list(client.chat.completions.create(**chat(QUESTION), stream=True, **DRAWN))
    assert len(chunks) > 1
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole["text_output"]
    completion = client.chat.completions.create(**chat(QUESTION), **DRAWN)
    assert completion.choices[0].message.content == whole["text_output"]
    assert completion.usage is not None
    assert 0 < completion.usage.completion_tokens <= DRAWN["max_tokens"]


def chat(question: str) -> dict[str, Any]:
    return {"model": "ask", "messages": [{"role": "user", "content": question}]}


def over_grpc(demo: Server) -> str:
    inputs = [triton_grpc.InferInput("text_input", [1], "BYTES"), triton_grpc.InferInput("stream", [1], "BOOL")]
    inputs[0].set_data_from_numpy(np.array([QUESTION.encode()], np.object_))
    inputs[1].set_data_from_numpy(np.array([True]))
    heard: queue.Queue[tuple[Any, Any]] = queue.Queue()
    said = b""
    with triton_grpc.InferenceServerClient(demo.grpc_address) as client:
        client.start_stream(lambda result, error: heard.put((result, error)))
        client.async_stream_infer("ask", inputs, parameters=DRAWN, enable_empty_final_response=True)
        while True:
            result, error = heard.get(timeout=60)
            assert error is None
            if result.get_response().outputs:
                said += result.as_numpy("text_output").item()
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    return said.decode()


def test_leaving_ends_what_the_demo_model_writes(demo: Server) -> None:
    body = {"text_input": QUESTION, "max_tokens": 700, "ignore_eos": True}
    cancelled = 'requests_total{model="demo".*outcome="cancelled"'

    def metric(name: str) -> float:
        found = re.search(rf"^charonia_{name}.*\}} (\S+)$", httpx.get(demo.metrics_url).text, re.MULTILINE)
        return float(found[1]) if found else 0

    before = metric(cancelled)
    with httpx.stream("POST", f"{demo.url}/v2/models/ask/generate_stream", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)]
    demo.until(lambda: metric(cancelled) == before + 1)
    demo.until(lambda: metric('requests_running{model="demo"') == 0)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"text_input": "  "}, "text_input is empty"),
        ({"text_input": QUESTION, "sampling_parameters": "[1]"}, "sampling_parameters"),
        ({"text_input": QUESTION, "max_tokens": -1}, "max_tokens"),
    ],
)
def test_what_is_wrong_is_named(demo: Server, body: dict[str, Any], field: str) -> None:
    answer = httpx.post(f"{demo.url}/v2/models/ask/generate", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert field in answer.json()["error"]
