"""Two frontends over one hub, from the start or, in the proofs, since it was busy: whatever a client can see is as with
one, and a frontend that dies takes its own connections alone."""

import json
import operator
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton

from charonia.cli.frontend_count import VARIABLE
from charonia.telemetry.bottlenecks import explain
from charonia.telemetry.scrape import Interval, parse_scrape
from charonia.telemetry.time_claims import Cause

from ..gpu_stand_in import gpu_allocation
from .models import FAKE, write_config, write_labelled, write_model
from .serving import Server, children, name, serving
from .tensors import given

STATEFUL = """
name: "stateful"
backend: "identity"
max_batch_size: 4
sequence_batching { direct { } max_sequence_idle_microseconds: 600000000 }
input { name: "INPUT0" data_type: TYPE_INT32 dims: 1 }
output { name: "OUTPUT0" data_type: TYPE_INT32 dims: 1 }
"""
REPEAT = 'name: "repeat"\nbackend: "repeat"\nmodel_transaction_policy { decoupled: true }'
LARGE = """
name: "large"
backend: "identity"
max_batch_size: 1
input { name: "INPUT0" data_type: TYPE_FP32 dims: -1 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: -1 }
"""
LABELLED = np.arange(16, dtype=np.float32).reshape(1, 16)
ONES = ",".join(["1"] * 16)
WORDS = {"prompt": "hello there", "max_tokens": 12, "temperature": 0, "ignore_eos": True}

LONG = {"model": "fake", **WORDS, "max_tokens": 100, "stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, tokenizer_only: Path) -> Path:
    directory = tmp_path_factory.mktemp("several")
    write_labelled(directory, "echo", "other")
    write_config(directory, "stateful", STATEFUL)
    write_config(directory, "repeat", REPEAT)
    write_config(directory, "large", LARGE)
    limits = {"max_num_seqs": 2, "max_queued_requests": 2}
    write_model(directory, "fake", tokenizer_only, **FAKE, **limits, fake_step_seconds=0.02)
    return directory


@pytest.fixture(scope="module", params=["2", pytest.param("auto", marks=pytest.mark.proof)])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, repository: Path, cuda_folder: Path
) -> Iterator[Server]:
    flags = ["--frontends", request.param, "--model-repository", str(repository), "--model-control-mode", "explicit"]
    loads = [f"--load-model={name}" for name in ("echo", "large", "stateful", "repeat", "fake")]
    traces = tmp_path_factory.mktemp("traces") / "traces.json"
    flags += ["--trace-config", f"triton,file={traces}", "--allow-client-shm=true"]
    files = tmp_path_factory.mktemp("files")
    flags += ["--files-dir", str(files), "--allow-sagemaker=true", "--sagemaker-port=0"]
    variables = {"LD_LIBRARY_PATH": str(cuda_folder), "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "echo"}
    variables[VARIABLE] = "cores=8 busy=0 seconds=0.2"  # auto has two of them soon
    with serving(tmp_path_factory.mktemp("f") / "t", *flags, *loads, variables=variables) as running:
        running.traces, running.files = traces, files  # type: ignore[attr-defined]
        running.until(lambda: running.url and metric(running, "charonia_frontends", setting=request.param) == 2)
        running.until(lambda: request.param == "2" or "2 frontends take new connections" in running.said)
        yield running
        if running.process.poll() is None:
            assert running.stop() == 0, running.said
        assert "Traceback" not in running.said
        assert list(running.scratch.iterdir()) == []


def frontends(server: Server) -> list[int]:
    return [pid for pid in children(server.process.pid) if name(pid) == "charonia-front"]


def owner(server: Server, connected: socket.socket) -> int:
    """The frontend at the other end of a connection on this machine, or the server's process."""
    mine, theirs = (f":{address[1]:04X}" for address in (connected.getsockname(), connected.getpeername()))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    established = (row for row in rows if row[3] == "01")  # a connection that ended may have had the same ports
    [inode] = [row[9] for row in established if row[1].endswith(theirs) and row[2].endswith(mine)]
    for pid in (*frontends(server), server.process.pid):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if file.readlink().name == f"socket:[{inode}]":
                    return pid
            except FileNotFoundError:
                continue
    raise AssertionError("nobody has it")


@contextmanager
def one_each(server: Server) -> Iterator[dict[int, HTTPConnection]]:
    """A connection to each of the frontends, by their processes: which gets one is the system's choice."""
    with ExitStack() as stack:
        found: dict[int, HTTPConnection] = {}
        for _ in range(64):
            connection = HTTPConnection(*server.address, timeout=30)
            stack.callback(connection.close)
            ask(connection, "/v2/health/live")  # it is taken by then
            found.setdefault(owner(server, connection.sock), connection)
            if len(found) == 2:
                break
        assert len(found) == 2, "64 connections went to one of them"
        yield found


def ask(connection: HTTPConnection, path: str, body: Any = None) -> tuple[int, bytes]:
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
    answer = connection.getresponse()
    return answer.status, answer.read()


def echo(number: int = 1) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [float(number)] * 16}]}


