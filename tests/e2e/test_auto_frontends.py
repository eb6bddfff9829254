"""A server that begins as one process and gets frontends when it is busy: nothing that is under way is cut, and then
all is as with frontends from the start."""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from charonia.cli.frontend_count import VARIABLE

from .models import FAKE, write_config, write_labelled, write_model
from .serving import Server, children, name, serving
from .tensors import given
from .test_frontends import LABELLED, LARGE, STATEFUL, ask, echo, frontends, metric, owner

STREAMS = 64
TOKENS = 80
LONG = {"model": "fake", "prompt": "hello there", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
GROWN = "frontends take new connections"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, tokenizer_only: Path) -> Path:
    directory = tmp_path_factory.mktemp("grows")
    write_labelled(directory, "echo", "other")
    write_config(directory, "stateful", STATEFUL)
    write_config(directory, "large", LARGE)
    write_model(directory, "fake", tokenizer_only, **FAKE, max_num_seqs=80, fake_step_seconds=0.03)
    return directory


def growing(scratch: Path, repository: Path, growth: str, *models: str) -> Any:
    flags = ["--model-repository", str(repository), "--model-control-mode", "explicit", "--allow-client-shm=true"]
    loads = [f"--load-model={name}" for name in models]
    return serving(scratch, *flags, *loads, variables={VARIABLE: f"cores=8 {growth}"})


class Before:
    """Clients that are connected to the server's process when it grows."""

    def __init__(self, server: Server, stack: ExitStack) -> None:
        self.server = server
        self.kept = [self._connection(stack) for _ in range(3)]
        self.grpc = stack.enter_context(triton_grpc.InferenceServerClient(server.grpc_address))
        self.counters = counters(server)
        self.texts: list[str] = []
        self.large: tuple[int, bytes] = (0, b"")
        self.streamed: list[float] = []

    def _connection(self, stack: ExitStack) -> HTTPConnection:
        connection = HTTPConnection(*self.server.address, timeout=30)
        stack.callback(connection.close)
        assert ask(connection, "/v2/health/ready") == (200, b"")
        assert owner(self.server, connection.sock) == self.server.process.pid
        return connection


def counters(server: Server) -> dict[str, float]:
    """The counters of a scrape, by series."""
    kinds: dict[str, str] = {}
    values = {}
    for line in httpx.get(server.metrics_url).text.splitlines():
        if line.startswith("# TYPE "):
            family, kind = line[7:].split()
            kinds[family] = kind
        elif not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            family = series.partition("{")[0]
            if "counter" in (kinds.get(family), kinds.get(family.removesuffix("_total"))):
                values[series] = float(value)
    return values


