"""A server's life: full queues, lost cores, ports in use, and the way out."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from charonia.cli.frontend_servers import reachable_address

from .models import FAKE, write_config, write_model
from .tensors import given

FLAGS = ["--executor", "fake", "--fake-vocab-size", "384", "--served-model-name", "m"]
LONG = {"input_ids": [1], "max_tokens": 200}
LONGER = {"model": "m", "prompt": [1], "max_tokens": 200}
ENDLESS = {
    "inputs": [
        {"name": "GO", "datatype": "BOOL", "shape": [1], "data": [True]},
        {"name": "X", "datatype": "FP32", "shape": [1], "data": [1.0]},
    ]
}


@contextmanager
def stream(server: Any, model: str = "m", body: Any = LONG) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    url = f"{server.url}/v2/models/{model}/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        yield lines


def generate(server: Any, model: str = "m") -> int:
    body = {"input_ids": [1], "max_tokens": 2}
    return httpx.post(f"{server.url}/v2/models/{model}/generate", json=body, timeout=60).status_code


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/models/slow/generate", {"text_input": "x"}),
        ("/v2/models/slow/generate_stream", {"text_input": "x"}),
        ("/v1/completions", {"model": "slow", "prompt": "x"}),
        ("/v1/chat/completions", {"model": "slow", "messages": [{"role": "user", "content": "x"}], "stream": True}),
    ],
)
def test_a_full_queue_says_when_to_come_back(server: Any, path: str, body: Any) -> None:
    server.until(lambda: generate(server, "slow") == 200)  # whoever left before has left its place
    with stream(server, "slow") as lines:
        next(lines)
        waiting = threading.Thread(target=_one_that_waits, args=(server, done := threading.Event()))
        waiting.start()
        try:
            answer = _refusal(server, path, body)
        finally:
            done.set()
            waiting.join()
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert "1 requests are waiting already" in answer.text


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v2/models/slow/generate", {"text_input": "x", "n": 2}, "n"),
        ("/v1/completions", {"model": "slow", "prompt": "x", "n": 2}, "n"),
        ("/v1/completions", {"model": "slow", "prompt": ["x", "y"], "stream": True}, "prompt"),
    ],
)
def test_what_no_queue_has_room_for_is_not_told_to_come_back(server: Any, path: str, body: Any, field: str) -> None:
    answer = httpx.post(server.url + path, json=body, timeout=60)
    while answer.status_code == 429:  # requests of the test before are about to leave the queue
        time.sleep(0.05)
        answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 400
    assert f"{field}: " in answer.text
    assert "more than may wait: 1 (max_queued_requests)" in answer.text


def _one_that_waits(server: Any, done: threading.Event) -> None:
    """Take the only place in the queue, and leave it."""
    with socket.create_connection(server.address) as connection:
        body = json.dumps(LONG).encode()
        head = f"POST /v2/models/slow/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        done.wait(60)


def _refusal(server: Any, path: str, body: Any) -> httpx.Response:
    """Ask until the queue is full: those that find it empty are left to wait, and leave."""
    while True:
        try:
            answer = httpx.post(server.url + path, json=body, timeout=0.5)
        except httpx.TimeoutException:
            continue
        return answer


def test_unready_while_the_core_is_away(serve: Any, tokenizer_only: Path) -> None:
    with serve(str(tokenizer_only), *FLAGS) as server:
        assert server.status("/v2/models/m/ready") == 200
        [core] = server.cores()
        os.kill(core, signal.SIGSTOP)  # it does not turn any more, which is noticed after five seconds
        server.until(lambda: server.status("/v2/models/m/ready") == 400)
        assert server.status("/v2/health/ready") == 400
        assert server.status("/v2/health/live") == 200
        os.kill(core, signal.SIGCONT)
        server.until(lambda: server.status("/v2/health/ready") == 200)
        assert generate(server) == 200


@pytest.mark.parametrize("send", [os.kill, pytest.param(os.killpg, marks=pytest.mark.proof)])
def test_sigterm_lets_running_requests_finish(serve: Any, tokenizer_only: Path, send: Callable[..., None]) -> None:
    """To the frontend alone, as Docker does it, or to the whole group, as service managers do."""
    with serve(str(tokenizer_only), *FLAGS, "--fake-step-seconds", "0.01") as server:
        with stream(server, body=LONG | {"return_num_output_tokens": True}) as lines:
            first = next(lines)
            [core] = server.cores()
            os.kill(core, signal.SIGSTOP)  # or the stream might end before anybody looked at it
            send(server.process.pid, signal.SIGTERM)
            server.until(lambda: server.status("/v2/health/ready") == 503)
            assert httpx.get(f"{server.url}/v2/health/ready").json() == {"error": "Server exiting"}
            assert generate(server) == 503
            assert httpx.get(f"{server.url}/v2/health/ready").headers["retry-after"] == "1"
            os.kill(core, signal.SIGCONT)
            events = [json.loads(line.removeprefix("data: ")) for line in (first, *lines)]
        assert sum(event["num_output_tokens"] for event in events) == LONG["max_tokens"]
        assert server.process.wait(60) == 0
        assert_nothing_left(server, [core])


def test_a_second_signal_forces(serve: Any, tokenizer_only: Path) -> None:
    """Whatever streams: a response of HTTP, or gRPC's."""
    with (
        serve(str(tokenizer_only), *FLAGS, "--fake-step-seconds", "0.2") as server,
        triton.InferenceServerClient(server.grpc_address) as client,
        stream(server) as lines,
    ):
        next(lines)
        heard = stream_over_grpc(client)
        heard.get(timeout=60)
        cores = server.cores()
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: server.status("/v2/health/ready") == 503)
        assert server.stop(signal.SIGINT) == 0
        assert list(lines)[-1] == 'data: {"error":"Server exiting"}'
        assert "Traceback" not in server.said
        assert_nothing_left(server, cores)


