"""Tensors over gRPC: whatever is in them comes back, raw, typed and by shared memory; and what is refused."""

import asyncio
import math
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from charonia.api.grpc import messages
from charonia.api.grpc.messages import parse_infer_message
from charonia.api.grpc.settings import Caller
from charonia.api.infer_call import InferCall
from charonia.core.errors import CharoniaError, Internal, InvalidArgument, NotFound
from charonia.core.model import ModelConfig
from charonia.core.request import InferResponse
from charonia.core.tensor import NUMPY_TYPES, Tensor
from charonia.processes.client_shared_memory import SharedMemoryRegistry, SharedMemorySlice

MODEL = ModelConfig("m", "1", "identity", labels={"T": ("cat", "dog")})
BATCHING = ModelConfig("m", "1", "identity", max_batch_size=4)
FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def read(message: Any, regions: SharedMemoryRegistry | None = None) -> Any:
    """As it comes over the wire."""
    return parse_infer_message(
        pb.ModelInferRequest.FromString(message.SerializeToString()), regions or SharedMemoryRegistry(), Caller()
    )


@st.composite
def tensors(draw: st.DrawFn, *datatypes: str) -> Tensor:
    """Of any shape, with any bytes in it: every NaN, every true."""
    datatype, shape = draw(st.sampled_from(datatypes)), tuple(draw(SHAPES))
    count = math.prod(shape)
    if datatype == "BYTES":
        data = np.empty(count, np.object_)
        data[:] = draw(st.lists(st.binary(max_size=9), min_size=count, max_size=count))
    elif datatype == "BOOL":
        data = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_)
    else:
        size = count * np.dtype(NUMPY_TYPES[datatype]).itemsize
        data = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), NUMPY_TYPES[datatype])
    return Tensor("T", datatype, shape, data.reshape(shape))


def write_response(*arguments: Any, **settings: Any) -> Any:
    """The message of a response, decoded."""
    return pb.ModelInferResponse.FromString(messages.write_response(*arguments, **settings))


def raw_bytes(tensor: Tensor) -> bytes:
    if tensor.datatype != "BYTES":
        return tensor.data.tobytes()
    return b"".join(len(each).to_bytes(4, "little") + each for each in tensor.data.ravel())


def same(one: Tensor, other: Tensor) -> bool:
    """To the last bit."""
    alike = (one.name, one.datatype, one.shape) == (other.name, other.datatype, other.shape)
    return alike and one.data.dtype == other.data.dtype and raw_bytes(one) == raw_bytes(other)


@given(tensors(*NUMPY_TYPES))
def test_raw_tensors_come_back(tensor: Tensor) -> None:
    described = {"name": "T", "datatype": tensor.datatype, "shape": tensor.shape}
    asked = read(pb.ModelInferRequest(inputs=[described], raw_input_contents=[raw_bytes(tensor)])).request
    assert same(asked.inputs["T"], tensor)
    answer = write_response(MODEL, InferCall(asked, {}), InferResponse((asked.inputs["T"],)))
    [output] = answer.outputs
    assert (output.name, output.datatype, tuple(output.shape)) == ("T", tensor.datatype, tensor.shape)
    assert list(answer.raw_output_contents) == [raw_bytes(tensor)]


@given(tensors(*FIELDS))
def test_typed_tensors_come_back(tensor: Tensor) -> None:
    if tensor.data.dtype.kind == "f":  # the protocol's floats keep no payload of a NaN
        tensor = Tensor("T", tensor.datatype, tensor.shape, np.nan_to_num(tensor.data))
    described = {"name": "T", "datatype": tensor.datatype, "shape": tensor.shape}
    contents = {FIELDS[tensor.datatype]: tensor.data.ravel().tolist()}
    asked = read(pb.ModelInferRequest(inputs=[described | {"contents": contents}])).request
    assert same(asked.inputs["T"], tensor)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensor=tensors(*NUMPY_TYPES), offset=st.integers(0, 9))
