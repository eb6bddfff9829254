"""Two replicas behind one name, and the loss of one of them."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

PROMPTS = ("def fibonacci(n):", "class Stack:")
MANNER = {"max_tokens": 120, "temperature": 0, "ignore_eos": True}


@contextmanager
def stream(server: Any, prompt: str) -> Iterator[Iterator[Any]]:
    """The events of a stream."""
    body = {"text_input": prompt} | MANNER
    with httpx.stream("POST", f"{server.url}/v2/models/demo/generate_stream", json=body, timeout=60) as response:
        yield (json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line)


def generate(server: Any, prompt: str) -> str:
    answer = httpx.post(f"{server.url}/v2/models/demo/generate", json={"text_input": prompt} | MANNER, timeout=60)
    text: str = answer.raise_for_status().json()["text_output"]
    return text


def metric(server: Any, name: str) -> float:
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", httpx.get(server.metrics_url).text, re.MULTILINE)
    assert found, name
    return float(found[1])


@pytest.mark.parametrize("computes", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_a_lost_replica_takes_only_its_own_streams(
    serve: Any, root: Path, tokenizer_only: Path, computes: bool
) -> None:
    flags = ["--served-model-name", "demo", "--data-parallel-size", "2", "--kv-cache-blocks", "512"]
    if computes:
        flags.insert(0, str(root / "examples" / "model_repository" / "demo" / "1"))
    else:
        flags += [str(tokenizer_only), "--executor", "fake", "--fake-vocab-size", "384", "--fake-step-seconds", "0.01"]
    with serve(*flags) as server, ExitStack() as stack:
        assert server.status("/v2/health/ready") == 200
        lost, kept = server.cores()
        streams = [stack.enter_context(stream(server, prompt)) for prompt in PROMPTS]
        texts = [next(events)["text_output"] for events in streams]
        os.kill(lost, signal.SIGKILL)
        ends = [list(events) for events in streams]
        broken = ["error" in events[-1] for events in ends]
        assert sorted(broken) == [False, True], server.said
        survivor, victim = broken.index(False), broken.index(True)
        assert re.search(r"core of replica \d died \(exit code -9\)", ends[victim][-1]["error"])
        whole = texts[survivor] + "".join(event["text_output"] for event in ends[survivor])
        assert server.status("/v2/models/demo/ready") == server.status("/v2/health/ready") == 200
        assert generate(server, PROMPTS[survivor]) == whole
        assert metric(server, "charonia_core_restarts_total") == 1
        assert kept in server.cores()
        assert lost not in server.cores()
        assert server.stop() == 0
        assert {"demo: replica 0: cache", "demo: replica 1: cache"} <= set(
            re.findall(r"demo: \w+ \d: cache", server.said)
        )