def stream_over_grpc(client: Any) -> SimpleQueue[Any]:
    """What a stream of `m` hears, in order: answers and errors."""
    heard = SimpleQueue[Any]()
    client.start_stream(lambda result, error: heard.put(error or result))
    tensors = given(triton, "input_ids", np.ones(1, np.int32)), given(triton, "stream", np.ones(1, bool))
    client.async_stream_infer("m", [*tensors], parameters={"max_tokens": 200})
    return heard


def test_the_exit_timeout_ends_what_runs_with_an_error(
    serve: Any, tmp_path: Path, tokenizer_only: Path, sibling: Callable[[str], ModuleType]
) -> None:
    """At every endpoint, and though a model in a thread computes for ever."""
    write_model(tmp_path / "r", "m", tokenizer_only, **FAKE, fake_step_seconds=0.2)
    sibling("onnx_models.py").write_loop(
        write_config(tmp_path / "r", "endless", 'backend: "onnxruntime"') / "model.onnx"
    )
    calls: list[Callable[[], Any]] = [
        lambda: httpx.post(f"{server.url}/v2/models/m/generate", json=LONG, timeout=60),
        lambda: httpx.post(f"{server.url}/v2/models/endless/infer", json=ENDLESS, timeout=60),
        lambda: httpx.post(f"{server.url}/v1/completions", json=LONGER, timeout=60),
        lambda: httpx.post(f"{server.url}/v1/completions", json=LONGER | {"stream": True}, timeout=60),
    ]
    flags = ["--model-repository", str(tmp_path / "r"), "--exit-timeout-secs", "0.3"]
    with (
        serve(*flags) as server,
        triton.InferenceServerClient(server.grpc_address) as client,
        ThreadPoolExecutor(len(calls)) as threads,
        stream(server) as lines,
    ):
        next(lines)
        cores, heard = server.cores(), stream_over_grpc(client)
        heard.get(timeout=60)
        asked = [threads.submit(call) for call in calls]
        server.until(lambda: 'charonia_requests_running{model="m",version="1"} 5' in httpx.get(server.metrics_url).text)
        assert server.stop() == 0
        assert list(lines)[-1] == 'data: {"error":"Server exiting"}'
        whole = [each.result() for each in asked]
        assert [answer.status_code for answer in whole] == [503, 503, 503, 200]
        assert [answer.headers["retry-after"] for answer in whole[:3]] == ["1"] * 3
        assert whole[0].json() == whole[1].json() == {"error": "Server exiting"}
        last = whole[3].text.split("\n\n")[-3].removeprefix("data: ")
        assert json.loads(last)["error"] == whole[2].json()["error"]
        while not isinstance(error := heard.get(timeout=60), InferenceServerException):
            pass
        assert error.status() == "StatusCode.UNAVAILABLE"
        ends = re.findall(r"door=(\w+) .*outcome=(\w+) reason=unavailable", server.said)
        assert sorted(ends) == [("completions", "error")] * 2 + [
            ("generate", "error"),
            ("generate_stream", "error"),
            ("infer", "rejected"),
        ]
        assert "Traceback" not in server.said
        assert_nothing_left(server, cores)


