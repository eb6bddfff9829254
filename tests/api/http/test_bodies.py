"""Bodies at every endpoint: compressed ones, forms, those that are too large; and methods that are not there."""

import gzip
import json
import zlib
from typing import Any

import httpx
import pytest

from charonia.core.request import InferResponse

DOORS: dict[str, Any] = {
    "/v1/completions": {"model": "llm", "prompt": "hi"},
    "/v1/chat/completions": {"model": "llm", "messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"model": "llm", "prompt": "hi"},
    "/detokenize": {"model": "llm", "tokens": [1]},
    "/v2/logging": {"log_verbose_level": 0},
}
EVERY = (*DOORS, "/v1/embeddings", "/v1/rerank", "/v2/models/llm/generate", "/v2/models/numbers/infer")
FORMS = ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x")


def too_large(path: str) -> int:
    """The status of a body that is too large: Triton's for v2, OpenAI's for all others."""
    return 400 if path.startswith("/v2/") else 413


def message(response: httpx.Response) -> str:
    error = response.json()["error"]
    return str(error["message"] if isinstance(error, dict) else error)


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("GZip", gzip.compress), ("deflate", zlib.compress)]
)
async def test_compressed(client: httpx.AsyncClient, path: str, encoding: str, compress: Any) -> None:
    body, headers = json.dumps(DOORS[path]).encode(), {"content-encoding": encoding}
    assert (await client.post(path, content=compress(body), headers=headers)).status_code == 200
    bomb = await client.post(path, content=compress(bytes(100_000)), headers=headers)
    assert (bomb.status_code, message(bomb)[:22]) == (too_large(path), "Decompressed data size")
    cut = await client.post(path, content=compress(body)[:-5], headers=headers)
    assert (cut.status_code, "cannot be decompressed" in message(cut)) == (400, True)


async def test_an_encoding_nobody_knows(client: httpx.AsyncClient) -> None:
    refused = await client.post("/v1/completions", content=b"{}", headers={"content-encoding": "br"})
    assert (refused.status_code, message(refused)) == (501, "Unsupported compression type")
    assert refused.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("path", EVERY)
async def test_too_large(client: httpx.AsyncClient, path: str) -> None:
    refused = await client.post(path, content=b"{" + b" " * 2000)
    assert refused.status_code == too_large(path)
    assert "2001 bytes exceeds the maximum allowed input size of 2000 bytes" in message(refused)


@pytest.mark.parametrize("path", EVERY)
@pytest.mark.parametrize("media", FORMS)
async def test_a_form_is_called_one(client: httpx.AsyncClient, path: str, media: str) -> None:
    refused = await client.post(path, content=b"prompt=hi", headers={"content-type": media})
    assert refused.status_code == 400
    assert message(refused).startswith(f"the body is a form ({media.partition(';')[0]}), not JSON")


async def test_curl_calls_json_a_form(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v2/repository/index", headers={"content-type": FORMS[0]})).status_code == 200
    for path, body in DOORS.items():
        content = b"\n  " + json.dumps(body).encode()
        assert (await client.post(path, content=content, headers={"content-type": FORMS[0]})).status_code == 200


NUMBERS = {"inputs": [{"name": "MATRIX", "datatype": "FP32", "shape": [1, 2, 1], "data": [1, 2]}]}


@pytest.mark.parametrize("path", [*DOORS, "/v2/models/llm/generate", "/v2/models/numbers/infer"])
async def test_a_byte_order_mark_is_no_part_of_json(client: httpx.AsyncClient, gateway: Any, path: str) -> None:
    gateway.responses = (InferResponse((), final=True),) if path.startswith("/v2/models") else None
    text = json.dumps({"text_input": "hi"} if "generate" in path else DOORS.get(path, NUMBERS))
    sent = [text.encode("utf-8-sig"), b"\xef\xbb\xbf" + b" " * 1000 + text.encode(), text.encode("utf-16")]
    marked, long, wide = [await client.post(path, content=body) for body in sent]
    assert [marked.status_code, long.status_code, wide.status_code] == [200, 200, 400]
    assert message(wide) == "the body is not valid JSON: its byte order mark is UTF-16's, and JSON is UTF-8"
    if path != "/v2/models/llm/generate":  # which takes no compressed bodies
        zipped = await client.post(path, content=gzip.compress(sent[0]), headers={"content-encoding": "gzip"})
        assert zipped.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("DELETE", "/v2/models/llm/infer", {"POST"}),
        ("POST", "/v2/health/live", {"GET", "HEAD"}),
        ("PUT", "/v2/logging", {"GET", "HEAD", "POST"}),
        ("PUT", "/v1/models/llm", {"GET", "HEAD"}),
    ],
)
async def test_a_method_that_is_not_there(client: httpx.AsyncClient, method: str, path: str, allowed: set[str]) -> None:
    refused = await client.request(method, path)
    assert refused.status_code == 405
    assert set(refused.headers["allow"].split(", ")) == allowed
