"""Dynamo's own frontend, with its router of cached prefixes, before a worker of ours: where ai-dynamo is installed."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from charonia.bench.server_process import free_ports

if not find_spec("dynamo") or not find_spec("dynamo._core"):
    pytest.skip("ai-dynamo is not installed", allow_module_level=True)

DEMO = Path(__file__).parents[3] / "examples" / "model_repository" / "demo" / "1"
WORKER = "from cyclopts import App; from charonia.extras.dynamo.command import dynamo; App(default_command=dynamo)()"
HOSTS = ("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST", "DYN_TCP_RESPONSE_STREAM_HOST")


class Fleet(NamedTuple):
    url: str
    metrics: str
    worker: subprocess.Popen[bytes]

    def ask(self, **fields: Any) -> dict[str, Any]:
        body = {"model": "demo", "prompt": "def fibonacci(n):", "temperature": 0, "max_tokens": 8} | fields
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        return {"status": answer.status_code, **answer.json()}

    def count(self, series: str) -> float:
        lines = httpx.get(self.metrics, timeout=60).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series))


def low_port() -> int:
    """A free port that fits into 15 bits: the runtime takes no other for its metrics."""
    for port in range(20_000, 32_000, 7):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no port is free")


def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        try:
            if holds():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError("it did not come")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("dynamo")
    [port] = free_ports(1)
    system = low_port()
    environment = os.environ | dict.fromkeys(HOSTS, "127.0.0.1") | {"DYN_FILE_KV": str(directory / "discovery")}
    shared = ["--discovery-backend", "file"]
    commands = (
        ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", "kv"],
        ["-c", WORKER, str(DEMO), "--served-model-name", "demo", "--threads", "1", "--max-model-len", "1024"],
    )
    with (directory / "log").open("wb") as log:
        started = [
            subprocess.Popen(
                [sys.executable, *command, *shared],
                env=environment | {"DYN_SYSTEM_PORT": str(system) if "-c" in command else "-1"},
                stdout=log,
                stderr=log,
            )
            for command in commands
        ]
        running = Fleet(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{system}/metrics", started[1])
        try:
            eventually(lambda: httpx.get(f"{running.url}/v1/models").json()["data"] != [])
            eventually(lambda: running.ask()["status"] == 200)
            yield running
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(60)


def test_the_frontend_has_our_tokens(fleet: Fleet) -> None:
    whole = fleet.ask(max_tokens=24)
    text = whole["choices"][0]["text"]
    assert "isinstance" in text
    assert fleet.ask(max_tokens=24, stop=["isinstance"])["choices"][0]["text"] == text.partition("isinstance")[0]
    assert fleet.ask(max_tokens=5000)["status"] == 400
    assert fleet.ask(n=2)["status"] == 400
    assert fleet.ask(logprobs=1)["choices"][0]["logprobs"]["token_logprobs"][0] < 0


def test_the_router_hears_what_is_cached(fleet: Fleet) -> None:
    prompt = "".join(f"def f{number}(a, b):\n    return a * {number} + b\n" for number in range(12)) + "def g(x):"
    fleet.ask(prompt=prompt)
    again = fleet.ask(prompt=prompt)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == (again["prompt_tokens"] - 1) // 16 * 16
    eventually(lambda: fleet.count("dynamo_component_kv_publisher_zmq_events_total") > 0)


def stream(fleet: Fleet, read: Callable[[Iterator[str]], None]) -> None:
    body = {"model": "demo", "prompt": "x =", "max_tokens": 900, "stream": True, "ignore_eos": True, "min_tokens": 900}
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=60) as answer:
        read(answer.iter_lines())


def test_who_leaves_is_cancelled(fleet: Fleet) -> None:
    before = fleet.count('charonia_requests_total{model="demo",outcome="cancelled"')
    stream(fleet, lambda lines: next(lines) and None)
    eventually(lambda: fleet.count('charonia_requests_total{model="demo",outcome="cancelled"') == before + 1)
    eventually(lambda: fleet.count("vllm:num_requests_running") == 0)


def test_a_worker_that_ends_answers_first(fleet: Fleet) -> None:
    def read(lines: Iterator[str]) -> None:
        assert next(lines).startswith("data: {")
        fleet.worker.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        assert '"finish_reason":"length"' in rest[-2]
        assert rest[-1] == "data: [DONE]"

    stream(fleet, read)
    assert fleet.worker.wait(60) == 0
