"""Batches by the real openai client, on a server that loses its engine and is then killed in the middle."""

import json
import os
import signal
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from .models import FAKE, write_model
from .serving import TIMEOUT, Server, serving

CHAT, COUNT = "/v1/chat/completions", 300


def content(count: int, endpoint: str = CHAT, **body: Any) -> bytes:
    asked = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | body
    requests = [{"custom_id": f"r{n}", "method": "POST", "url": endpoint, "body": asked} for n in range(count)]
    requests[3]["body"] = asked | {"temperature": -1}
    return b"".join(json.dumps(each).encode() + b"\n" for each in requests)


def connect(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0)


def answers(client: openai.OpenAI, batch: Any) -> dict[str, int]:
    """The status of each request, which is in one of the files, once."""
    files = [client.files.content(each).text for each in (batch.output_file_id, batch.error_file_id) if each]
    told = [json.loads(line) for file in files for line in file.splitlines()]
    assert max(Counter(each["custom_id"] for each in told).values()) == 1
    return {each["custom_id"]: each["response"]["status_code"] if each["response"] else 0 for each in told}


def metric(server: Server, name: str) -> float:
    lines = httpx.get(server.metrics_url).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.fixture
def flags(tmp_path: Path, tokenizer_only: Path) -> list[str]:
    repository = tmp_path / "models"
    repository.mkdir()
    write_model(repository, "fake", tokenizer_only, **FAKE, fake_step_seconds=0.01, max_num_seqs=16)
    return [
        "--model-repository",
        str(repository),
        "--files-dir",
        str(tmp_path / "files"),
        "--files-max-bytes",
        "500000",
    ]


def test_a_batch_outlives_its_engine_and_its_server(flags: list[str], tmp_path: Path) -> None:
    with serving(tmp_path / "a", *flags) as server, connect(server) as client:
        file = client.files.create(file=("in.jsonl", content(COUNT)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")

        def done() -> int:
            counts = client.batches.retrieve(batch.id).request_counts
            assert counts
            return counts.completed

        server.until(lambda: done() > 20)
        [core] = server.cores()
        os.kill(core, signal.SIGKILL)
        before = done()
        server.until(lambda: done() > before + 20)
        assert metric(server, 'charonia_batch_requests_total{outcome="repeated"}') > 0
        server.process.kill()
        server.process.wait(TIMEOUT)
    with serving(tmp_path / "b", *flags) as server, connect(server) as client:
        again = client.batches.retrieve(batch.id)
        assert again.status in ("in_progress", "finalizing", "completed")
        assert again.request_counts
        assert again.request_counts.completed < COUNT - 1
        server.until(lambda: client.batches.retrieve(batch.id).status == "completed")
        ended = client.batches.retrieve(batch.id)
        assert answers(client, ended) == {f"r{n}": 400 if n == 3 else 200 for n in range(COUNT)}
        assert ended.request_counts
        assert tuple(ended.request_counts.to_dict().values()).count(COUNT) == 1
        life_of_files(client)
        uploads_that_break_off(server, tmp_path / "files")
        assert server.stop() == 0
        assert "Traceback" not in server.said


def life_of_files(client: openai.OpenAI) -> None:
    """Errors, a cancelled batch, and lists."""
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("x", b"{}"), purpose="fine-tune")
    with pytest.raises(openai.APIStatusError, match="files-max-bytes"):
        client.files.create(file=("x", b"x" * 600_000), purpose="batch")
    wrong = client.files.create(file=("x", b"{}\n" + content(4)), purpose="batch")
    failed = client.batches.create(input_file_id=wrong.id, endpoint=CHAT, completion_window="24h")
    long = client.files.create(file=("x", content(1000, max_tokens=100)), purpose="batch")
    batch = client.batches.create(input_file_id=long.id, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.ConflictError, match="cancel the batch"):
        client.files.delete(long.id)
    while client.batches.retrieve(batch.id).status == "validating":
        pass
    client.batches.cancel(batch.id)
    while (ended := client.batches.retrieve(batch.id)).status != "cancelled":
        pass
    assert len(answers(client, ended)) == 1000
    failed = client.batches.retrieve(failed.id)
    assert failed.errors
    assert failed.errors.data
    assert (failed.status, failed.errors.data[0].line) == ("failed", 1)
    assert {each.id for each in client.batches.list(limit=1)} >= {batch.id, failed.id}  # by pages
    client.files.delete(long.id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(long.id)


def uploads_that_break_off(server: Server, directory: Path) -> None:
    """A client that sends less than it said, and leaves; and one that asks to be read without end."""
    before = {path.name for path in (directory / "files").iterdir()}
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n%b\r\n\r\n"
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * 300_000
    with socket.create_connection(server.address) as client:
        client.sendall(head % b"Content-Length: 400000" + part)
        server.until(lambda: len(list((directory / "files").iterdir())) > len(before))
    server.until(lambda: {path.name for path in (directory / "files").iterdir()} == before)
    with socket.create_connection(server.address) as client:
        client.sendall(head % b"Content-Length: 99999999999")
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")
    with socket.create_connection(server.address) as client:
        client.sendall(head % b"Transfer-Encoding: chunked")
        status = b""
        with client.makefile("rb") as answer:
            for _ in range(20):
                try:
                    client.sendall(b"%x\r\n%b\r\n" % (len(part), part))
                except ConnectionError:
                    break
            status = answer.readline()
        assert b" 413 " in status
    server.until(lambda: {path.name for path in (directory / "files").iterdir()} == before)