def test_while_loading_it_lives_and_is_not_ready_and_ends_at_sigterm(serve: Any, checkpoint: Path) -> None:
    with serve(str(checkpoint), "--served-model-name", "m") as server:
        server.until(lambda: bool(server.cores()))
        cores = server.cores()
        for core in cores:
            os.kill(core, signal.SIGSTOP)  # it will not be loaded before we have looked
        server.until(lambda: "Listening on" in server.said)
        url = server.said.partition("Listening on ")[2].split()[0]
        asked = [httpx.get(f"{url}/v2/{path}") for path in ("health/live", "health/ready", "models/m/ready")]
        assert [answer.status_code for answer in asked] == [200, 400, 400]
        early = httpx.post(f"{url}/v2/models/m/generate", json={"text_input": "a"})
        assert (early.status_code, early.headers["retry-after"]) == (503, "1")
        assert "it is being loaded" in early.text
        assert server.stop() == 0
        assert "Traceback" not in server.said
        assert_nothing_left(server, cores)


def assert_nothing_left(server: Any, cores: list[int]) -> None:
    assert cores
    assert not [core for core in cores if Path(f"/proc/{core}").exists()]
    assert list(server.scratch.iterdir()) == []


def test_a_port_in_use(refused: Any, tokenizer_only: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(str(tokenizer_only), *FLAGS, "--http-port", str(port))
    assert said == f"charonia: cannot open port {port} on 127.0.0.1: Address already in use (--http-port)\n"


def test_two_endpoints_on_one_port(refused: Any, tokenizer_only: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    said = refused(str(tokenizer_only), *FLAGS, "--http-port", port, "--metrics-port", port)
    assert said == f"charonia: --http-port and --metrics-port are both {port}\n"


def test_a_single_checkpoint_that_fails(serve: Any, tokenizer_only: Path) -> None:
    with serve(str(tokenizer_only), "--executor", "inline", "--served-model-name", "m") as server:
        assert server.process.wait(60) == 1
        assert "m: FAILED: " in server.said
        assert server.said.count("beside its weights") == server.said.count("FAILED") == 1, "said twice"
        assert "Serving" not in server.said
        assert "Traceback" not in server.said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["x/y", "--max-num-seqs", "0"], "parameter 'max_num_seqs' must be an integer >= 1, got '0'"),
        pytest.param(
            ["x/y", "--max-num-seqs", "600"],
            "max_num_seqs 600 must be at least 1 and at most max_num_batched_tokens 512",
            marks=pytest.mark.proof,
        ),
        (["x/y", "--bogus"], "--bogus"),
    ],
)
def test_wrong_commands(serve: Any, arguments: list[str], says: str) -> None:
    with serve(*arguments) as server:
        assert server.process.wait(60) in (1, 2)
        assert says in server.said
        assert "Traceback" not in server.said


def test_a_reader_of_the_output_who_leaves_is_told_of_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "broken" / "1").mkdir(parents=True)
    theirs, ours = os.pipe()
    os.close(theirs)
    command = [sys.executable, "-m", "charonia", "check", str(tmp_path)]
    with os.fdopen(ours, "wb") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "charonia: nobody reads the standard output any more\n")


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("0.0.0.0", "127.0.0.1:8000"),
        ("::", "[::1]:8000"),
        ("fe80::1", "[fe80::1]:8000"),
        ("localhost", "localhost:8000"),
    ],
)
def test_the_start_says_where_a_client_may_go(address: str, shown: str) -> None:
    assert reachable_address(address, 8000) == shown