def metric(server: Server, family: str, **labels: str) -> float:
    """The sum of a family's series with these labels."""
    found = 0.0
    for line in httpx.get(server.metrics_url).text.splitlines():
        series = re.match(rf"{family}(?:\{{(.*)\}})? (\S+)$", line)
        if series and all(f'{key}="{value}"' in (series[1] or "") for key, value in labels.items()):
            found += float(series[2])
    return found


def test_each_answers_and_the_hub_counts_all(server: Server) -> None:
    before = metric(server, "nv_inference_request_success", model="echo")
    with one_each(server) as connections:
        for number, connection in enumerate(connections.values()):
            status, body = ask(connection, "/v2/models/echo/infer", echo(number))
            assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [float(number)] * 16)
        counts = []
        for connection in connections.values():
            [stats] = json.loads(ask(connection, "/v2/models/echo/stats")[1])["model_stats"]
            counts.append(stats["inference_stats"]["success"]["count"])
        assert counts == [before + 2] * 2
        server.until(lambda: metric(server, "charonia_requests_total", model="echo", outcome="done") >= before + 2)
    assert metric(server, "nv_inference_request_success", model="echo") == before + 2


def test_errors_are_those_of_one_frontend(server: Server) -> None:
    refused = {
        ("/v2/models/nobody/infer", 404): "Request for unknown model: 'nobody' is not found",
        ("/v2/models/echo/versions/7/infer", 404): "Request for unknown model: 'echo' version 7 is not found",
        ("/v2/models/other/infer", 404): "Request for unknown model: 'other' is not found",
    }
    with one_each(server) as connections:
        for connection in connections.values():
            for (path, expected), said in refused.items():
                status, body = ask(connection, path, echo())
                assert (status, json.loads(body)["error"]) == (expected, said)
            status, body = ask(connection, "/v2/models/echo/infer", {"inputs": []})
            assert status == 400
            assert b"missing required input(s) ['INPUT0']" in body
            assert ask(connection, "/nowhere")[0] == 404
            assert ask(connection, "/v2/models/echo/infer")[0] == 405
            assert ask(connection, "/v2/health/ready") == (200, b"")


def test_tensors_cross_whole(server: Server) -> None:
    with triton.InferenceServerClient(server.http_address) as client:
        texts = np.array([[b"a", "b\u00e9".encode(), b""]], np.object_)
        made = client.infer("echo", [given(triton, "INPUT0", LABELLED), given(triton, "INPUT1", texts)])
        assert np.array_equal(made.as_numpy("OUTPUT0"), LABELLED)
        assert made.as_numpy("OUTPUT1").tolist() == texts.tolist()
        wanted = [triton.InferRequestedOutput("OUTPUT0", class_count=1)]
        classes = client.infer("echo", [given(triton, "INPUT0", LABELLED)], outputs=wanted).as_numpy("OUTPUT0")
        assert classes.tolist() == [[b"15.000000:15"]]


