"""Long messages of gRPC: what is left as bytes at first is what protobuf would have made of it."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from charonia.api import infer_call
from charonia.api.grpc import wire_format
from charonia.api.grpc.messages import parse_infer_message
from charonia.api.grpc.settings import Caller
from charonia.api.grpc.wire_format import LazyInferRequest, check_message_size, deserialize_infer, iter_contents
from charonia.processes.client_shared_memory import SharedMemoryRegistry

CONTENTS = {
    "bool_contents": st.booleans(),
    "int_contents": st.integers(-(2**31), 2**31 - 1),
    "int64_contents": st.integers(-(2**63), 2**63 - 1),
    "uint_contents": st.integers(0, 2**32 - 1),
    "uint64_contents": st.integers(0, 2**64 - 1),
    "fp32_contents": st.floats(width=32),
    "fp64_contents": st.floats(),
    "bytes_contents": st.binary(max_size=9),
}


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is longer than a few bytes is long."""
    monkeypatch.setattr(wire_format, "LARGE_BYTES", 12)
    monkeypatch.setattr(infer_call, "LONG_STRING_BYTES", 12)


def _both(message: Any) -> tuple[Any, Any]:
    """What comes of it at once, and later."""
    data = message.SerializeToString()
    at_once = parse_infer_message(pb.ModelInferRequest.FromString(data), SharedMemoryRegistry(), Caller())
    read = deserialize_infer(data)
    assert isinstance(read, LazyInferRequest) == (len(data) > wire_format.LARGE_BYTES)
    return _all(at_once), _all(parse_infer_message(read, SharedMemoryRegistry(), Caller()))


def _all(call: Any) -> Any:
    async def decode() -> Any:
        return {**call.request.inputs, **{name: await each() for name, each in call.deferred.items()}}

    return asyncio.run(decode())


def _same(left: Any, right: Any) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        other = right[name]
        assert (tensor.datatype, tensor.shape, tensor.data.dtype) == (other.datatype, other.shape, other.data.dtype)
        same = tensor.data.tobytes() == other.data.tobytes() if tensor.datatype != "BYTES" else None
        assert list(tensor.data) == list(other.data) if same is None else same


@pytest.mark.usefixtures("_small")
@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from(sorted(CONTENTS)))
def test_typed_contents(data: Any, field: str) -> None:
    values = data.draw(st.lists(CONTENTS[field], max_size=20))
    datatype = {"bytes": "BYTES", "int": "INT32", "uint": "UINT32"}.get(field[: -len("_contents")], field[:-9].upper())
    tensor = {"name": "T", "datatype": datatype, "shape": [len(values)], "contents": {field: values}}
    _same(*_both(pb.ModelInferRequest(model_name="m", id="7", inputs=[tensor])))


@pytest.mark.usefixtures("_small")
@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.binary(max_size=5), max_size=8), max_size=3), st.floats(width=32, allow_nan=False))
def test_raw_contents(texts: list[list[bytes]], number: float) -> None:
    blobs = [b"".join(len(each).to_bytes(4, "little") + each for each in text) for text in texts]
    inputs = [{"name": f"T{place}", "datatype": "BYTES", "shape": [len(each)]} for place, each in enumerate(texts)]
    inputs.append({"name": "N", "datatype": "FP32", "shape": [2, 2]})
    blobs.append(np.full(4, number, np.float32).tobytes())
    request = pb.ModelInferRequest(model_name="m", inputs=inputs, raw_input_contents=blobs)
    request.parameters["priority"].int64_param = 3
    _same(*_both(request))


@pytest.mark.usefixtures("_small")
@given(st.binary(max_size=40))
def test_bytes_that_are_no_message(data: bytes) -> None:
    try:
        expected = pb.ModelInferRequest.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            _read_all(deserialize_infer(data))
    else:
        try:
            read = deserialize_infer(data)
        except DecodeError:
            return  # groups, which nobody sends
        assert (read.model_name, read.id, len(read.inputs)) == (expected.model_name, expected.id, len(expected.inputs))


def _read_all(read: Any) -> None:
    for view in getattr(read, "contents", {}).values():
        list(iter_contents(view))


@pytest.mark.parametrize("field", [4, 5, 6, 7])
def test_there_are_not_too_many_fields(field: int) -> None:
    with pytest.raises(DecodeError, match="more than 4096 fields"):
        deserialize_infer(bytes([field << 3 | 2, 0]) * math.ceil(wire_format.LARGE_BYTES / 2 + 1))


def test_what_is_beside_tensors_is_bounded() -> None:
    shape = pb.ModelInferRequest(inputs=[{"shape": [1] * (2 << 20)}]).SerializeToString()
    with pytest.raises(DecodeError, match="more than 1048576 bytes beside its tensors"):
        deserialize_infer(shape)
    with pytest.raises(DecodeError, match="longer than the 100 there may be"):
        check_message_size(bytes(101), 100)


@pytest.mark.parametrize("last", [b"c", bytes(127), bytes(128), bytes(1 << 17)])
def test_many_strings_come_as_protobuf_has_them(last: bytes) -> None:
    contents, read = (
        pb.InferTensorContents(bytes_contents=[b"ab", b""] * 40_000 + [last, b"d"]),
        pb.InferTensorContents(),
    )
    data = contents.SerializeToString()
    pieces = list(iter_contents(memoryview(data)))
    for piece in pieces:
        read.MergeFrom(piece)
    assert read == contents
    assert max(len(piece.bytes_contents) for piece in pieces) < 40_000
    for cut in (1, 2, 3, len(data) - 2, len(data) - 1):
        with pytest.raises(DecodeError):
            list(iter_contents(memoryview(data)[:cut]))