def test_lenient_readiness_and_another_name(serve: Any, tmp_path: Path, tokenizer_only: Path) -> None:
    (tmp_path / "r" / "broken" / "1").mkdir(parents=True)
    flags = ["--strict-readiness", "false", "--exit-on-error", "false", "--id", "ferry"]
    with serve("--model-repository", str(tmp_path / "r"), *flags) as server:
        assert server.status("/v2/health/ready") == 200
        assert httpx.get(f"{server.url}/v2").json()["name"] == "ferry"
        assert "broken: FAILED: " in server.said


def test_a_command_line_of_tritonserver_without_http(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r" / "fine.identity" / "1").mkdir(parents=True)
    flags = ["--allow-http=False", "--log-file", str(tmp_path / "log"), "--http-thread-count=8", "--log-verbose=true"]
    flags += ["--allow-vertex-ai=true", "--vertex-ai-port=0", "--log-requests=all"]
    flags += ["--url-file", str(tmp_path / "url")]
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "/h")
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/p")
    with serve("--model-store", str(tmp_path / "r"), "--strict-model-config=false", *flags) as server:
        server.until(lambda: "Serving without HTTP" in server.said)
        [address] = re.findall(r"gRPC on (\S+)", server.said)
        assert (tmp_path / "url").read_text() == f"grpc://{address}\n"
        with triton.InferenceServerClient(address) as client:
            assert client.get_model_metadata("fine.identity").name == "fine.identity"
            assert client.get_log_settings(as_json=True)["settings"]["log_file"]["string_param"] == flags[2]
            tensor = triton.InferInput("no", [1], "INT32")
            tensor.set_data_from_numpy(np.ones(1, np.int32))
            with pytest.raises(InferenceServerException, match="unexpected inference input 'no'"):
                client.infer("fine.identity", [tensor])
        [cloud] = re.findall(r"Vertex AI on (\S+)", server.said)
        assert httpx.get(f"{cloud}/h").status_code == 200
        metadata = httpx.post(f"{cloud}/p", headers={"x-vertex-ai-triton-redirect": "v2/models/fine.identity"})
        assert metadata.json()["name"] == "fine.identity"
        assert server.stop() == 0
        assert "charonia." not in server.said
    assert not (tmp_path / "url").exists()
    log = (tmp_path / "log").read_text()
    assert "flags of tritonserver that have no effect here: --http-thread-count\n" in log
    assert "client=127.0.0.1 door=ModelInfer model=fine.identity" in log


def test_a_model_that_fails_at_the_start_ends_the_server(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "r" / "broken" / "1").mkdir(parents=True)
    (tmp_path / "r" / "fine.identity" / "1").mkdir(parents=True)
    with serve("--model-repository", str(tmp_path / "r")) as server:
        assert server.process.wait(90) == 1
        assert "broken: FAILED: " in server.said
        assert "a model failed to load; --exit-on-error=false serves the others" in server.said


@pytest.mark.parametrize("frontends", [pytest.param("1", marks=pytest.mark.proof), "2"])
def test_a_server_that_drains_is_unready_before_it_refuses(serve: Any, tokenizer_only: Path, frontends: str) -> None:
    with serve(str(tokenizer_only), *FLAGS, "--drain-secs", "600", "--frontends", frontends) as server:
        server.until(lambda: server.status("/health") == 200)
        for path in ("/v1/models", "/metrics", "/v2/health/ready", "/version"):
            assert server.status(path) == 200, f"{path}: a router asks all on one port"
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: server.status("/health") == 503)
        server.until(lambda: server.status("/v2/models/m/ready") == 400)
        assert server.status("/v2/health/ready") == 400
        assert server.status("/v2/health/live") == 200
        assert generate(server) == 200, "who was routed here by then is served"
        assert "draining: not ready, and requests are taken for another 600 s" in server.said
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