def test_large_tensors_cross_whole_side_by_side(server: Server) -> None:
    """Both ways through memory that two processes share, which is given back."""
    with triton.InferenceServerClient(server.http_address, concurrency=8) as client:
        for turn in range(3):
            batches = [np.full((1, 1 << 21), turn * 8 + number, np.float32) for number in range(8)]
            pending = [client.async_infer("large", [given(triton, "INPUT0", batch)]) for batch in batches]
            for sent, answer in zip(batches, pending, strict=True):
                assert np.array_equal(answer.get_result().as_numpy("OUTPUT0"), sent)


def events(connection: HTTPConnection, path: str, body: Any) -> list[Any]:
    connection.request("POST", path, json.dumps(body))
    lines = connection.getresponse().read().decode().split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def completion_tokens(lines: Iterable[str]) -> int:
    """Those that the end of a stream tells of."""
    told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return int(told[-1]["usage"]["completion_tokens"])


def test_streams_of_text_are_alike_and_counted_once(server: Server) -> None:
    before = metric(server, "charonia_generation_tokens_total", model="fake")
    with one_each(server) as connections:
        texts = []
        for connection in connections.values():
            chunks = events(connection, "/v1/completions", {"model": "fake", "stream": True, **WORDS})
            texts.append("".join(chunk["choices"][0]["text"] for chunk in chunks))
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        whole = json.loads(ask(next(iter(connections.values())), "/v1/completions", {"model": "fake", **WORDS})[1])
        assert texts == [whole["choices"][0]["text"]] * 2
        assert whole["usage"]["completion_tokens"] == 12
        chat = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
        ends = [events(value, "/v1/chat/completions", chat)[-1] for value in connections.values()]
        assert [end["choices"][0]["finish_reason"] for end in ends] == ["length", "length"]
        assert len({json.loads(ask(value, "/v1/models")[1])["data"][0]["id"] for value in connections.values()}) == 1
    server.until(lambda: metric(server, "charonia_generation_tokens_total", model="fake") >= before + 44)
    assert metric(server, "charonia_generation_tokens_total", model="fake") == before + 44
    server.until(lambda: server.said.count("door=chat model=fake version=1 outcome=length") == 2)


def test_a_stop_string_ends_the_text_and_the_request_counts_as_stopped(server: Server) -> None:
    before = metric(server, "charonia_requests_total", model="fake", outcome="stop")
    text = httpx.post(f"{server.url}/v1/completions", json={"model": "fake", **WORDS}).json()["choices"][0]["text"]
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "fake", **WORDS, "stop": text[3:5]}).json()
    assert answer["choices"][0] | {"finish_reason": "stop", "text": text[:3]} == answer["choices"][0]
    server.until(lambda: metric(server, "charonia_requests_total", model="fake", outcome="stop") == before + 1)


def test_several_answers_and_what_none_can_give(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "fake", **WORDS, "n": 2}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    refused = httpx.post(f"{server.url}/v1/completions", json={"model": "fake", **WORDS, "n": 5})
    assert refused.status_code == 400
    assert "more than may wait: 2 (max_queued_requests)" in refused.json()["error"]["message"]
    tokens = httpx.post(f"{server.url}/tokenize", json={"model": "fake", "prompt": "hello"}).json()["tokens"]
    back = httpx.post(f"{server.url}/detokenize", json={"model": "fake", "tokens": tokens}).json()
    assert back == {"prompt": "hello"}
    text = httpx.post(f"{server.url}/v1/completions", json={"model": "echo", **WORDS})
    assert (text.status_code, "does not generate text" in text.text) == (400, True)