def test_lent_tensors_come_back(shared_memory: str, tensor: Tensor, offset: int) -> None:
    regions, raw = SharedMemoryRegistry(allowed=True), raw_bytes(tensor)
    regions.register("in", shared_memory, 0, 2000)
    regions.register("out", shared_memory, 2000, 2000)
    place = memory(region="in", offset=offset, byte_size=len(raw))
    regions.view(SharedMemorySlice("in", offset, len(raw)))[:] = raw
    described = {"name": "T", "datatype": tensor.datatype, "shape": tensor.shape, "parameters": place}
    wanted = {"name": "T", "parameters": memory(region="out", offset=offset, byte_size=1000)}
    call = read(pb.ModelInferRequest(inputs=[described], outputs=[wanted]), regions)
    assert same(call.request.inputs["T"], tensor)
    regions.unregister()  # what is in use stays
    answer = write_response(MODEL, call, InferResponse((call.request.inputs["T"],)))
    assert list(answer.raw_output_contents) == [b""]
    regions.register("out", shared_memory, 2000, 2000)
    assert bytes(regions.view(SharedMemorySlice("out", offset, len(raw)))) == raw


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensor=tensors(*NUMPY_TYPES), offset=st.integers(0, 9))
def test_tensors_on_a_gpu_come_back(
    gpu_regions: SharedMemoryRegistry, on_gpu: Any, tensor: Tensor, offset: int
) -> None:
    raw = raw_bytes(tensor)
    on_gpu.write(raw, offset)
    place = memory(region="g", offset=offset, byte_size=len(raw))
    described = {"name": "T", "datatype": tensor.datatype, "shape": tensor.shape, "parameters": place}
    wanted = {"name": "T", "parameters": memory(region="g", offset=2000 + offset, byte_size=1000)}
    call = read(pb.ModelInferRequest(inputs=[described], outputs=[wanted]), gpu_regions)
    assert (call.writes_to_gpu, list(call.deferred)) == (True, ["T"])
    call = asyncio.run(call.decode_deferred(Accepting()))
    assert same(call.request.inputs["T"], tensor)
    answer = write_response(MODEL, call, InferResponse((call.request.inputs["T"],)))
    assert list(answer.raw_output_contents) == [b""]
    assert on_gpu.bytes[2000 + offset :][: len(raw)] == raw


class Accepting:
    """A model that any request fits."""

    def validate(self, request: Any) -> None: ...


async def test_the_event_loop_does_not_copy_from_a_gpu(
    gpu_regions: SharedMemoryRegistry, on_gpu: Any, copying_threads: list[threading.Thread]
) -> None:
    wanted = {"name": "T", "parameters": memory(region="g", offset=8, byte_size=8)}
    lent = INPUT | {"parameters": memory(region="g", byte_size=8)}
    call = read(pb.ModelInferRequest(inputs=[lent], outputs=[wanted]), gpu_regions)
    call = await call.decode_deferred(Accepting())  # type: ignore[arg-type]
    tensor = Tensor.from_values("T", "INT32", [1, 2])
    await messages.write_response_off_loop(MODEL, call, InferResponse((tensor,)))
    assert on_gpu.bytes[8:16] == raw_bytes(tensor)
    assert len(copying_threads) == 2
    assert threading.current_thread() not in copying_threads


def test_what_does_not_fit_is_not_copied_from_a_gpu(
    gpu_regions: SharedMemoryRegistry, copying_threads: list[threading.Thread]
) -> None:
    for size, error in ((4, "input byte size mismatch"), (4097, "Invalid offset [+] byte size")):
        lent = INPUT | {"parameters": memory(region="g", byte_size=size)}
        with pytest.raises(InvalidArgument, match=error):
            read(pb.ModelInferRequest(inputs=[lent]), gpu_regions)
    wanted = memory(region="g", byte_size=7)
    with pytest.raises(Internal, match=r"for output 'T' \(7 bytes\) should be at least 8 bytes to hold the results"):
        answered(Tensor.from_values("T", "INT32", [1, 2]), wanted, gpu_regions)
    assert copying_threads == []


def memory(**place: Any) -> dict[str, Any]:
    return {
        f"shared_memory_{name}": pb.InferParameter(**{"string_param" if name == "region" else "int64_param": value})
        for name, value in place.items()
    }


INPUT = {"name": "T", "datatype": "INT32", "shape": [2]}
WRONG = [
    (
        {"inputs": [INPUT | {"parameters": memory(region="never")}]},
        NotFound,
        "Unable to find shared memory region: 'never'",
    ),
    (
        {"inputs": [INPUT | {"parameters": memory(region="r", offset=101)}]},
        InvalidArgument,
        "Invalid offset for shared memory region: 'r'",
    ),
    (
        {"inputs": [INPUT | {"parameters": memory(region="r", offset=1, byte_size=100)}]},
        InvalidArgument,
        "Invalid offset + byte size for shared memory region: 'r'",
    ),
    (
        {"inputs": [INPUT | {"parameters": memory(region="r", byte_size=7)}]},
        InvalidArgument,
        "[request id: <id_unknown>] input byte size mismatch for input 'T' for model 'm'. Expected 8, got 7",
    ),
    (
        {"inputs": [INPUT | {"parameters": memory(region="r", byte_size=8), "contents": {"int_contents": [1, 2]}}]},
        InvalidArgument,
        "unexpected 'content' provided when using shared memory for input tensor 'T' for model 'm'",
    ),
    (
        {"inputs": [INPUT | {"parameters": {"shared_memory_region": pb.InferParameter(int64_param=1)}}]},
        InvalidArgument,
        "invalid value type for 'shared_memory_region' parameter for tensor 'T', expected string_param.",
    ),
    (
        {
            "outputs": [
                {"name": "O", "parameters": memory(region="r") | {"classification": pb.InferParameter(int64_param=1)}}
            ]
        },
        InvalidArgument,
        "Output can't set both 'shared_memory_region' and 'classification'",
    ),
    (
        {"outputs": [{"name": "O", "parameters": {"classification": pb.InferParameter(string_param="1")}}]},
        InvalidArgument,
        "invalid value type for 'classification' parameter, expected int64_param",
    ),
    (
        {"outputs": [{"name": "O", "parameters": {"classification": pb.InferParameter(int64_param=0)}}]},
        InvalidArgument,
        "invalid value for 'classification' parameter, expected > 0",
    ),
    (
        {"outputs": [{"name": "O"}, {"name": "O"}]},
        InvalidArgument,
        "output 'O' already exists in request",
    ),
    (
        {"inputs": [INPUT | {"datatype": "FP16", "contents": {"fp32_contents": [1, 2]}}]},
        InvalidArgument,
        "unexpected explicit tensor data for input tensor 'T' for model 'm' of type 'FP32', expected datatype 'FP16'",
    ),
]


