"""Sessions that retain their cache, over HTTP: what others fill does not push it out, until it is released."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from charonia.bench.agents import live

FLAGS = ["--executor", "fake", "--fake-vocab-size", "384", "--served-model-name", "demo", "--kv-cache-blocks", "64"]


def ask(server: Any, first: int, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    """Complete a prompt of 320 token ids, 20 blocks, which begin with `first`."""
    prompt = [first, *[1 + at % 300 for at in range(319)]]
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "ignore_eos": True} | fields
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()


def cached(answer: httpx.Response) -> int:
    details = answer.json()["usage"]["prompt_tokens_details"]
    return int((details or {}).get("cached_tokens", 0))


def metric(server: Any, name: str) -> float:
    values = re.findall(rf"^{name}{{[^}}]*}} (\S+)$", httpx.get(server.metrics_url).text, re.MULTILINE)
    assert values, name
    return sum(map(float, values))


@pytest.mark.parametrize("frontends", ["1", "2"])
def test_a_session_finds_what_it_retained_until_it_is_released(
    serve: Any, tokenizer_only: Path, frontends: str
) -> None:
    budget = str(32 << 16)  # half of the blocks
    flags = ["--kv-cache-retention-bytes", budget, "--frontends", frontends, "--trust-gateway-headers", "x-session-id"]
    with serve(str(tokenizer_only), *FLAGS, *flags) as server:
        whole = [{"start": 0, "priority": 80, "duration": 600}]
        ask(server, 1, retention_directives=whole, headers={"x-session-id": "run-1"})
        ask(server, 2)
        for other in range(10, 16):
            ask(server, other)
        assert metric(server, "charonia_retained_blocks") == 20
        assert cached(ask(server, 2)) == 0
        answer = ask(server, 1, retention_scope="run-1", kv_cache_retention_config={"decode_retention_priority": 50})
        assert cached(answer) == 304
        assert "x-charonia-warning" not in answer.headers
        release = {"model": "demo", "retention_scope": "run-1"}
        answer = httpx.post(f"{server.url}/v1/release_retention", json=release)
        assert answer.json() == {"released": "run-1"}
        server.until(lambda: metric(server, "charonia_retained_blocks") == 0)
        for other in range(20, 24):
            ask(server, other)
        assert cached(ask(server, 1)) == 0
        for body, field in (({"model": "demo"}, "retention_scope"), ({"retention_scope": "a"}, "model")):
            answer = httpx.post(f"{server.url}/v1/release_retention", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        missing = {"model": "none", "retention_scope": "a"}
        assert httpx.post(f"{server.url}/v1/release_retention", json=missing).status_code == 404


def test_a_server_without_a_budget_says_that_it_retains_nothing(serve: Any, tokenizer_only: Path) -> None:
    with serve(str(tokenizer_only), *FLAGS) as server:
        answer = ask(server, 1, retention_scope="run-1")
        assert "--kv-cache-retention-bytes" in answer.headers["x-charonia-warning"]
        body = {"text_input": "a", "retention_scope": "run-1", "kv_cache_retention_config": "{", "max_tokens": 1}
        wrong = httpx.post(f"{server.url}/v2/models/demo/generate", json=body)
        assert wrong.status_code == 400
        assert "kv_cache_retention_config is not JSON" in wrong.text


def test_agents_ask_a_server_and_find_what_they_said(
    serve: Any, tokenizer_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--kv-cache-retention-bytes", str(60 << 16), "--fake-max-model-len", "4096"]
    with serve(str(tokenizer_only), *FLAGS[:-1], "256", *flags) as server:
        live(server.url, sessions=2, conversations=2, turns=3, scale=500, pauses=0.0, retain=60.0, json_output=True)
        figures = json.loads(capsys.readouterr().out)
        assert figures["turns"] == 12
        assert 0.3 < figures["hit_rate"] < 1
        server.until(lambda: metric(server, "charonia_retained_scopes") == 1)  # what scopes have in common
    with pytest.raises(SystemExit):
        live("http://127.0.0.1:1", model="none")