def test_what_finds_the_queue_full_is_refused_before_its_prompt_is_read(server: Server) -> None:
    """The prompt is none: whoever reads it refuses it for that."""
    wrong = {"model": "fake", "prompt": [10**6], "max_tokens": 1}
    asked = {"/v1/completions": wrong, "/v2/models/fake/generate": {"input_ids": [10**6]}}
    with one_each(server) as connections, ExitStack() as stack:
        states = [partial(metric, server, f"charonia_requests_{each}", model="fake") for each in ("running", "waiting")]

        def begin(count: int, expected: list[int]) -> None:
            for _ in range(count):
                client = HTTPConnection(*server.address, timeout=30)
                stack.callback(client.close)
                client.request("POST", "/v1/completions", json.dumps(LONG | {"max_tokens": 200}))
            server.until(lambda: [state() for state in states] == expected)

        refused = metric(server, "charonia_requests_total", model="fake", reason="queue_full_requests")
        begin(2, [2, 0])
        begin(1, [2, 1])
        status, said = ask(next(iter(connections.values())), "/v1/completions", wrong | {"n": 2})
        assert (status, b"2 requests are waiting already" in said) == (429, True), said
        begin(1, [2, 2])
        for connection in connections.values():
            for path, body in asked.items():
                status, said = ask(connection, path, body)
                assert (status, b"2 requests are waiting already" in said) == (429, True), said
            assert ask(connection, "/tokenize", {"model": "fake", "prompt": "a"})[0] == 200
        counted = partial(metric, server, "charonia_requests_total", model="fake", reason="queue_full_requests")
        server.until(lambda: counted() == refused + 5)
        stack.close()
        server.until(lambda: [state() for state in states] == [0, 0])
        waited = partial(metric, server, "charonia_tenant_waiting_seconds_total", model="fake")
        assert waited() == waited()
        for path, body in asked.items():  # and nothing is left of those that were refused
            assert [ask(connection, path, body)[0] for connection in connections.values()] == [400, 400]
        for _ in range(3):
            assert ask(connection, "/v1/completions", {"model": "fake", **WORDS})[0] == 200


def test_a_sequence_goes_on_over_another_frontend(server: Server) -> None:
    def step(connection: HTTPConnection, number: int, **flags: Any) -> tuple[int, bytes]:
        tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "INT32", "data": [number]}
        return ask(connection, "/v2/models/stateful/infer", {"inputs": [tensor], "parameters": flags})

    with one_each(server) as connections:
        first, second = connections.values()
        assert step(first, 1, sequence_id=7, sequence_start=True)[0] == 200
        assert step(second, 2, sequence_id=7)[0] == 200
        assert step(first, 3, sequence_id=7, sequence_end=True)[0] == 200
        assert step(second, 4, sequence_id=7)[0] == 400  # it has ended, for all of them


def test_grpc(server: Server) -> None:
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        assert client.is_server_ready()
        assert client.is_model_ready("echo")
        assert client.get_model_config("echo", as_json=True)["config"]["backend"] == "identity"
        made = client.infer("echo", [given(triton_grpc, "INPUT0", LABELLED)], client_timeout=30)
        assert np.array_equal(made.as_numpy("OUTPUT0"), LABELLED)
        with pytest.raises(triton_grpc.InferenceServerException, match="'nobody' is not found"):
            client.infer("nobody", [given(triton_grpc, "INPUT0", LABELLED)], client_timeout=30)
        with pytest.raises(triton_grpc.InferenceServerException, match="'nobody' is not found"):
            client.get_model_metadata("nobody")
    health = grpc.insecure_channel(server.grpc_address)
    with health:
        check = health.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=30) == b"\x08\x01"


def test_more_responses_than_may_be_on_their_way(server: Server) -> None:
    count, came, done = 50, list[int](), threading.Event()

    def on_response(result: Any, error: Any) -> None:
        assert error is None, error
        if result.get_response().parameters["triton_final_response"].bool_param:
            done.set()
        if (made := result.as_numpy("OUT")) is not None:
            came.append(made.item())

    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(on_response)
        asked = np.arange(count, dtype=np.int32), np.zeros(count, np.uint32), np.zeros(1, np.uint32)
        inputs = [given(triton_grpc, *each) for each in zip(("IN", "DELAY", "WAIT"), asked, strict=True)]
        client.async_stream_infer("repeat", inputs, enable_empty_final_response=True)
        assert done.wait(60)
        client.stop_stream()
    assert came == list(range(count))