@pytest.mark.parametrize(("fields", "error", "text"), WRONG)
def test_wrong_tensors(shared_memory: str, fields: Any, error: type[CharoniaError], text: str) -> None:
    regions = SharedMemoryRegistry(allowed=True)
    regions.register("r", shared_memory, 0, 100)
    with pytest.raises(error) as caught:
        read(pb.ModelInferRequest(model_name="m", **fields), regions)
    assert caught.value.message == text


def test_lent_memory_and_raw_contents_side_by_side(shared_memory: str) -> None:
    regions = SharedMemoryRegistry(allowed=True)
    regions.register("r", shared_memory, 0, 100)
    lent = INPUT | {"name": "L", "parameters": memory(region="r", byte_size=8)}
    message = pb.ModelInferRequest(
        inputs=[INPUT, lent, INPUT | {"name": "U"}], raw_input_contents=[b"\1" * 8, b"\2" * 8]
    )
    inputs = read(message, regions).request.inputs
    assert [inputs[name].data.tobytes() for name in "TLU"] == [b"\1" * 8, bytes(8), b"\2" * 8]
    assert not inputs["L"].data.flags.writeable, "what a model reads is the client's"


def answered(tensor: Tensor, wanted: dict[str, Any], regions: SharedMemoryRegistry, config: ModelConfig = MODEL) -> Any:
    call = read(pb.ModelInferRequest(outputs=[{"name": "T", "parameters": wanted}]), regions)
    return write_response(config, call, InferResponse((tensor,)))


def test_an_output_too_large_for_its_place(shared_memory: str) -> None:
    regions = SharedMemoryRegistry(allowed=True)
    regions.register("r", shared_memory, 0, 100)
    text = "shared memory size specified with the request for output 'T' (7 bytes) should be at least 8 bytes to hold"
    for tensor in (Tensor.from_values("T", "INT32", [1, 2]), Tensor.from_values("T", "BYTES", [b"a", b"cd"])):
        size = len(raw_bytes(tensor)) - 1
        with pytest.raises(Internal) as caught:
            answered(tensor, memory(region="r", byte_size=size), regions)
        assert caught.value.message.startswith(text.replace("7", str(size)).replace("8", str(size + 1)))


def test_classes() -> None:
    wanted = {"classification": pb.InferParameter(int64_param=2)}
    answer = answered(Tensor.from_values("T", "FP32", [1, 3.3, 2]), wanted, SharedMemoryRegistry())
    [output] = answer.outputs
    assert (output.datatype, list(output.shape)) == ("BYTES", [2])
    assert answer.raw_output_contents[0] == b"\x0e\0\0\0" + b"3.300000:1:dog" + b"\x0a\0\0\0" + b"2.000000:2"
    answer = answered(Tensor.from_values("T", "INT8", [[1, -1], [0, 7]]), wanted, SharedMemoryRegistry(), BATCHING)
    assert list(answer.outputs[0].shape) == [2, 2]
    with pytest.raises(InvalidArgument, match="class result not available for output due to unsupported type 'BOOL'"):
        answered(Tensor.from_values("T", "BOOL", [True]), wanted, SharedMemoryRegistry())


def test_a_response_that_no_message_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_LARGEST", 7)
    with pytest.raises(InvalidArgument) as caught:
        write_response(MODEL, read(pb.ModelInferRequest()), InferResponse((Tensor.from_values("T", "INT32", [1, 2]),)))
    assert caught.value.message == "Response has byte size 8 which exceeds gRPC's byte size limit 7."


def test_a_response_has_a_bound() -> None:
    asked, tensor = read(pb.ModelInferRequest()), Tensor.from_values("T", "INT32", [1, 2])
    assert write_response(MODEL, asked, InferResponse((tensor,)), limit=8).raw_output_contents
    with pytest.raises(InvalidArgument, match=r"output 'T' has .* \(8 bytes\) .* 7 bytes. Use --max-response-bytes"):
        write_response(MODEL, asked, InferResponse((tensor,)), limit=7)
