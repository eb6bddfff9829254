"""Adapters over a model that computes: loaded while it serves, asked for by every protocol, together and in turn."""

import queue
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton

from .serving import Server
from .tensors import given

PROMPT = "def fibonacci"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
NAMES = ("a", "b", "c")


def post(server: Server, path: str, status: int = 200, **body: Any) -> httpx.Response:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == status, response.text
    return response


def complete(server: Server, model: str, **body: Any) -> str:
    answer = post(server, "/v1/completions", model=model, prompt=PROMPT, **GREEDY | body).json()
    text: str = answer["choices"][0]["text"]
    return text


def ask_grpc(server: Server, **parameters: Any) -> str:
    heard: queue.Queue[tuple[Any, Any]] = queue.Queue()
    inputs = [given(triton, "text_input", np.array([PROMPT.encode()], np.object_))]
    with triton.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: heard.put((result, error)))
        client.async_stream_infer("tiny", inputs, parameters=parameters)
        result, error = heard.get(timeout=60)
        assert error is None
        text: str = result.as_numpy("text_output")[0].decode()
        return text


@pytest.fixture
def adapted(server: Server) -> Iterator[Server]:
    """The server with all three adapters, of which it has room for two."""
    for name in NAMES:
        loaded = post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=name, base_model_name="tiny")
        assert loaded.text == f"Success: LoRA adapter '{name}' added successfully."
    yield server
    for name in NAMES:
        post(server, "/v1/unload_lora_adapter", lora_name=name)
    assert not {each["id"] for each in httpx.get(f"{server.url}/v1/models").json()["data"]} & {*NAMES}
    post(server, "/v1/completions", 404, model="a", prompt=PROMPT)


def test_every_protocol_asks_for_an_adapter_and_gets_its_text(adapted: Server) -> None:
    texts = {name: complete(adapted, name) for name in ("tiny", *NAMES)}
    assert len(set(texts.values())) == 4
    assert complete(adapted, "tiny:b") == complete(adapted, "tiny", lora_name="b") == texts["b"]
    generated = post(adapted, "/v2/models/tiny/generate", text_input=PROMPT, lora_name="b", **GREEDY).json()
    assert generated["text_output"] == texts["b"]
    assert ask_grpc(adapted, lora_name="b", **GREEDY) == texts["b"]
    chat = {"messages": [{"role": "user", "content": "hi"}], **GREEDY}
    answer = post(adapted, "/v1/chat/completions", model="c", **chat).json()
    assert answer["model"] == "c"
    assert "model=tiny version=1 adapter=c" in adapted.said
    listed = {each["id"]: each for each in httpx.get(f"{adapted.url}/v1/models").json()["data"]}
    assert (listed["a"]["parent"], listed["a"]["root"][-2:]) == ("tiny", "/a")
    refused = post(adapted, "/v1/completions", 400, model="a", lora_name="b", prompt=PROMPT).json()["error"]
    assert refused["param"] == "lora_name"


def test_requests_with_different_adapters_run_together_as_they_would_alone(adapted: Server) -> None:
    alone = {name: complete(adapted, name) for name in ("tiny", *NAMES)}
    asked = ["tiny", *NAMES] * 4
    with ThreadPoolExecutor(len(asked)) as threads:
        texts = list(threads.map(lambda name: complete(adapted, name), asked))
    assert texts == [alone[name] for name in asked]
    shown = httpx.get(adapted.metrics_url).text
    metrics = {line.split("{")[0]: line for line in shown.splitlines() if 'model="tiny"' in line}
    assert metrics["charonia_adapters"].endswith(" 3")
    assert int(metrics["charonia_adapter_evictions_total"].split()[-1]) > 0
    assert int(metrics["charonia_adapter_loads_total"].split()[-1]) > len(NAMES)
    assert 0 < int(metrics["charonia_adapters_held_bytes"].split()[-1]) <= 30_000
    counts = dict(re.findall(r'charonia_adapter_sequences_total\{adapter="(\w)",model="tiny".*\} (\d+)', shown))
    assert counts == dict.fromkeys(NAMES, "5"), "one alone, and four together"


def test_a_replaced_adapter_is_never_answered_from_what_the_old_one_cached(adapted: Server) -> None:
    before = complete(adapted, "a"), complete(adapted, "b")
    load = {"lora_name": "a", "base_model_name": "tiny"}
    post(adapted, "/v1/load_lora_adapter", 400, **load, lora_path="b")
    post(adapted, "/v1/load_lora_adapter", **load, lora_path="b", load_inplace=True)
    assert (complete(adapted, "a"), complete(adapted, "b")) == (before[1], before[1])
    post(adapted, "/v1/load_lora_adapter", **load, lora_path="a", load_inplace=True)
    assert (complete(adapted, "a"), complete(adapted, "b")) == before


def test_what_is_wrong_with_an_adapter_is_told_and_changes_nothing(adapted: Server, loras: Any) -> None:
    (loras / "broken").mkdir()
    for path, text in (("broken", "adapter_config.json"), ("../loras", "--lora-root"), ("/etc", "--lora-root")):
        error = post(adapted, "/v1/load_lora_adapter", 400, lora_name="new", lora_path=path).json()["error"]
        assert text in error["message"]
        assert error["param"] == "lora_path"
    post(adapted, "/v1/completions", 404, model="new", prompt=PROMPT)


def test_streams_go_on_while_another_adapter_is_loaded_and_unloaded(adapted: Server) -> None:
    alone, loads = complete(adapted, "a", max_tokens=120), 0
    with ThreadPoolExecutor(2) as threads:
        streams = [threads.submit(complete, adapted, "a", max_tokens=120) for _ in range(2)]
        while loads == 0 or not all(stream.done() for stream in streams):
            post(adapted, "/v1/load_lora_adapter", lora_name="another", lora_path="c")
            post(adapted, "/v1/unload_lora_adapter", lora_name="another")
            loads += 1
    assert [stream.result() for stream in streams] == [alone] * 2
    post(adapted, "/v1/unload_lora_adapter", 404, lora_name="another")
