"""Mutants for the HTTP endpoints: whole requests, wrong in the body or in its framing.

A mutant is drawn from (seed, number) alone: each can be made again without those before it.
"""

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

from .binary_mutations import BINARIES, to_raw_request
from .json_mutations import MUTATIONS, Tree

LIMIT = 1 << 20
"""Bytes of a body that the server under proof is told to allow."""

_FRAMING_SHARE = 0.2
_BINARY_SHARE = 0.6
"""Of the requests that may bring raw tensors."""


class ValidRequest(NamedTuple):
    """A valid request to one endpoint."""

    path: str
    body: Tree


class HttpMutant(NamedTuple):
    """`wire`: all bytes. `unframed`: its end is undefined, so closing the connection is an answer too."""

    kind: str
    path: str
    wire: bytes
    unframed: bool = False


def valid_requests(model: str, identity: str = "") -> tuple[ValidRequest, ...]:
    """One or two requests for every endpoint that takes a body, to a language model and an identity model."""
    return (*_of_language(model), *_of_control(model), *(_of_identity(identity) if identity else ()))


def _of_language(model: str) -> tuple[ValidRequest, ...]:
    few = {"max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "seed": 7}
    v2, chat = f"/v2/models/{model}", [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hello"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    openai = {"model": model, **few, "stop": ["zz", "yy"], "logit_bias": {"5": 1.5}, "n": 2, "presence_penalty": 0.1}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    triton = {"parameters": {"top_k": 5, "min_p": 0.1}, "bad_words": ["foo"], "stop_words": ["zz"], "id": "a"}
    return (
        ValidRequest(f"{v2}/generate", {"text_input": "def f(x):", **few, **triton, "n": 2}),
        ValidRequest(
            f"{v2}/generate", {"input_ids": [5, 6, 7], "max_tokens": 3, "return_log_probs": True, "timeout": 10**7}
        ),
        ValidRequest(f"{v2}/generate_stream", {"text_input": "def f(x):", **few, **triton}),
        ValidRequest(f"{v2}/generate_stream", {"input_ids": [5, 6, 7], "sampling_parameters": '{"max_tokens": 3}'}),
        ValidRequest("/v1/completions", {"prompt": ["one", "two"], **openai, "logprobs": 2}),
        ValidRequest("/v1/completions", {"prompt": [5, 6, 7], "model": model, "max_tokens": 3, **stream}),
        ValidRequest("/v1/chat/completions", {"messages": chat, **openai, "logprobs": True, "top_logprobs": 2}),
        ValidRequest("/v1/chat/completions", {"messages": parts, "model": model, "max_completion_tokens": 3, **stream}),
        ValidRequest("/tokenize", {"model": model, "prompt": "Hello", "add_special_tokens": False}),
        ValidRequest("/tokenize", {"model": model, "messages": chat, "add_generation_prompt": True}),
        ValidRequest("/detokenize", {"model": model, "tokens": [1, 2, 3, 4]}),
        ValidRequest(
            f"{v2}/infer", {"inputs": [_tensor("text_input", "BYTES", "Hello")], "parameters": few, "id": "a"}
        ),
        ValidRequest(
            f"{v2}/infer", {"inputs": [_tensor("input_ids", "INT32", 5, 6)], "outputs": [{"name": "output_ids"}]}
        ),
    )


def _of_control(model: str) -> tuple[ValidRequest, ...]:
    """Requests to control endpoints that change nothing that the proof observes, such as the log."""
    return (
        ValidRequest("/v2/repository/index", {"ready": True}),
        ValidRequest(
            f"/v2/models/{model}/trace/setting", {"trace_level": ["OFF"], "trace_rate": "5", "trace_count": "7"}
        ),
    )


def _of_identity(model: str) -> tuple[ValidRequest, ...]:
    numbers, path = {**_tensor("IN", "FP32", *range(16)), "shape": [1, 16]}, f"/v2/models/{model}"
    outputs = [{"name": "OUT", "parameters": {"classification": 3}}]
    limits = {"priority": 1, "timeout": 10**7, "a": "b"}
    return (
        ValidRequest(f"{path}/infer", {"inputs": [numbers], "parameters": limits}),
        ValidRequest(f"{path}/infer", {"inputs": [numbers], "outputs": outputs, "id": "a"}),
        ValidRequest(f"{path}/generate", {"IN": [*range(16)], "id": "a"}),
    )


def _tensor(name: str, datatype: str, *values: Any) -> Tree:
    return {"name": name, "datatype": datatype, "shape": [len(values)], "data": [*values]}


def http_mutant(valid: tuple[ValidRequest, ...], seed: int, number: int) -> HttpMutant:
    """The mutant of this number."""
    random = Random(f"{seed}:{number}")
    path, tree = random.choice(valid)
    if random.random() < _FRAMING_SHARE:
        kind = random.choice(list(FRAMINGS))
        return FRAMINGS[kind](random, path, json.dumps(tree).encode())._replace(kind=kind)
    if "inputs" in tree and random.random() < _BINARY_SHARE:
        kind = random.choice(list(BINARIES))
        body, headers = BINARIES[kind](random, to_raw_request(tree))
        return HttpMutant(kind, path, request(path, body, *headers))
    kind = random.choice(list(MUTATIONS))
    return HttpMutant(kind, path, request(path, MUTATIONS[kind](random, tree)))


def request(path: str, body: bytes, *headers: str) -> bytes:
    """A valid POST."""
    return head(path, f"Content-Length: {len(body)}", *headers) + body


def head(path: str, *headers: str) -> bytes:
    """The head of a POST. The connection is for one request: an answer ends with it."""
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", "")
    return "\r\n".join(lines).encode("latin-1")


# How a body is sent. Each gets a valid body, and fills in everything but the kind.


def wrong_length(random: Random, path: str, body: bytes) -> HttpMutant:
    size = len(body)
    lengths = (size + 1, size + 1000, size // 2, 0, -1, -size, LIMIT + 1, 2**31, 2**63, 2**64, 10**40)
    length = random.choice((*map(str, lengths), "x", "", "1e3", "0x10", f"+{size}", f"{size},{size}", f" {size} \0"))
    return HttpMutant("", path, head(path, f"Content-Length: {length}") + body, unframed=True)


def two_lengths(random: Random, path: str, body: bytes) -> HttpMutant:
    other = random.choice((0, 1, len(body), len(body) * 2))
    return HttpMutant("", path, request(path, body, f"Content-Length: {other}"), unframed=True)


def length_and_chunks(random: Random, path: str, body: bytes) -> HttpMutant:
    return HttpMutant("", path, request(path, chunked(body), "Transfer-Encoding: chunked"), unframed=True)


def chunked(body: bytes, size: int = 16) -> bytes:
    """The body in chunks of `size` bytes."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def good_chunks(random: Random, path: str, body: bytes) -> HttpMutant:
    return HttpMutant("", path, head(path, "Transfer-Encoding: chunked") + chunked(body, random.choice((1, 7, 10_000))))


def bad_chunks(random: Random, path: str, body: bytes) -> HttpMutant:
    whole = chunked(body)
    ways = (
        whole.replace(b"10\r\n", random.choice((b"xyz\r\n", b"-10\r\n", b"\r\n", b"10", b"0x10\r\n", b"11\r\n")), 1),
        whole.replace(b"10\r\n", b"f" * random.choice((8, 16, 17, 1000)) + b"\r\n", 1),
        whole.replace(b"10\r\n", b"10;" + b"e=" * 20_000 + b"\r\n", 1),
        whole[: random.randrange(len(whole))],
        whole[:-4] + b"0\r\nTrailer" + b"x" * 70_000,
        body,
    )
    return HttpMutant("", path, head(path, "Transfer-Encoding: chunked") + random.choice(ways), unframed=True)


def oversize(random: Random, path: str, body: bytes) -> HttpMutant:
    padding = b" " * (LIMIT + 1 - len(body)) if random.random() < 0.5 else b'"' + b"x" * LIMIT
    large = body + padding
    if random.random() < 0.5:
        return HttpMutant("", path, head(path, "Transfer-Encoding: chunked") + chunked(large, 1 << 16), unframed=True)
    return HttpMutant("", path, request(path, large), unframed=True)


def odd_headers(random: Random, path: str, body: bytes) -> HttpMutant:
    headers = (
        *("Content-Type: text/plain", "Content-Type: multipart/form-data; boundary=x", "Content-Type: \xff"),
        *("Content-Encoding: gzip", "Content-Encoding: identity", "Transfer-Encoding: gzip", "Upgrade: websocket"),
        *("Authorization: Bearer \xff", "endpoint-load-metrics-format: bogus", "X: " + "x" * 100_000, "\0: \0", " : x"),
        *("Inference-Header-Content-Length: 10", "Inference-Header-Content-Length: x", "no colon", "Host: other"),
    )
    return HttpMutant("", path, request(path, body, random.choice(headers)), unframed=True)


def odd_path(random: Random, path: str, body: bytes) -> HttpMutant:
    odd = (
        *(path + "/", path + "?x=%ff", path.upper(), path.replace("/", "//"), path + "%00", "*", "", "http://x" + path),
        *("/v2/models/%ff/generate", "/v2/models/" + "x" * 70_000 + "/generate", "/v2/models//generate", "/../etc"),
        *("/v2/models/no/generate", "/v2/models/no/versions/1/generate", "/v2/models/no/versions/x/generate"),
        *("/v2/models/no/versions/99999999999999999999999/generate_stream", "/v2/models/\xe9/generate"),
    )
    return HttpMutant("", path, request(random.choice(odd), body), unframed=True)


def not_http(random: Random, path: str, body: bytes) -> HttpMutant:
    whole = request(path, body)
    methods = (b"GET", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"BREW", b"PRI", b"")
    ways = (
        whole.replace(b"POST", random.choice(methods), 1),
        whole.replace(b"HTTP/1.1", random.choice((b"HTTP/9.9", b"HTTP/0.9", b"HTTP/1.0", b"", b"ICY")), 1),
        whole.replace(b"\r\n", b"\n"),
        whole[: random.randrange(len(whole))],
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.randbytes(500),
        random.randbytes(random.choice((1, 100, 10_000))),
        b"\r\n" * 1000,
    )
    return HttpMutant("", path, random.choice(ways), unframed=True)


_Framing = Callable[[Random, str, bytes], HttpMutant]

FRAMINGS: Mapping[str, _Framing] = {
    each.__name__: each
    for each in (
        *(wrong_length, two_lengths, length_and_chunks, good_chunks, bad_chunks, oversize),
        *(odd_headers, odd_path, not_http),
    )
}
"""Every way to send a body wrongly, by name."""