def test_a_client_that_leaves_frees_everything(server: Server) -> None:
    before = metric(server, "charonia_requests_total", model="fake", outcome="cancelled")
    long = {"model": "fake", "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with socket.create_connection(server.address) as client:
        body = json.dumps(long).encode()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        assert client.recv(12) == b"HTTP/1.1 200"
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.until(lambda: metric(server, "charonia_requests_total", model="fake", outcome="cancelled") == before + 1)
    server.until(lambda: metric(server, "charonia_requests_running", model="fake") == 0)
    server.until(lambda: metric(server, "charonia_kv_cache_usage_ratio", model="fake") == 0)


def test_what_one_is_told_all_know_at_once(server: Server) -> None:
    with one_each(server) as connections:
        first, second = connections.values()
        for _ in range(3):
            assert ask(first, "/v2/repository/models/other/load", {})[0] == 200
            assert ask(second, "/v2/models/other")[0] == 200
            assert ask(second, "/v2/models/other/infer", echo())[0] == 200
            assert ask(second, "/v2/repository/models/other/unload", {})[0] == 200
            assert ask(first, "/v2/models/other/ready")[0] == 400
            assert ask(first, "/v2/models/other/infer", echo())[0] == 404
        assert json.loads(ask(first, "/v2/logging", {"log_verbose_level": 1})[1])["log_verbose_level"] == 1
        assert ask(second, "/v2/models/echo/infer", echo())[0] == 200
        server.until(lambda: '"POST /v2/models/echo/infer HTTP/1.1" 200' in server.said)
        assert json.loads(ask(second, "/v2/logging", {"log_verbose_level": 0})[1])["log_verbose_level"] == 0


def test_traces_are_of_all_frontends(server: Server) -> None:
    file: Path = server.traces  # type: ignore[attr-defined]
    with one_each(server) as connections:
        first, second = connections.values()
        levels = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "1"}
        assert ask(first, "/v2/trace/setting", levels)[0] == 200
        assert ask(first, "/v2/models/echo/infer", echo() | {"id": "one"})[0] == 200
        assert ask(second, "/v2/models/echo/infer", echo() | {"id": "two"})[0] == 200
        status, body = ask(second, "/v2/models/fake/generate", {"text_input": "a", "id": "three"})
        assert status == 200
        assert ask(second, "/v2/health/ready")[0] == 200
        server.until(lambda: metric(server, "charonia_requests_running") == 0)
        assert ask(first, "/v2/trace/setting", {"trace_level": None, "trace_rate": None})[0] == 200
    written = json.loads(file.read_text())
    assert {each["request_id"] for each in written if "request_id" in each} == {"one", "two", "three"}
    times = [{time["name"]: time["ns"] for time in each["timestamps"]} for each in written if "timestamps" in each]
    for each in times:
        assert each["HTTP_RECV_START"] < each["REQUEST_START"] <= each["REQUEST_END"] < each["HTTP_SEND_END"]
    ids = {each["id"]: each["request_id"] for each in written if "request_id" in each}
    passed = [(ids[each["id"]], each["activity"], each["tensor"]) for each in written if "activity" in each]
    went_in, came_out = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"
    assert [tensor["data"] for id_, activity, tensor in passed if (id_, activity) == ("two", went_in)] == [ONES]
    texts = {(activity, tensor["name"]): tensor["data"] for id_, activity, tensor in passed if id_ == "three"}
    assert texts[went_in, "text_input"] == '"a"'
    assert texts[came_out, "text_output"].strip('"') == json.loads(body)["text_output"]


def test_a_frontend_that_is_late_is_measured_and_named(server: Server) -> None:
    before, merged = httpx.get(server.metrics_url).text, metric(server, "charonia_merged_tokens_total", model="fake")

    def delays() -> list[float]:
        """Those of each frontend that have ended: `explain` counts these, the lag a present one too."""
        family = "charonia_event_loop_delay_seconds_sum"
        return [metric(server, family, frontend=str(number)) for number in (1, 2)]

    delays_before = delays()
    with one_each(server) as connections:
        (held, client), (_, other) = connections.items()
        client.request("POST", "/v1/completions", json.dumps(LONG | {"max_tokens": 50}))
        stream = client.getresponse()
        os.kill(held, signal.SIGSTOP)
        try:
            assert ask(other, "/v2/models/echo/infer", echo())[0] == 200
            time.sleep(0.6)
        finally:
            os.kill(held, signal.SIGCONT)
        assert completion_tokens(stream.read().decode().split("\n")) == 50
    server.until(lambda: max(map(operator.sub, delays(), delays_before)) > 0.3)
    after = httpx.get(server.metrics_url).text
    [report] = explain(Interval(parse_scrape(before, "before"), parse_scrape(after, "after")), model="echo")
    first = report.bottlenecks[0]
    assert (first.cause, "that of frontend" in first.text) == (Cause.FRONTEND, True), first.text
    # Tokens came while the frontend did not read: for its clients they merged.
    assert metric(server, "charonia_merged_tokens_total", model="fake") > merged


