"""Requests that are alike but for their numbers: what is remembered reads as protobuf and the parser would."""

from typing import Any

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from charonia.api.grpc.known_requests import KnownRequest, KnownRequests
from charonia.api.grpc.messages import parse_infer_message
from charonia.api.grpc.settings import Caller
from charonia.core.errors import CharoniaError
from charonia.processes.client_shared_memory import SharedMemoryRegistry

SHAPES = {"A": (2, 3), "B": (1,), "C": (4,)}


def message(names: str = "A", first: float = 1.0, **fields: Any) -> Any:
    asked = pb.ModelInferRequest(model_name="m", **fields)
    for name in names:
        asked.inputs.add(name=name, datatype="FP32", shape=SHAPES[name])
        values = first + np.arange(np.prod(SHAPES[name]), dtype=np.float32)
        asked.raw_input_contents.append(values.tobytes())
    return asked


def told(read: Any) -> Any:
    """What a request asks for, however it was read; the error of one that asks for nothing."""
    if isinstance(read, DecodeError):
        return str(read)
    try:
        call = (
            read.call if isinstance(read, KnownRequest) else parse_infer_message(read, SharedMemoryRegistry(), Caller())
        )
    except CharoniaError as error:
        return error.message
    inputs = {
        name: (tensor.datatype, tensor.shape, tensor.data.dtype, tensor.data.tobytes())
        for name, tensor in call.request.inputs.items()
    }
    request = call.request
    return (
        read.model_name,
        read.model_version,
        request.id,
        inputs,
        request.outputs,
        dict(request.parameters),
        call.outputs,
    )


def read_by(known: KnownRequests, data: bytes) -> Any:
    try:
        return known.read(data)
    except DecodeError as error:
        return error


def test_the_second_of_its_kind_is_known() -> None:
    known = KnownRequests()
    assert not isinstance(known.read(message("AB").SerializeToString()), KnownRequest)
    again = message("AB", 7.0)
    request = known.read(again.SerializeToString())
    assert isinstance(request, KnownRequest)
    assert told(request) == told(again)
    data = request.call.request.inputs["B"].data
    assert (data.tolist(), data.flags.writeable) == ([7.0], False)
    assert request.with_parameters({"tenant": "a"}).request.parameters == {"tenant": "a"}
    assert request.with_parameters({}) is request.call


def test_what_differs_in_more_than_numbers_is_read_anew() -> None:
    known, other = KnownRequests(), message("AB")
    known.read(other.SerializeToString())
    other.outputs.add(name="OUT")
    for asked in (message("A"), message("AB", model_version="1"), message("AB", id="7"), other):
        first = known.read(asked.SerializeToString())
        assert not isinstance(first, KnownRequest)
        assert told(first) == told(asked)


def test_requests_with_more_than_tensors_of_numbers_are_not_remembered() -> None:
    with_parameter, text, typed = message(), pb.ModelInferRequest(model_name="m"), pb.ModelInferRequest(model_name="m")
    with_parameter.parameters["priority"].int64_param = 1
    text.inputs.add(name="A", datatype="BYTES", shape=(1,))
    text.raw_input_contents.append(b"\x01\x00\x00\x00a")
    typed.inputs.add(name="A", datatype="FP32", shape=(1,)).contents.fp32_contents.append(1)
    lent = message()
    lent.outputs.add(name="OUT").parameters["shared_memory_region"].string_param = "mine"
    wrong = message()
    wrong.inputs[0].shape[:] = [5]
    for asked in (message(id="7"), with_parameter, text, typed, lent, wrong):
        known, data = KnownRequests(), asked.SerializeToString()
        for _ in range(2):
            assert not isinstance(known.read(data), KnownRequest)


@given(
    names=st.sampled_from(["A", "AB", "ABC"]),
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=3),
    cut=st.integers(0, 3),
)
def test_whatever_bytes_come_behind_a_known_one_mean_what_they_meant(
    names: str, changes: list[tuple[int, int]], cut: int
) -> None:
    known, data = KnownRequests(), bytearray(message(names).SerializeToString())
    known.read(bytes(data))
    for at, byte in changes:
        data[at % len(data)] = byte
    encoded = bytes(data[: len(data) - cut])
    assert told(read_by(known, encoded)) == told(read_by(KnownRequests(), encoded))
