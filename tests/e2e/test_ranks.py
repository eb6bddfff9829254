"""The demo model on several ranks, behind the same endpoints; and what is left of ranks that die: nothing."""

import json
import os
import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc

from charonia.bench.server_process import children

PROMPT = "def fibonacci(n):"
ASKED = {"text_input": PROMPT, "max_tokens": 12, "temperature": 0}
LONG = {"text_input": PROMPT, "max_tokens": 200, "ignore_eos": True}
SPLITS: dict[str, dict[str, int]] = {
    "whole": {},
    "across": {"tensor_parallel_size": 2},
    "along": {"pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("splits", [("across",), pytest.param(("across", "along"), marks=pytest.mark.proof)])
def test_ranks_behind_the_endpoints(serve: Any, root: Path, tmp_path: Path, splits: tuple[str, ...]) -> None:
    """As one rank, over two that share its layers, and over two stages, it says the same; then a rank dies, and then a
    core, and then the server."""
    with serve("--model-repository", str(repository(root, tmp_path / "split", splits))) as server:
        for model in splits:
            every_endpoint_says(server, model, generate(server, "whole"))
            assert scores(server, model) == pytest.approx(scores(server, "whole"), abs=1e-4)
        a_killed_rank_takes_its_model_away_for_a_while(server, splits)
        a_killed_core_takes_its_ranks_along(server)
        everybody = ranks(server)
        server.process.kill()
        server.process.wait()
        until_gone(everybody)


def repository(root: Path, directory: Path, splits: tuple[str, ...]) -> Path:
    """In float32, where one rank and several agree."""
    demo = {"model": root / "examples" / "model_repository" / "demo" / "1", "dtype": "float32", "kv_cache_blocks": 64}
    for name in ("whole", *splits):
        (directory / name / "1").mkdir(parents=True)
        lines = [f'name: "{name}"', 'backend: "charonia"']
        for key, value in {**demo, **SPLITS[name]}.items():
            lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
        (directory / name / "config.pbtxt").write_text("\n".join(lines))
    return directory


def generate(server: Any, model: str) -> str:
    answer = httpx.post(f"{server.url}/v2/models/{model}/generate", json=ASKED, timeout=60)
    return str(answer.json()["text_output"])


def scores(server: Any, model: str) -> list[float]:
    """What the model gives the prompt's tokens; the first one has none."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    first, *others = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    assert first is None
    return [float(each) for each in others]


def events(server: Any, model: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with httpx.stream("POST", f"{server.url}/v2/models/{model}/generate_stream", json=body, timeout=60) as response:
        for line in filter(None, response.iter_lines()):
            yield json.loads(line.removeprefix("data: "))


def every_endpoint_says(server: Any, model: str, text: str) -> None:
    assert generate(server, model) == text
    assert "".join(event["text_output"] for event in events(server, model, ASKED)) == text
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.json()["choices"][0]["text"] == text
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
        assert client.is_model_ready(model)


def a_killed_rank_takes_its_model_away_for_a_while(server: Any, splits: tuple[str, ...]) -> None:
    before, count = ranks(server), 2 * len(splits)
    assert len(before) == count
    streams = {model: events(server, model, LONG) for model in ("whole", *splits)}
    for stream in streams.values():
        next(stream)
    os.kill(max(before), signal.SIGKILL)
    with ThreadPoolExecutor() as threads:
        ends = dict(zip(streams, threads.map(last, streams.values()), strict=True))
    [lost] = [model for model, end in ends.items() if "error" in end]
    assert "died (exit code -9); it is being restarted" in ends[lost]["error"]
    server.until(lambda: server.status(f"/v2/models/{lost}/ready") == 200)
    assert generate(server, lost) == generate(server, "whole")
    now = ranks(server)
    assert (len(now), len(now & before)) == (count, count - 2)
    assert not [pid for pid in before - now if name(pid)]


def last(stream: Iterator[dict[str, Any]]) -> dict[str, Any]:
    *_, end = stream
    return end


def a_killed_core_takes_its_ranks_along(server: Any) -> None:
    core = next(core for core in server.cores() if children(core))
    its_own = set(children(core))
    os.kill(core, signal.SIGKILL)
    until_gone(its_own)


def ranks(server: Any) -> set[int]:
    pids = set[int]()
    for core in server.cores():
        with suppress(FileNotFoundError):  # it has just ended
            pids |= {pid for pid in children(core) if name(pid) == "charonia-rank"}
    return pids


def name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def until_gone(pids: set[int]) -> None:
    """They are somebody else's children by now: the kernel tells when they have ended."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended, _, _ = select.select([descriptor], [], [], 60)
            assert ended, f"rank {pid} still runs"
        finally:
            os.close(descriptor)
