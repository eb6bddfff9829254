"""The v2 endpoints of a real server, to the byte."""

import json
import re
import socket
from typing import Any

import httpx
import pytest

BODY = b'{"text_input": "def fibonacci", "max_tokens": 40}'


def raw(server: Any, path: str, body: bytes) -> tuple[bytes, bytes]:
    """Head and body of an answer as they came over the wire."""
    with socket.create_connection(server.address) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head_, _, rest = answer.partition(b"\r\n\r\n")
    return head_, rest


def unchunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        assert body[length : length + 2] == b"\r\n"
        whole, body = whole + body[:length], body[length + 2 :]
        if not length:
            assert not body
    return whole


def test_the_stream_is_framed_to_the_byte(server: Any) -> None:
    head, body = raw(server, "/v2/models/fake/generate_stream", BODY)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\ncontent-type: text/event-stream; charset=utf-8" in head
    assert b"\r\ntransfer-encoding: chunked" in head
    events = unchunked(body)
    pattern = rb'data: \{"model_name":"fake","model_version":"1","text_output":("(?:[^"\\]|\\.)*")\}\n\n'
    assert re.fullmatch(b"(?:%s)+" % pattern, events), events
    streamed = "".join(json.loads(text) for text in re.findall(pattern, events))
    _, whole = raw(server, "/v2/models/fake/generate", BODY)
    assert (
        whole
        == b'{"model_name":"fake","model_version":"1","text_output":%s}'
        % json.dumps(streamed, ensure_ascii=False).encode()
    )


