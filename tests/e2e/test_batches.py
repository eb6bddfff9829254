"""Files and batches by the real openai client. What becomes of them when something dies: test_proofs.py."""

import json
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from .serving import Server

CHAT = "/v1/chat/completions"


def content(model: str, count: int) -> bytes:
    asked = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    requests = [{"custom_id": f"r{n}", "method": "POST", "url": CHAT, "body": asked} for n in range(count)]
    requests[3]["body"] = asked | {"temperature": -1}
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


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


def wait(client: openai.OpenAI, batch: Any, *states: str) -> Any:
    while (shown := client.batches.retrieve(batch.id)).status not in states:
        time.sleep(0.01)
    return shown


def test_a_batch_from_upload_to_download(server: Server) -> None:
    with connect(server) as client:
        file = client.files.create(file=("../in.jsonl", content("fake", 40)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"night": "1"}
        )
        ended = wait(client, batch, "completed", "failed")
        assert (file.filename, ended.metadata) == ("in.jsonl", {"night": "1"})
        assert ended.request_counts.to_dict() == {"total": 40, "completed": 39, "failed": 1}
        assert answers(client, ended) == {f"r{n}": 400 if n == 3 else 200 for n in range(40)}
        assert client.files.content(file.id).read() == content("fake", 40)
        embeddings = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        failed = wait(client, embeddings, "failed")
        assert {each.code for each in failed.errors.data} == {"mismatched_url"}
        assert [each.id for each in client.batches.list(limit=1)][:2] == [embeddings.id, batch.id]  # by pages
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError, match="No such File"):
            client.files.retrieve(file.id)
    # What a request of a batch leaves in the log is what any request does.
    server.until(lambda: "door=chat model=fake" in server.said)  # its writer may wait for more lines


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "hi"}, "text_completion"),
        ("/v1/responses", {"input": "hi"}, "response"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}, "message"),
    ],
)
def test_every_endpoint_answers_a_batch_in_its_own_form(
    server: Server, endpoint: str, body: dict[str, Any], kind: str
) -> None:
    limit = {"max_output_tokens" if endpoint == "/v1/responses" else "max_tokens": 4}
    bodies = [{"model": "fake", **limit, **body}, {"model": "fake", **limit, **body, "top_p": 7}]
    lines = [{"custom_id": str(n), "method": "POST", "url": endpoint, "body": each} for n, each in enumerate(bodies)]
    with connect(server) as client:
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        file = client.files.create(file=("x", content), purpose="batch")
        made: Any = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h"}
        ended = wait(client, client.batches.create(**made), "completed", "failed")
        answer = json.loads(client.files.content(ended.output_file_id).text)["response"]["body"]
        refused = json.loads(client.files.content(ended.error_file_id).text)["response"]
    assert kind in (answer.get("object"), answer.get("type"))
    assert refused["status_code"] == 400
    assert "top_p" in refused["body"]["error"]["message"]


def test_a_batch_that_is_cancelled(server: Server) -> None:
    """Its model takes one request at a time, and lets one wait: clients are let in all the same."""
    with connect(server) as client:
        file = client.files.create(file=("x", content("slow", 50)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        while not client.batches.retrieve(batch.id).request_counts.completed:  # type: ignore[union-attr]
            time.sleep(0.01)
        asked = client.completions.create(model="slow", prompt="abc", max_tokens=2)
        assert asked.choices[0].text
        with pytest.raises(openai.ConflictError, match="cancel the batch"):
            client.files.delete(file.id)
        client.batches.cancel(batch.id)
        ended = wait(client, batch, "cancelled")
        assert Counter(answers(client, ended).values())[200] == ended.request_counts.completed > 0
        client.files.delete(file.id)
    server.until(lambda: metric(server, 'charonia_requests_running{model="slow"') == 0)


def test_uploads_that_break_off_leave_nothing(server: Server) -> None:
    """A client that sends less than it said, and leaves; and others that send more than there may be."""
    with connect(server) as client, pytest.raises(openai.APIStatusError, match="files-max-bytes"):
        client.files.create(file=("x", b"x" * 600_000), purpose="batch")
    directory = server.arguments[server.arguments.index("--files-dir") + 1]
    folder = Path(directory) / "files"
    before = {path.name for path in folder.iterdir()}
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n%b\r\n\r\n"
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * 300_000
    with socket.create_connection(server.address) as client:
        client.sendall(head % b"Content-Length: 400000" + part)
        server.until(lambda: len(list(folder.iterdir())) > len(before))
    server.until(lambda: {path.name for path in folder.iterdir()} == before)
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
    server.until(lambda: {path.name for path in folder.iterdir()} == before)
