"""Mutants for the HTTP endpoints: whole requests, wrong in the body, its raw tensors or its framing.

A mutant is drawn from (seed, number) alone: each can be made again without those before it.
"""

import gzip
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from random import Random
from typing import Any, NamedTuple

from .json_mutations import HUGE, MUTATIONS, STRANGE, Tree

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


_LENGTH = "Inference-Header-Content-Length"
_DATATYPES = ("BOOL", "UINT64", "INT8", "INT32", "FP16", "FP32", "FP64", "BF16", "BYTES", "", "int32", "\0")
_SHAPES: tuple[Any, ...] = (
    *([], [0], [-1], [1, 1], [2**31], [2**40, 2**40], [2**62, 4], [1] * 100, [1.5], "1", None, [True]),
)


class RawRequest(NamedTuple):
    """A request: its JSON header as a tree, and the tensors behind it."""

    header: dict[str, Any]
    blobs: tuple[bytes, ...]


class EncodedRequest(NamedTuple):
    """A body, and the HTTP headers that describe it."""

    body: bytes
    headers: tuple[str, ...]


def to_raw_request(document: Mapping[str, Any]) -> RawRequest:
    """The request whose data are JSON, with the same data as raw tensors."""
    header, blobs = deepcopy(dict(document)), []
    for given in header["inputs"]:
        blobs.append(_raw(given["datatype"], given.pop("data")))
        given["parameters"] = {"binary_data_size": len(blobs[-1])}
    header["parameters"] = {**header.get("parameters", {}), "binary_data_output": True}
    return RawRequest(header, tuple(blobs))


def _raw(datatype: str, values: list[Any]) -> bytes:
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value.encode())) + value.encode() for value in values)
    return struct.pack("<" + {"FP32": "f", "INT32": "i", "BOOL": "?"}[datatype] * len(values), *values)


def encode_request(raw: RawRequest, length: object = None) -> EncodedRequest:
    """The body and headers of the request; `length` replaces the length of its JSON header, if given."""
    head = json.dumps(raw.header).encode()
    said = len(head) if length is None else length
    return EncodedRequest(head + b"".join(raw.blobs), (f"{_LENGTH}: {said}",))


def wrong_header_length(random: Random, raw: RawRequest) -> EncodedRequest:
    size = len(json.dumps(raw.header))
    lengths = (0, 1, -1, size - 1, size + 1, size // 2, 10**6, 2**31, 2**63, 10**40, "", "x", "1e3", "0x10", f"+{size}")
    return encode_request(raw, random.choice(lengths))


def wrong_tensor(random: Random, raw: RawRequest) -> EncodedRequest:
    lying = struct.pack("<I", random.choice((0, 1, 2**31, 2**32 - 1)))
    blob = random.choice((b"", b"\0", lying, lying + b"x", b"\xff" * 12, random.randbytes(1000), bytes(100_000)))
    blobs = list(raw.blobs)
    blobs[random.randrange(len(blobs))] = blob
    return encode_request(raw._replace(blobs=tuple(blobs)))


def wrong_tensor_size(random: Random, raw: RawRequest) -> EncodedRequest:
    sizes: tuple[Any, ...] = (0, 1, 3, -1, 2**31, 2**63, 2**64, 10**30, 1.5, "8", None, True, [])
    return encode_request(
        _input(random, raw, lambda given: given.update(parameters={"binary_data_size": random.choice(sizes)}))
    )


def wrong_tensor_shape(random: Random, raw: RawRequest) -> EncodedRequest:
    return encode_request(_input(random, raw, lambda given: given.update(shape=random.choice(_SHAPES))))


def wrong_tensor_type(random: Random, raw: RawRequest) -> EncodedRequest:
    return encode_request(_input(random, raw, lambda given: given.update(datatype=random.choice(_DATATYPES))))


def wrong_source(random: Random, raw: RawRequest) -> EncodedRequest:
    """A tensor with data twice, nowhere, or in an unknown shared-memory region."""
    region = {"shared_memory_region": "r", "shared_memory_byte_size": random.choice((0, 4, -1, 2**63))}
    ways: tuple[Callable[[dict[str, Any]], object], ...] = (
        lambda given: given.update(data=[1]),
        lambda given: given.pop("parameters"),
        lambda given: given.update(parameters=region),
        lambda given: given["parameters"].update(region),
    )
    return encode_request(_input(random, raw, random.choice(ways)))


def wrong_output(random: Random, raw: RawRequest) -> EncodedRequest:
    values = deepcopy(STRANGE + HUGE)
    key = random.choice(("binary_data", "classification", "shared_memory_region", "shared_memory_byte_size"))
    name = random.choice(("text_output", "OUT", "output_ids", "", "no"))
    outputs = [{"name": name, "parameters": {key: random.choice(values)}}] * random.choice((1, 1, 2))
    return encode_request(raw._replace(header={**raw.header, "outputs": outputs}))


@cache
def _bombs() -> tuple[bytes, bytes]:
    zeros = bytes(8 << 20)
    return gzip.compress(zeros), zlib.compress(zeros)


def compressed(random: Random, raw: RawRequest) -> EncodedRequest:
    """The body compressed: rightly, wrongly, by another algorithm than its header names, or to more than the limit."""
    body, headers = encode_request(raw)
    name = random.choice(("gzip", "deflate", "br", "gzip, deflate", "x"))
    ways = (
        *(gzip.compress(body), zlib.compress(body), body, gzip.compress(body)[:-5], zlib.compress(body) + b"x"),
        *(*_bombs(), gzip.compress(body) * 2, b""),
    )
    accepted = random.choice(("gzip", "deflate;q=0.5, gzip;q=x", "*", "", "identity;q=0", "gzip;;;q=", "\xff"))
    return EncodedRequest(random.choice(ways), (*headers, f"Content-Encoding: {name}", f"Accept-Encoding: {accepted}"))


def raw_alone(random: Random, raw: RawRequest) -> EncodedRequest:
    return EncodedRequest(random.choice((*raw.blobs, b"", random.randbytes(1000))), (f"{_LENGTH}: 0",))


def _input(random: Random, raw: RawRequest, change: Callable[[dict[str, Any]], object]) -> RawRequest:
    header = deepcopy(raw.header)
    change(random.choice(header["inputs"]))
    return raw._replace(header=header)


BINARIES: Mapping[str, Callable[[Random, RawRequest], EncodedRequest]] = {
    each.__name__: each
    for each in (
        *(wrong_header_length, wrong_tensor, wrong_tensor_size, wrong_tensor_shape, wrong_tensor_type, wrong_source),
        *(wrong_output, compressed, raw_alone),
    )
}
"""Every way to make such a request wrong, by name. Some leave it right by chance."""