def test_a_real_model_streams_what_it_generates(server: Any) -> None:
    body = {"text_input": "def fibonacci", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    body["return_finish_reason"] = True
    whole = httpx.post(f"{server.url}/v2/models/tiny/generate", json=body).json()
    with httpx.stream("POST", f"{server.url}/v2/models/tiny/generate_stream", json=body) as response:
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    assert events[-1]["finish_reason"] == whole["finish_reason"] == "length"


def test_ids_and_extras_come_back(server: Any) -> None:
    body = {"input_ids": [5, 6], "max_tokens": 3, "id": "a-7", "stop_token_ids": [99], "return_output_ids": True}
    answer = httpx.post(f"{server.url}/v2/models/fake/generate", json=body).json()
    assert answer["id"] == "a-7"
    assert answer["output_ids"] == [7, 8, 9]
    assert list(answer) == sorted(answer)


def test_stop_tokens_end_it(server: Any) -> None:
    body = {"input_ids": [5], "max_tokens": 9, "stop_token_ids": [8], "return_finish_reason": True}
    answer = httpx.post(f"{server.url}/v2/models/fake/generate", json=body).json()
    assert answer["finish_reason"] == "stop"


def test_health_and_metadata(server: Any) -> None:
    assert server.status("/v2/health/live") == 200
    assert server.status("/v2/health/ready") == 400, "a known model is broken, and readiness is strict"
    assert server.status("/v2/models/tiny/ready") == 200
    assert server.status("/v2/models/broken/ready") == 400
    metadata = httpx.get(f"{server.url}/v2").json()
    assert metadata["name"] == "triton"
    assert httpx.get(f"{server.url}/v2/models/tiny").json()["inputs"][0]["name"] == "text_input"
    broken = httpx.post(f"{server.url}/v2/models/broken/generate", json={})
    assert broken.json() == {"error": "Request for unknown model: 'broken' has no available versions"}


def test_start_up_tells_its_phases(server: Any) -> None:
    said = server.said if server.url else ""
    assert re.search(r"broken: FAILED: .*/broken/config.pbtxt:3: unknown parameter 'bogus'; known are", said)
    assert re.search(r"tiny: weights \d+\.\d\d? s\n", said)
    assert re.search(r"tiny: cache \d+\.\d\d s  \d+ blocks of 16 tokens\n", said)
    assert re.search(r"tiny: warm-up \d+\.\d\d? s\n", said)
    assert re.search(r"Try: curl -N http://127.0.0.1:\d+/v2/models/fake/generate_stream -d '\{", said)
    assert re.search(r"Metrics on http://127.0.0.1:\d+/metrics", said)


V2_BODIES: list[tuple[Any, str]] = [
    (b"", "text_input"),
    (b"{", "JSON"),
    (b"\x00\xff", "JSON"),
    (b"[" * 100_000, "JSON"),
    (b'{"text_input": "x", "n": ' + b"1" * 5000 + b"}", "JSON"),
    ({"text_input": 1}, "text_input"),
    ({"text_input": "x", "stream": "yes"}, "stream"),
    ({"text_input": "x", "input_ids": [1]}, "text_input"),
    ({"input_ids": [10**6]}, "10"),
    ({"input_ids": [-1]}, "-1"),
    ({"input_ids": []}, ""),
    ({"text_input": ""}, ""),
    ({"text_input": "x", "max_tokens": -5}, "max_tokens"),
    ({"text_input": "x", "max_tokens": 0}, "max_tokens"),
    ({"text_input": "x", "max_tokens": 2.5}, "max_tokens"),
    ({"text_input": "x", "max_tokens": "many"}, "max_tokens"),
    ({"text_input": "x", "temperature": -1}, "temperature"),
    (b'{"text_input": "x", "temperature": NaN}', "temperature"),
    (b'{"text_input": "x", "temperature": 1e999}', "temperature"),
    ({"text_input": "x", "top_p": 2}, "top_p"),
    ({"text_input": "x", "top_k": -9}, "top_k"),
    ({"text_input": "x", "seed": 2**64}, "seed"),
    ({"text_input": "x", "stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"text_input": "x", "beam_width": 4}, "beam_width"),
    ({"text_input": "x", "temprature": 1}, "temprature"),
    ({"text_input": "x", "mirostat": 1}, "mirostat"),
    ({"text_input": "x", "sampling_parameters": "{"}, "sampling_parameters"),
    ({"text_input": "x", "sampling_parameters": '{"cache_salt": "\\ud800"}'}, ""),
    ({"text_input": "x", "sampling_parameters": '{"\\ud800": 1}'}, ""),
    ({"text_input": "x " * 3000}, "maximum context length is 2048"),
]


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
@pytest.mark.parametrize(("body", "names"), V2_BODIES)
def test_bad_requests_are_refused(server: Any, endpoint: str, body: Any, names: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(f"{server.url}/v2/models/fake/{endpoint}", content=content, timeout=60)
    assert response.status_code == 400, response.text
    assert names in response.json()["error"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 2**63),
        ("top_k", 2**31),
        ("max_tokens", 2**63),
        ("max_tokens", 2**40),
        ("seed", -(2**63)),
        ("seed", 2**64 - 1),
        ("priority", 2**63),
        ("priority", -1),
        ("temperature", 1e308),
        ("temperature", 5e-324),
        ("top_p", 5e-324),
        ("stop_token_ids", [2**63]),
        ("stop_token_ids", [2**31]),
    ],
)
@pytest.mark.parametrize("model", ["fake", "tiny"])
def test_extreme_numbers_never_break_the_engine(server: Any, model: str, field: str, value: Any) -> None:
    body = {"text_input": "x", "max_tokens": 2, field: value}
    response = httpx.post(f"{server.url}/v2/models/{model}/generate", json=body, timeout=60)
    assert response.status_code in (200, 400), response.text
    again = httpx.post(f"{server.url}/v2/models/{model}/generate", json={"text_input": "x"}, timeout=60)
    assert again.status_code == 200, again.text


def test_what_shapes_a_text_by_tensorrts_names(server: Any) -> None:
    url, body = f"{server.url}/v2/models/tiny/generate", {"text_input": "def fib", "max_tokens": 8, "temperature": 0}
    body["ignore_eos"] = True
    plain = httpx.post(url, json=body).json()["text_output"]
    several = {"num_return_sequences": 2, "return_log_probs": True, "temperature": 1, "random_seed": 3}
    answer = httpx.post(url, json=body | several).json()
    rows = (answer["output_log_probs"][:8], answer["output_log_probs"][8:])
    assert answer["cum_log_probs"] == pytest.approx([sum(row) for row in rows], rel=1e-5)
    assert len(set(answer["text_output"])) == 2
    stopped = httpx.post(url, json=body | {"stop_words": [plain[2:4]], "repetition_penalty": 1.0}).json()
    assert stopped["text_output"] == plain[: plain.index(plain[2:4])]
    letters = [letter for letter in plain if letter.isascii() and letter.isalpha()]
    banned = httpx.post(url, json=body | {"bad_words": letters, "presence_penalty": 0.5, "min_p": 0.1}).json()
    assert letters
    assert banned["text_output"] != plain


def test_several_answers_stream_beside_each_other(server: Any) -> None:
    body = {"text_input": "def fibonacci", "max_tokens": 12, "temperature": 1, "random_seed": 3, "ignore_eos": True}
    body |= {"num_return_sequences": 2, "return_finish_reason": True}
    whole = httpx.post(f"{server.url}/v2/models/tiny/generate", json=body).json()
    with httpx.stream("POST", f"{server.url}/v2/models/tiny/generate_stream", json=body) as response:
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    streamed = ["".join(texts) for texts in zip(*(event["text_output"] for event in events), strict=True)]
    assert streamed == whole["text_output"]
    assert events[-1]["finish_reason"] == ["length", "length"]
    assert "" in events[0]["finish_reason"]