def test_a_lost_frontend_takes_its_own_connections_alone_and_comes_back(server: Server) -> None:
    with one_each(server) as connections:
        (lost, gone), (kept, stays) = connections.items()
        asked = json.dumps(LONG)
        stays.request("POST", "/v1/completions", asked)
        stream = stays.getresponse()
        gone.request("POST", "/v1/completions", asked)
        gone.getresponse().read(1)
        os.kill(lost, signal.SIGKILL)
        assert completion_tokens(stream.read().decode().split("\n")) == 100
    server.until(lambda: metric(server, "charonia_requests_running", model="fake") == 0)
    server.until(lambda: "serves again" in server.said)
    assert metric(server, "charonia_frontend_restarts_total") == 1
    assert lost not in frontends(server)
    assert kept in frontends(server)
    with one_each(server) as connections:
        for connection in connections.values():
            assert ask(connection, "/v2/models/echo/infer", echo())[0] == 200
            assert ask(connection, "/v1/completions", {"model": "fake", **WORDS})[0] == 200


def test_client_memory(server: Server) -> None:
    import tritonclient.utils.shared_memory as memory

    region = memory.create_shared_memory_region("numbers", "/charonia-test-frontends", 64)
    try:
        memory.set_shared_memory_region(region, [LABELLED])
        with one_each(server) as connections, triton.InferenceServerClient(server.http_address) as client:
            client.register_system_shared_memory("numbers", "/charonia-test-frontends", 64)
            parameters = {"shared_memory_region": "numbers", "shared_memory_byte_size": 64}
            tensor = {"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "parameters": parameters}
            for connection in connections.values():
                status, body = ask(connection, "/v2/models/echo/infer", {"inputs": [tensor]})
                assert status == 200, body
                assert json.loads(body)["outputs"][0]["data"] == LABELLED.ravel().tolist()
            client.unregister_system_shared_memory("numbers")
            assert client.get_system_shared_memory_status() == []
            for connection in connections.values():
                assert ask(connection, "/v2/models/echo/infer", {"inputs": [tensor]})[0] == 404
    finally:
        memory.destroy_shared_memory_region(region)


def test_client_memory_on_gpus(server: Server, cuda_library: Path) -> None:
    with gpu_allocation(256) as allocation:
        allocation.write(LABELLED.tobytes(), 64)
        with (
            one_each(server) as connections,
            triton.InferenceServerClient(server.http_address) as client,
            triton_grpc.InferenceServerClient(server.grpc_address) as by_grpc,
        ):
            by_grpc.register_cuda_shared_memory("gpu", allocation.raw_handle, 1, 256)
            assert client.get_cuda_shared_memory_status() == [{"name": "gpu", "device_id": 1, "byte_size": 256}]
            place = {"shared_memory_region": "gpu", "shared_memory_byte_size": 64}
            tensor: dict[str, Any] = {"name": "INPUT0", "shape": [1, 16], "datatype": "FP32"}
            tensor["parameters"] = {**place, "shared_memory_offset": 64}
            for number, connection in enumerate(connections.values()):
                into = {**place, "shared_memory_offset": 128 * number}
                asked = {"inputs": [tensor], "outputs": [{"name": "OUTPUT0", "parameters": into}]}
                assert ask(connection, "/v2/models/echo/infer", asked)[0] == 200
                assert allocation.bytes[128 * number :][:64] == LABELLED.tobytes()
            wanted = triton_grpc.InferRequestedOutput("OUTPUT0")
            wanted.set_shared_memory("gpu", 64, offset=192)
            by_grpc.infer("echo", [given(triton_grpc, "INPUT0", 2 * LABELLED)], outputs=[wanted])
            assert allocation.bytes[192:] == (2 * LABELLED).tobytes()
            assert all(allocation.is_open(pid) for pid in (server.process.pid, *connections))
            client.unregister_cuda_shared_memory("gpu")
            assert not by_grpc.get_cuda_shared_memory_status().regions
            for connection in connections.values():
                assert ask(connection, "/v2/models/echo/infer", {"inputs": [tensor]})[0] == 404
            server.until(lambda: not any(allocation.is_open(pid) for pid in (server.process.pid, *connections)))


def test_files_and_batches_are_the_hubs(server: Server) -> None:
    files, directory = f"{server.url}/v1/files", server.files  # type: ignore[attr-defined]

    def upload(content: bytes, purpose: str = "batch") -> httpx.Response:
        return httpx.post(files, data={"purpose": purpose}, files={"file": ("in.jsonl", content)})

    large = os.urandom(1 << 20)  # in both directions piece by piece
    file = upload(large).json()
    content = f"{files}/{file['id']}/content"
    assert (file["bytes"], httpx.get(content).content == large) == (1 << 20, True)
    assert httpx.get(content, headers={"range": "bytes=70000-70009"}).content == large[70000:70010]
    assert httpx.delete(f"{files}/{file['id']}").json()["deleted"]
    assert "No such File" in httpx.get(content).text
    assert "purpose must be batch" in upload(large, "vision").text
    with socket.create_connection(server.address) as client:
        client.sendall(b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n")
        part = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n' + bytes(1 << 19)
        client.sendall(b"content-length: 1000000\r\n\r\n" + part)
        server.until(lambda: any(directory.rglob("*.part")))
    server.until(lambda: not any(directory.rglob("*.part")))
    asked = {"method": "POST", "url": "/v1/completions", "body": {"model": "fake", "prompt": "hi", "max_tokens": 2}}
    lines = [json.dumps({"custom_id": f"r{number}", **asked}) for number in range(4)]
    body = {"endpoint": "/v1/completions", "completion_window": "24h"}
    body["input_file_id"] = upload("\n".join(lines).encode()).json()["id"]
    batch = f"{server.url}/v1/batches/{httpx.post(f'{server.url}/v1/batches', json=body).json()['id']}"
    server.until(lambda: httpx.get(batch).json()["status"] == "completed")
    answers = httpx.get(f"{files}/{httpx.get(batch).json()['output_file_id']}/content").text.splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in answers) == ["r0", "r1", "r2", "r3"]
    assert {json.loads(line)["response"]["status_code"] for line in answers} == {200}


def test_a_cloud_may_ask_every_frontend(server: Server) -> None:
    [address] = re.findall(r"SageMaker on (\S+)", server.said)
    assert httpx.get(f"{address}/ping").status_code == 200
    answer = httpx.post(f"{address}/invocations", json=echo(3)).json()
    assert answer["outputs"][0]["data"] == [3.0] * 16
    port = f":{int(address.rpartition(':')[2]):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row for row in rows if row[1].endswith(port) and row[3] == "0A"]
    assert len(listening) == (2 if "2" in server.arguments else 3)  # the first process does so, too, if it once did


def test_a_client_that_leaves_what_the_hub_answers_is_no_error(server: Server) -> None:
    with socket.create_connection(server.address) as client:
        client.sendall(b"GET /v2/models/echo/explain?seconds=0.3 HTTP/1.1\r\nhost: x\r\n\r\n")
        time.sleep(0.1)
    assert httpx.get(f"{server.url}/v2/models/echo/explain?seconds=0.3").status_code == 200
    assert "Traceback" not in server.said


def test_requests_in_flight_end_before_the_server(server: Server) -> None:
    """The last test of this server: it stops."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert completion_tokens(lines) == 100
    assert server.process.wait(60) == 0, server.said
