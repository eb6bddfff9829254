"""Compression of requests and responses as tritonserver has it: gzip and deflate, and the headers that choose them."""

import zlib
from collections.abc import Sequence

from ...core.errors import CharoniaError, InvalidArgument, Unsupported
from ..size_limits import decompressed_too_large

ACCEPTED_ENCODINGS = "gzip, deflate"
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_LEVEL = 1
"""Numbers hardly shrink more at higher levels, which take several times as long."""


class UnsupportedEncoding(Unsupported):
    """A body in an encoding that is not served; the response names those that are."""

    def __init__(self) -> None:
        super().__init__("Unsupported compression type")


def content_coding(encoding: str) -> str:
    """The encoding that a `Content-Encoding` header names, in lower case, or "". Raises `UnsupportedEncoding`."""
    name = encoding.lower()
    if name in ("", "identity"):
        return ""
    if name not in _WINDOWS:
        raise UnsupportedEncoding
    return name


def decompress(body: bytes | bytearray, encoding: str, limit: int) -> bytes:
    """The decompressed body; raises `InvalidArgument` if it has more than `limit` bytes, or the body is broken."""
    machine = zlib.decompressobj(_WINDOWS[encoding])
    try:
        data = machine.decompress(body, limit + 1)
    except zlib.error as error:
        raise _broken(encoding, str(error)) from None
    if len(data) > limit:
        raise decompressed_too_large(limit)
    if not machine.eof or machine.unused_data:
        raise _broken(encoding, "data after its end" if machine.eof else "it is cut off")
    return data


def _broken(encoding: str, reason: str) -> CharoniaError:
    return InvalidArgument(f"the request body cannot be decompressed as {encoding}: {reason}")


def negotiate_encoding(accepted: str) -> str:
    """The encoding that an `Accept-Encoding` header prefers, the first of equals; "" for none."""
    best, most = "", 0.0
    for offer in accepted.split(","):
        name, *parameters = [part.strip().lower() for part in offer.split(";")]
        weights = [part.removeprefix("q=") for part in parameters if part.startswith("q=")]
        try:
            weight = float(weights[0]) if weights else 1.0
        except ValueError:
            weight = 0.0
        if weight > most and (name in _WINDOWS or name == "identity"):
            best, most = name, weight
    return "" if best == "identity" else best


def compress(parts: Sequence[bytes | memoryview], encoding: str) -> bytes:
    machine = zlib.compressobj(_LEVEL, wbits=_WINDOWS[encoding])
    return b"".join([*map(machine.compress, parts), machine.flush()])