async def stream(server: Server) -> str:
    """The text of a stream, whose tokens are counted."""
    body = json.dumps({**LONG, "stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection(*server.address)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    lines = (await reader.read()).decode().splitlines()
    writer.close()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["usage"]["completion_tokens"] == TOKENS
    assert "data: [DONE]" in lines
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def large_body(server: Server) -> tuple[int, bytes]:
    """The answer to a request whose body comes half before and half after the growth."""
    numbers = [float(number) for number in range(100_000)]
    tensor = {"name": "INPUT0", "shape": [1, len(numbers)], "datatype": "FP32", "data": numbers}
    body = json.dumps({"inputs": [tensor]}).encode()
    reader, writer = await asyncio.open_connection(*server.address)
    head = b"POST /v2/models/large/infer HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body[: len(body) // 2])
    while GROWN not in server.said:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.05)
    writer.write(body[len(body) // 2 :])
    answer = await reader.read()
    writer.close()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["outputs"][0]["data"] == numbers
    return int(answer.split()[1]), answer


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[Before]:
    """A server that grew while all of this was under way."""
    scratch = tmp_path_factory.mktemp("g") / "t"
    with (
        growing(scratch, repository, "busy=0.05 seconds=0.3", "echo", "large", "stateful", "fake") as server,
        ExitStack() as stack,
    ):
        before = Before(server, stack)
        came: list[Any] = []
        before.grpc.start_stream(lambda result, error: came.append(error or result.as_numpy("OUTPUT0")[0, 0]))
        before.grpc.async_stream_infer("echo", [given(triton_grpc, "INPUT0", LABELLED)])
        assert step(before.kept[0], 1, sequence_id=7, sequence_start=True)[0] == 200

        async def load() -> None:
            sending = asyncio.create_task(large_body(server))
            while GROWN not in server.said:
                before.texts += await asyncio.gather(*(stream(server) for _ in range(STREAMS)))
            before.large = await sending

        asyncio.run(asyncio.wait_for(load(), 90))
        before.grpc.async_stream_infer("echo", [given(triton_grpc, "INPUT0", LABELLED + 1)])
        server.until(lambda: len(came) == 2)
        before.streamed = came
        yield before
        before.grpc.stop_stream()
        assert server.stop() == 0, server.said
        assert "Traceback" not in server.said
        assert list(server.scratch.iterdir()) == []


def step(connection: HTTPConnection, number: int, **flags: Any) -> tuple[int, bytes]:
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "INT32", "data": [number]}
    return ask(connection, "/v2/models/stateful/infer", {"inputs": [tensor], "parameters": flags})


def test_what_was_under_way_is_whole(grown: Before) -> None:
    whole = httpx.post(f"{grown.server.url}/v1/completions", json=LONG, timeout=60).json()["choices"][0]["text"]
    assert set(grown.texts) == {whole}
    assert len(grown.texts) >= STREAMS
    assert grown.large[0] == 200
    assert grown.streamed == [0.0, 1.0]
    assert metric(grown.server, "charonia_frontends", setting="auto") == 2
    after = counters(grown.server)
    assert {series for series, value in grown.counters.items() if after.get(series, -1.0) < value} == set()
    assert after["charonia_frontend_restarts_total"] == 0


def test_new_connections_are_the_frontends_and_old_ones_are_given_back(grown: Before) -> None:
    server, kept = grown.server, grown.kept.pop()
    takers = set()
    for _ in range(16):
        with socket.create_connection(server.address) as client:
            client.sendall(b"GET /v2/health/ready HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            takers.add(owner(server, client))
    assert takers == {*frontends(server)}
    kept.request("POST", "/v2/models/echo/infer", json.dumps(echo(3)))
    answer = kept.getresponse()
    assert json.loads(answer.read())["outputs"][0]["data"] == [3.0] * 16
    assert answer.headers["connection"] == "close"  # and no client is surprised
    assert ask(kept, "/v2/models/echo/infer", echo(4))[0] == 200
    assert owner(server, kept.sock) in takers


def test_what_the_first_process_is_told_all_know_at_once(grown: Before) -> None:
    server = grown.server
    asked = HTTPConnection(*server.address, timeout=30)
    assert ask(asked, "/v2/models/other")[0] == 404
    assert ask(grown.kept.pop(), "/v2/repository/models/other/load", {})[0] == 200
    assert ask(asked, "/v2/models/other")[0] == 200
    grown.grpc.unload_model("other")  # over a connection that stays
    assert ask(asked, "/v2/models/other/ready")[0] == 400
    grown.grpc.update_log_settings({"log_verbose_level": 1})
    assert json.loads(ask(asked, "/v2/logging")[1])["log_verbose_level"] == 1
    assert ask(asked, "/v2/models/echo/infer", echo())[0] == 200
    server.until(lambda: '"POST /v2/models/echo/infer HTTP/1.1" 200' in server.said)
    grown.grpc.update_log_settings({"log_verbose_level": 0})
    assert step(asked, 2, sequence_id=7)[0] == 200  # it began over the first process
    assert step(grown.kept.pop(), 3, sequence_id=7, sequence_end=True)[0] == 200
    assert step(asked, 4, sequence_id=7)[0] == 400
    asked.close()


def test_a_client_memory_of_the_first_process_is_the_frontends_too(grown: Before) -> None:
    import tritonclient.utils.shared_memory as memory

    key = f"/charonia-test-auto-{os.getpid()}"
    region = memory.create_shared_memory_region("numbers", key, 64)
    try:
        memory.set_shared_memory_region(region, [LABELLED])
        grown.grpc.register_system_shared_memory("numbers", key, 64)
        place = {"shared_memory_region": "numbers", "shared_memory_byte_size": 64}
        tensor = {"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "parameters": place}
        url = f"{grown.server.url}/v2/models/echo/infer"
        answer = httpx.post(url, json={"inputs": [tensor]})
        assert answer.json()["outputs"][0]["data"] == LABELLED.ravel().tolist()
        grown.grpc.unregister_system_shared_memory("numbers")
        assert httpx.post(url, json={"inputs": [tensor]}).status_code == 404
    finally:
        memory.destroy_shared_memory_region(region)


def test_grpc_goes_on_over_old_connections_and_new_ones(grown: Before) -> None:
    for _ in range(3):
        with triton_grpc.InferenceServerClient(grown.server.grpc_address) as client:
            made = client.infer("echo", [given(triton_grpc, "INPUT0", LABELLED)], client_timeout=30)
            assert np.array_equal(made.as_numpy("OUTPUT0"), LABELLED)
    made = grown.grpc.infer("echo", [given(triton_grpc, "INPUT0", LABELLED)], client_timeout=30)
    assert np.array_equal(made.as_numpy("OUTPUT0"), LABELLED)


def test_a_frontend_that_dies_right_at_the_growth_comes_again(tmp_path: Path, repository: Path) -> None:
    with growing(tmp_path / "t", repository, "busy=0 seconds=0.2", "echo") as server:
        assert server.url
        server.until(lambda: len(frontends(server)) > 0 or GROWN in server.said)
        os.kill(frontends(server)[0], signal.SIGKILL)
        server.until(lambda: GROWN in server.said)
        server.until(lambda: metric(server, "charonia_frontend_restarts_total") == 1)
        server.until(lambda: metric(server, "charonia_frontends") == 2)
        for _ in range(4):
            assert httpx.post(f"{server.url}/v2/models/echo/infer", json=echo()).status_code == 200
        assert server.stop() == 0, server.said
        assert "Traceback" not in server.said


def test_a_server_that_drains_while_it_grows_ends_its_streams(tmp_path: Path, repository: Path) -> None:
    with growing(tmp_path / "t", repository, "busy=0 seconds=0.4", "fake") as server:
        body = {**LONG, "stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            server.until(lambda: "starting 2 frontends" in server.said)
            server.process.send_signal(signal.SIGTERM)
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert chunks[-1]["usage"]["completion_tokens"] == TOKENS
        pids = [pid for pid in children(server.process.pid) if name(pid) == "charonia-front"]
        assert server.process.wait(60) == 0, server.said
        assert "Traceback" not in server.said
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() and name(pid) == "charonia-front" for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)
