"""Long protobuf messages, taken apart without decoding their tensors: protobuf would hold the event loop for them.

Knows protobuf's wire format (https://protobuf.dev/programming-guides/encoding/) and which fields of a ModelInferRequest
are tensors; not what they mean.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb

ProtoMessage: TypeAlias = Any
"""A protobuf message: the published modules are generated at import and have no types."""

LARGE_BYTES = 1 << 16
"""Messages, and typed contents in them, of at most so many bytes are decoded at once."""

_MOST_FIELDS = 4096
_MOST_BYTES = 1 << 20
"""Bytes that a long message may have beside its tensors."""

_INPUTS, _RAW, _CONTENTS = 5, 7, 5
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_STRING = 8 << 3 | _DELIMITED
"""The tag of an element of `bytes_contents`."""

_FIXED = {6: 4, 7: 8}
"""By the number of a field of InferTensorContents whose elements have a fixed size: that size in bytes."""


class _Field(NamedTuple):
    """A field of an encoded message. `encoded`: its tag, length and value."""

    number: int
    wire: int
    value: memoryview
    encoded: memoryview


class LazyInferRequest:
    """A ModelInferRequest whose tensors are not decoded. `raw_input_contents`, and by the index of their input the long
    typed `contents`, are views of the received bytes. All other fields are those of the decoded `message`."""

    def __init__(self, message: ProtoMessage, raw: list[memoryview], contents: dict[int, memoryview]) -> None:
        self._message = message
        self.raw_input_contents = raw
        self.contents = contents

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


def deserialize_infer(data: bytes) -> ProtoMessage:
    """Deserialize a ModelInferRequest, a long one into a `LazyInferRequest`. Raises `DecodeError` if the bytes are no
    such message, or it has more fields, or more beside tensors, than any has."""
    if len(data) <= LARGE_BYTES:
        return pb.ModelInferRequest.FromString(data)
    rest, inputs = bytearray(), 0
    raw: list[memoryview] = []
    contents: dict[int, memoryview] = {}
    for number, wire, value, encoded in _some_fields(memoryview(data)):
        if (number, wire) == (_RAW, _DELIMITED):
            raw.append(value)
        elif (number, wire) == (_INPUTS, _DELIMITED):
            if len(value) > LARGE_BYTES:
                bare, only = _without_contents(value)
                encoded = memoryview(delimited(_INPUTS, bare))
                if only is not None:
                    contents[inputs] = only
            rest += encoded
            inputs += 1
        else:
            rest += encoded
        _check_rest(rest)
    return LazyInferRequest(pb.ModelInferRequest.FromString(bytes(rest)), raw, contents)


def check_message_size(data: bytes, most: int) -> None:
    """Raises `DecodeError` for an encoded message of more than `most` bytes, or too many fields."""
    if len(data) > most:
        raise DecodeError(f"a message of {len(data)} bytes is longer than the {most} there may be")
    if len(data) > LARGE_BYTES:
        for _ in _some_fields(memoryview(data)):
            pass


def iter_contents(view: memoryview) -> Iterator[ProtoMessage]:
    """Decode an InferTensorContents in pieces of about `LARGE_BYTES`, each a message of its own."""
    at = 0
    for end in _string_runs(view):
        yield pb.InferTensorContents.FromString(view[at:end])
        at = end
    held = bytearray()
    for number, wire, value, encoded in _fields(view[at:]):
        if len(held) + len(encoded) > LARGE_BYTES and held:
            yield pb.InferTensorContents.FromString(bytes(held))
            held.clear()
        if len(encoded) <= LARGE_BYTES or wire != _DELIMITED or number == 8:
            held += encoded
            continue
        for piece in _packed_pieces(value, _FIXED.get(number)):
            yield pb.InferTensorContents.FromString(delimited(number, piece))
    yield pb.InferTensorContents.FromString(bytes(held))


def _string_runs(view: memoryview) -> Iterator[int]:
    """The ends of pieces of nothing but short strings, which a message of strings begins with: millions of fields of
    their own would take seconds."""
    at, last = 0, len(view) - 1
    while True:
        begin, stop = at, min(at + LARGE_BYTES, last)
        while at < stop and view[at] == _STRING and (size := view[at + 1]) < 0x80:
            at += 2 + size
        if at == begin or at > len(view):
            return
        yield at


def _packed_pieces(values: memoryview, width: int | None) -> Iterator[memoryview]:
    """Slices of whole elements. Without a fixed `width` elements are varints, whose last byte has no high bit."""
    begin, most = 0, LARGE_BYTES - LARGE_BYTES % (width or 1)
    while begin < len(values):
        end = min(begin + most, len(values))
        if width is None and end < len(values):
            last = np.flatnonzero(np.frombuffer(values[end - 10 : end], np.uint8) < 0x80)
            if not len(last):
                raise _broken()
            end += int(last[-1]) - 9
        yield values[begin:end]
        begin = end


def _without_contents(encoded_input: memoryview) -> tuple[bytes, memoryview | None]:
    """An encoded input without its typed contents, and these, if it has any."""
    rest, contents = bytearray(), []
    for number, wire, value, encoded in _some_fields(encoded_input):
        if (number, wire) == (_CONTENTS, _DELIMITED):
            contents.append(value)
        else:
            rest += encoded
            _check_rest(rest)
    if len(contents) > 1:  # of several, protobuf makes one
        contents = [memoryview(b"".join(contents))]
    return bytes(rest), contents[0] if contents else None


def _check_rest(rest: bytearray) -> None:
    if len(rest) > _MOST_BYTES:
        raise DecodeError(f"inference.ModelInferRequest has more than {_MOST_BYTES} bytes beside its tensors")


def _some_fields(view: memoryview) -> Iterator[_Field]:
    for count, field in enumerate(_fields(view)):
        if count == _MOST_FIELDS:
            raise DecodeError(f"inference.ModelInferRequest, or an input of it, has more than {_MOST_FIELDS} fields")
        yield field


def _fields(view: memoryview) -> Iterator[_Field]:
    """The fields of an encoded message; raises `DecodeError` where it is none."""
    at = 0
    while at < len(view):
        begin = at
        tag, at = _varint(view, at)
        wire = tag & 7
        if wire == _DELIMITED:
            size, at = _varint(view, at)
        elif wire == _VARINT:
            size = _varint(view, at)[1] - at
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise _broken()
        if at + size > len(view):
            raise _broken()
        yield _Field(tag >> 3, wire, view[at : at + size], view[begin : at + size])
        at += size


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends."""
    number = shift = 0
    while at < len(view) and shift < 70:
        byte = view[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
        shift += 7
    raise _broken()


def _broken() -> DecodeError:
    return DecodeError("Error parsing message with type 'inference.ModelInferRequest'")


def delimited(number: int, value: bytes | memoryview) -> bytes:
    """A field of bytes, text or a message."""
    return b"".join((delimiter(number, len(value)), value))


@lru_cache(1024)
def delimiter(number: int, size: int) -> bytes:
    """The beginning of a field whose value of so many bytes follows."""
    out = bytearray()
    for varint in (number << 3 | _DELIMITED, size):
        while varint > 0x7F:
            out.append(varint & 0x7F | 0x80)
            varint >>= 7
        out.append(varint)
    return bytes(out)
