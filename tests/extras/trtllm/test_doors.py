"""What OpenAI's door asks for and our own engine cannot do reaches TensorRT-LLM, where the model has the means."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from charonia.api.app import build_app
from charonia.api.metadata import ServerInfo
from charonia.repository.gateway import InProcessGateway
from charonia.repository.model_source import ModelSource, checkpoint_source

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["é", 1.5]}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
PROMPTS = {TEXT: {"prompt": "w1"}, CHAT: {"messages": [{"role": "user", "content": "w1"}]}}


@pytest.fixture
def source(words: Path, tmp_path: Path) -> Callable[..., ModelSource]:
    """A model with an adapter `y` and constraints, or with neither."""

    def make(means: bool) -> ModelSource:
        (tmp_path / "y").mkdir()
        (tmp_path / "y" / "adapter_config.json").write_text('{"r": 8, "target_modules": ["q_proj"]}')
        parameters = {"lora_modules": json.dumps({"y": str(tmp_path / "y")}), "guided_decoding_backend": "xgrammar"}
        return checkpoint_source(str(words), ["m"], parameters if means else {}, backend="tensorrtllm")

    return make


async def ask(source: ModelSource, path: str, **asked: Any) -> httpx.Response:
    """The answer of a server with this model."""
    hub = InProcessGateway()
    await hub.lifecycle.load(source)
    try:
        transport = httpx.ASGITransport(build_app(hub, ServerInfo()))
        body = {"model": source.name, "max_tokens": 2, "temperature": 0} | PROMPTS[path] | asked
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post(path, json=body)
    finally:
        await hub.lifecycle.close()


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    ("asked", "field", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"response_format": FORMAT, "stream": True}, "json", SCHEMA),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "w.*"}, "regex", "w.*"),
        ({"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(SCHEMA)}, "json", SCHEMA),
    ],
)
async def test_guides_arrive(
    source: Callable[..., ModelSource], install: Callable[..., Any], path: str, asked: Any, field: str, value: Any
) -> None:
    package = install()
    response = await ask(source(means=True), path, **asked)
    assert response.status_code == 200, response.text
    _warm_up, call = package.made[0].calls
    constraint = getattr(call["sampling_params"].guided_decoding, field)
    assert (json.loads(constraint) if field == "json" else constraint) == value


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_adapters_arrive(
    source: Callable[..., ModelSource], install: Callable[..., Any], path: str, tmp_path: Path
) -> None:
    package = install()
    response = await ask(source(means=True), path, lora_name="y", response_format={"type": "text"}, n=2)
    assert response.status_code == 200, response.text
    _warm_up, *calls = package.made[0].calls
    assert len(calls) == 2
    for call in calls:
        assert call["lora_request"].given == {"lora_name": "y", "lora_int_id": 1, "lora_path": f"{tmp_path}/y"}
        assert call["sampling_params"].guided_decoding is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_decoding_guide_type": "json"}, "guided_decoding_guide_type"),
        ({"lora_name": "y"}, "lora_name"),
    ],
)
async def test_a_model_without_the_means_says_so(
    source: Callable[..., ModelSource], install: Callable[..., Any], asked: Any, param: str, stream: bool
) -> None:
    install()
    response = await ask(source(means=False), CHAT, stream=stream, **asked)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"] == f"parameter '{param}' is not supported by this model"
