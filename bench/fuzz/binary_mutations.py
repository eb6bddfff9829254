"""Mutants of v2's `infer` with raw tensors: wrong lengths, wrong tensors behind a right header, broken compression.

Knows the layout of such a body and nothing of HTTP. Draws from the `Random` that its caller gives.
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

from .json_mutations import HUGE, STRANGE

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
        return b"".join(struct.pack("<I", len(each.encode())) + each.encode() for each in values)
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
