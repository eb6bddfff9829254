"""`POST .../infer`: every status, text and byte a client may rely on."""

import gzip
import json
import threading
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from charonia.api import raw_tensors
from charonia.api.app import build_app
from charonia.api.metadata import ServerInfo
from charonia.cli.options import HttpOptions
from charonia.cli.plan import parse_http_rules
from charonia.core.errors import Internal, Unavailable
from charonia.core.request import InferResponse
from charonia.core.tensor import Tensor
from charonia.processes.client_shared_memory import SharedMemoryRegistry

NUMBERS = "/v2/models/numbers/infer"
LLM = "/v2/models/llm/infer"
LENGTH = "inference-header-content-length"
OUT = Tensor.from_values("OUT", "FP32", [[[1.5, 2.0]]])
MATRIX = {"name": "MATRIX", "datatype": "FP32", "shape": [1, 2, 1], "data": [1, 2]}


@pytest.fixture
def answered(gateway: Any) -> Any:
    """The gateway, which answers every request with `OUT`."""
    gateway.responses = (InferResponse((OUT,)),)
    return gateway


def binary(header: Any, *blobs: bytes) -> tuple[bytes, dict[str, str]]:
    head = json.dumps(header).encode()
    return b"".join([head, *blobs]), {LENGTH: str(len(head))}


async def post(client: httpx.AsyncClient, *body: Any, path: str = NUMBERS, **headers: str) -> httpx.Response:
    """A JSON document; or one with raw tensors behind it."""
    if len(body) == 1 and not isinstance(body[0], bytes):
        return await client.post(path, content=json.dumps(body[0]).encode(), headers=headers)
    if len(body) == 1:
        return await client.post(path, content=body[0], headers=headers)
    content, lengths = binary(*body)
    return await client.post(path, content=content, headers={**lengths, **headers})


# What is understood


async def test_json_in_and_out_in_the_order_of_keys(client: httpx.AsyncClient, answered: Any) -> None:
    parameters = {"priority": 3, "timeout": 9, "a": 1.5, "b": "x", "c": True}
    response = await post(client, {"id": "7", "inputs": [MATRIX], "parameters": parameters})
    assert response.headers["content-type"] == "application/json"
    assert LENGTH not in response.headers
    assert response.content == (
        b'{"id":"7","model_name":"numbers","model_version":"3","outputs":['
        b'{"name":"OUT","datatype":"FP32","shape":[1,1,2],"data":[1.5,2.0]}]}'
    )
    [request] = answered.asked
    assert (request.id, request.outputs) == ("7", None)
    assert request.parameters == parameters
    assert request.inputs["MATRIX"].shape == (1, 2, 1)
    assert request.inputs["MATRIX"].data.ravel().tolist() == [1, 2]


async def test_parameters_of_the_model_stand_before_its_outputs(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.responses = (InferResponse((OUT,), {"b": 1, "a": "x"}),)
    response = await post(client, {"inputs": [MATRIX]})
    assert list(response.json()) == ["model_name", "model_version", "parameters", "outputs"]
    assert response.json()["parameters"] == {"b": 1, "a": "x"}


async def test_raw_tensors_both_ways(client: httpx.AsyncClient, answered: Any) -> None:
    matrix = np.arange(4, dtype=np.float32)
    header = {
        "inputs": [
            {"name": "MATRIX", "datatype": "FP32", "shape": [1, 2, 2], "parameters": {"binary_data_size": 16}},
            {"name": "COUNT", "datatype": "UINT8", "shape": [1, 1], "data": [5]},
            {"name": "SIGNED", "datatype": "INT64", "shape": [1, 1], "parameters": {"binary_data_size": 8}},
        ],
        "outputs": [{"name": "OUT", "parameters": {"binary_data": True}}],
    }
    response = await post(client, header, matrix.tobytes(), (-7).to_bytes(8, "little", signed=True))
    head = int(response.headers[LENGTH])
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.content[head:] == OUT.data.tobytes()
    assert json.loads(response.content[:head])["outputs"] == [
        {"name": "OUT", "datatype": "FP32", "shape": [1, 1, 2], "parameters": {"binary_data_size": 8}}
    ]
    [request] = answered.asked
    assert request.outputs == ("OUT",)
    assert request.inputs["MATRIX"].data.tolist() == [0, 1, 2, 3]
    assert request.inputs["SIGNED"].data.tolist() == [-7]


async def test_raw_tensors_are_views_of_the_body(client: httpx.AsyncClient, answered: Any) -> None:
    header = {
        "inputs": [{"name": "MATRIX", "datatype": "FP32", "shape": [1, 2, 1], "parameters": {"binary_data_size": 8}}]
    }
    await post(client, header, bytes(8))
    data = answered.asked[0].inputs["MATRIX"].data
    assert not data.flags.owndata
    assert not data.flags.writeable


@pytest.mark.parametrize(
    ("outputs", "parameters", "is_binary"),
    [
        (None, {}, False),
        (None, {"binary_data_output": True}, True),
        ([], {"binary_data_output": True}, True),
        ([{"name": "OUT"}], {"binary_data_output": True}, False),
        ([{"name": "OUT", "parameters": {"binary_data": True}}], {}, True),
        ([{"name": "OUT", "parameters": {"binary_data": False}}], {"binary_data_output": True}, False),
    ],
)
async def test_which_encoding_an_output_gets(
    client: httpx.AsyncClient, answered: Any, outputs: Any, parameters: Any, is_binary: bool
) -> None:
    document = {"inputs": [MATRIX], "parameters": parameters} | ({} if outputs is None else {"outputs": outputs})
    response = await post(client, document)
    assert response.status_code == 200
    assert (LENGTH in response.headers) is is_binary
    assert "binary_data_output" not in answered.asked[0].parameters


async def test_an_empty_binary_output_has_no_length(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.responses = (InferResponse((Tensor("OUT", "FP32", (0, 2), np.empty((0, 2), np.float32)),)),)
    response = await post(client, {"inputs": [MATRIX], "parameters": {"binary_data_output": True}})
    assert response.headers["content-type"] == "application/json"
    assert LENGTH not in response.headers
    assert response.json()["outputs"][0]["parameters"] == {"binary_data_size": 0}


async def test_a_large_output_comes_whole(client: httpx.AsyncClient, gateway: Any) -> None:
    data = np.arange(50_000, dtype=np.float32).reshape(2, -1)[:, ::2]
    gateway.responses = (InferResponse((Tensor("OUT", "FP32", data.shape, data), OUT)),)
    response = await post(
        client, {"inputs": [MATRIX], "parameters": {"binary_data_output": True}}, **{"accept-encoding": "identity"}
    )
    assert int(response.headers["content-length"]) == len(response.content)
    assert response.content[int(response.headers[LENGTH]) :] == data.tobytes() + OUT.data.tobytes()


async def test_bare_words_for_what_is_no_number(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.responses = (InferResponse((Tensor.from_values("OUT", "FP32", [np.nan, np.inf, -np.inf, 1]),)),)
    body = b'{"inputs":[{"name":"MATRIX","datatype":"FP32","shape":[1,2,2],"data":[NaN,Infinity,-Infinity,1e999]}]}'
    response = await post(client, body)
    assert b'"data":[NaN,Infinity,-Infinity,1.0]' in response.content
    assert str(gateway.asked[0].inputs["MATRIX"].data.ravel().tolist()) == "[nan, inf, -inf, inf]"


async def test_data_may_be_nested_in_any_way(client: httpx.AsyncClient, answered: Any) -> None:
    await post(client, {"inputs": [{**MATRIX, "shape": [1, 2, 3], "data": [1, [2, [3, [4]]], [[5], 6]]}]})
    assert answered.asked[0].inputs["MATRIX"].data.ravel().tolist() == [1, 2, 3, 4, 5, 6]


async def test_raw_request(client: httpx.AsyncClient, gateway: Any) -> None:
    """Nothing but the bytes of the one input: shape from the config, all outputs binary."""
    gateway.responses = (InferResponse((OUT,)),)
    response = await post(client, bytes(24), path="/v2/models/single/infer", **{LENGTH: "0"})
    assert response.status_code == 200, response.text
    assert response.content[int(response.headers[LENGTH]) :] == OUT.data.tobytes()
    tensor = gateway.asked[0].inputs["IN"]
    assert (tensor.shape, tensor.data.nbytes) == ((1, 3, 2), 24)


async def test_raw_text_is_one_element(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.responses = (InferResponse((OUT,)),)
    response = await post(client, b"h\xc3\xa9\x00", path="/v2/models/text/infer", **{LENGTH: "0"})
    assert response.status_code == 200
    assert gateway.asked[0].inputs["IN"].data.tolist() == [b"h\xc3\xa9\x00"]


async def test_classification(client: httpx.AsyncClient, answered: Any) -> None:
    outputs = [{"name": "OUT", "parameters": {"classification": 1, "binary_data": False}}]
    response = await post(client, {"inputs": [MATRIX], "outputs": outputs})
    assert response.json()["outputs"] == [
        {"name": "OUT", "datatype": "BYTES", "shape": [1, 1], "data": ["2.000000:1:dog"]}
    ]


async def test_a_language_model_answers_once(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.texts = ("hé",)
    prompt = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}
    response = await post(client, {"inputs": [prompt], "parameters": {"max_tokens": 4}}, path=LLM)
    assert response.json()["outputs"][0]["data"] == ["hé"]
    assert gateway.asked[0].parameters == {"max_tokens": 4}


# Compression


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity"])
async def test_compression_both_ways(client: httpx.AsyncClient, gateway: Any, encoding: str) -> None:
    data = np.zeros(60_000, np.float32)
    gateway.responses = (InferResponse((Tensor("OUT", "FP32", data.shape, data),)),)
    squeeze = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}[encoding]
    size = 8 * 60
    header = {"inputs": [{**MATRIX, "shape": [1, 2, size // 8], "parameters": {"binary_data_size": size}}]}
    del header["inputs"][0]["data"]  # type: ignore[attr-defined]
    header["parameters"] = {"binary_data_output": True}  # type: ignore[assignment]
    body, lengths = binary(header, bytes(size))
    headers = {**lengths, "content-encoding": encoding, "accept-encoding": encoding}
    response = await client.post(NUMBERS, content=squeeze(body), headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers.get("content-encoding", "identity") == encoding
    assert (int(response.headers["content-length"]) < 60_000) is (encoding != "identity")
    assert response.content[int(response.headers[LENGTH]) :] == data.tobytes()


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip, deflate", "gzip"),
        ("deflate,gzip", "deflate"),
        ("gzip;q=0.2, deflate;q=0.9", "deflate"),
        ("gzip;q=0, br", None),
        ("br, identity, gzip;q=0.5", None),
        ("gzip;q=much", None),
        ("*", None),
    ],
)
async def test_the_response_is_in_the_best_encoding(
    client: httpx.AsyncClient, answered: Any, accepted: str, encoding: str | None
) -> None:
    response = await post(client, {"inputs": [MATRIX]}, **{"accept-encoding": accepted})
    assert response.headers.get("content-encoding") == encoding
    assert response.json()["outputs"][0]["data"] == [1.5, 2.0]


async def test_unknown_encoding(client: httpx.AsyncClient) -> None:
    response = await post(client, {"inputs": [MATRIX]}, **{"content-encoding": "br"})
    assert (response.status_code, response.json()) == (501, {"error": "Unsupported compression type"})
    assert response.headers["accept-encoding"] == "gzip, deflate"


# Shared memory


async def test_tensors_in_lent_memory(client: httpx.AsyncClient, answered: Any, shared_memory: str) -> None:
    regions: SharedMemoryRegistry = SharedMemoryRegistry(allowed=True)
    regions.register("r", shared_memory, 0, 4096)
    object.__setattr__(answered.shared_state, "shared_memory", regions)
    app = build_app(answered, ServerInfo(max_input_size=2000))
    there = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    request = {
        "inputs": [{"name": "MATRIX", "datatype": "FP32", "shape": [1, 2, 1], "parameters": there}],
        "outputs": [{"name": "OUT", "parameters": {**there, "shared_memory_offset": 8}}],
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://charonia") as own:
        response = await post(own, request)
        assert response.json()["outputs"] == [{"name": "OUT", "datatype": "FP32", "shape": [1, 1, 2]}]
        request["outputs"][0]["parameters"]["shared_memory_byte_size"] = 7
        short = await post(own, request)
    from charonia.processes.client_shared_memory import SharedMemorySlice

    assert bytes(regions.view(SharedMemorySlice("r", 8, 8))) == OUT.data.tobytes()
    assert short.status_code == 500
    assert short.json()["error"] == (
        "shared memory size specified with the request for output 'OUT' (7 bytes) "
        "should be at least 8 bytes to hold the results"
    )


async def test_tensors_on_a_gpu(
    answered: Any, gpu_regions: SharedMemoryRegistry, on_gpu: Any, copying_threads: list[threading.Thread]
) -> None:
    on_gpu.write(np.array([3, 4], np.float32).tobytes(), 16)
    object.__setattr__(answered.shared_state, "shared_memory", gpu_regions)
    app = build_app(answered, ServerInfo(max_input_size=2000))
    there = {"shared_memory_region": "g", "shared_memory_byte_size": 8}
    lent = {"shared_memory_offset": 16, **there}
    request: Any = {
        "inputs": [{"name": "MATRIX", "datatype": "FP32", "shape": [1, 2, 1], "parameters": lent}],
        "outputs": [{"name": "OUT", "parameters": there}],
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://charonia") as own:
        response = await post(own, request)
        assert response.json()["outputs"] == [{"name": "OUT", "datatype": "FP32", "shape": [1, 1, 2]}]
        assert answered.asked[0].inputs["MATRIX"].data.ravel().tolist() == [3, 4]
        assert on_gpu.bytes[:8] == OUT.data.tobytes()
        assert len(copying_threads) == 2
        assert threading.current_thread() not in copying_threads
        request["inputs"][0]["shape"] = [1, 3, 1]
        wrong = await post(own, request)
    assert (wrong.status_code, len(answered.asked), len(copying_threads)) == (400, 1, 2)
    assert "input byte size mismatch" in wrong.json()["error"]


# What is refused

ONE_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. "
)
NO_DATA = {key: value for key, value in MATRIX.items() if key != "data"}


def with_input(**members: Any) -> Any:
    return {"inputs": [{**MATRIX, **members}]}


def with_output(**parameters: Any) -> Any:
    return {"inputs": [MATRIX], "outputs": [{"name": "OUT", "parameters": parameters}]}


def cannot(field: str, texts: str) -> str:
    return f"Unable to parse '{field}': attempt to access JSON {texts}"


STRING, UNSIGNED = "non-string as string", "non-unsigned-integer as unsigned-integer"
SIGNED, NUMBER = "non-signed-integer as signed-integer", "non-number as double"
BOOLEAN, ARRAY = "non-boolean as boolean", "non-array as array"
TOO_MANY = "Unable to parse 'data': Shape does not match true shape of 'data' field"
TOO_FEW = "Failed to parse 'data' field: shape does not match true shape"
RESERVED = "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
REGION = {"shared_memory_region": "r", "shared_memory_byte_size": 4}

REFUSED: list[tuple[Any, int, str]] = [
    (b"{", 400, "failed to parse the request JSON buffer: "),
    (b"", 400, "failed to parse the request JSON buffer: "),
    (b"\xff", 400, "failed to parse the request JSON buffer: "),
    (b"[1]", 400, "failed to parse the request JSON buffer: "),
    (b'{"inputs":' + b"[" * 900, 400, "failed to parse the request JSON buffer: "),
    ({}, 400, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
    ({"inputs": {}}, 400, cannot("inputs", ARRAY)),
    ({"inputs": [1]}, 400, cannot("inputs", "non-object as object")),
    ({"id": 5, "inputs": []}, 400, cannot("id", STRING)),
    ({"inputs": [], "outputs": {}}, 400, cannot("outputs", ARRAY)),
    ({"inputs": [{}]}, 400, "Unable to parse 'name': attempt to access non-existing object member 'name'"),
    (with_input(name=1), 400, cannot("name", STRING)),
    (with_input(datatype=1), 400, cannot("datatype", STRING)),
    (with_input(shape="1"), 400, cannot("shape", ARRAY)),
    (with_input(shape=[1.5]), 400, cannot("shape", SIGNED)),
    (with_input(shape=[True]), 400, cannot("shape", SIGNED)),
    (with_input(shape=[-1, 2, 1]), 400, "shape [-1,2,1] contains one or more invalid dimensions"),
    (with_input(shape=[1] * 64 + [2]), 400, "65 dimensions are more than the 64 that a tensor may have"),
    (with_input(shape=[2**40, 2**40]), 400, "causes total element count to exceed maximum size of 9223372036854775807"),
    (
        with_input(shape=[2**31, 2**31]),
        400,
        "byte size overflow for input 'MATRIX': shape [2147483648,2147483648] exceeds 9223372036854775807 bytes",
    ),
    (with_input(shape=[2**31, 2**31], datatype="UINT8"), 400, "(4611686018427387904 bytes) that exceeds the maximum"),
    (with_input(shape=[1, 2, 1000]), 400, "JSON input 'MATRIX' has a byte_size (8000 bytes) that exceeds the maximum"),
    (with_input(data=5), 400, cannot("data", ARRAY)),
    (with_input(data=["1", 2]), 400, cannot("data", NUMBER)),
    (with_input(data=[True, 2]), 400, cannot("data", NUMBER)),
    (with_input(data=[None, 2]), 400, cannot("data", NUMBER)),
    (with_input(data=[{}, 2]), 400, cannot("data", NUMBER)),
    (with_input(datatype="BOOL", data=[1, 0]), 400, cannot("data", BOOLEAN)),
    (with_input(datatype="BYTES", data=[1, 0]), 400, cannot("data", STRING)),
    (with_input(datatype="INT8", data=[1, 1.5]), 400, cannot("data", SIGNED)),
    (with_input(datatype="INT8", data=[1, 128]), 400, cannot("data", SIGNED)),
    (with_input(datatype="INT64", data=[1, 2**63]), 400, cannot("data", SIGNED)),
    (with_input(datatype="UINT8", data=[-1, 1]), 400, cannot("data", UNSIGNED)),
    (with_input(datatype="UINT64", data=[1, True]), 400, cannot("data", UNSIGNED)),
    (with_input(data=[1, 2, 3]), 500, TOO_MANY),
    (with_input(data=[1]), 500, TOO_FEW),
    (with_input(datatype="BYTES", data=["a", "b", "c"]), 500, TOO_MANY.replace("Shape", "shape")),
    (with_input(datatype="BYTES", data=["a"]), 500, TOO_FEW),
    (
        with_input(data=json.loads("[" * 120 + "]" * 120)),
        400,
        "JSON nesting depth exceeds maximum allowed limit (100)",
    ),
    (
        with_input(datatype="FP16"),
        400,
        "receiving FP16 data via JSON is not supported. Please use the binary data format for input MATRIX",
    ),
    (
        with_input(datatype="BF16"),
        400,
        "receiving BF16 data via JSON is not supported. Please use the binary data format for input MATRIX",
    ),
    ({"inputs": [MATRIX, MATRIX]}, 400, "input 'MATRIX' already exists in request"),
    (
        {"inputs": [MATRIX], "outputs": [{"name": "OUT"}] * 2},
        400,
        "output 'OUT' already exists in request",
    ),
    ({"inputs": [NO_DATA]}, 400, ONE_SOURCE + "But no field is set"),
    (with_input(parameters={"binary_data_size": 1}), 400, ONE_SOURCE + "But set 'data' 'binary_data_size'"),
    (with_input(parameters=REGION), 400, ONE_SOURCE + "But set 'data' 'shared_memory_region'"),
    ({"inputs": [{**NO_DATA, "parameters": REGION}]}, 404, "Unable to find shared memory region: 'r'"),
    (with_output(**REGION), 404, "Unable to find shared memory region: 'r'"),
    (with_output(**REGION, classification=1), 400, "Output can't set both 'shared_memory_region' and 'classification'"),
    (with_output(**REGION, binary_data=True), 400, "Output can't set both 'shared_memory_region' and 'binary_data'"),
    (with_output(classification=-1), 400, cannot("classification", UNSIGNED)),
    (with_output(classification=0), 400, "Unable to parse 'classification': it must be above 0"),
    (with_output(binary_data=1), 400, cannot("binary_data", BOOLEAN)),
    (with_output(shared_memory_region=1), 400, cannot("shared_memory_region", STRING)),
    ({"inputs": [MATRIX], "parameters": 1}, 400, cannot("parameters", "non-object as object")),
    ({"inputs": [MATRIX], "parameters": {"triton_x": 1}}, 400, RESERVED),
    ({"inputs": [MATRIX], "parameters": {"priority": -1}}, 400, cannot("priority", UNSIGNED)),
    ({"inputs": [MATRIX], "parameters": {"timeout": "1"}}, 400, cannot("timeout", UNSIGNED)),
    ({"inputs": [MATRIX], "parameters": {"sequence_id": 1.5}}, 400, cannot("sequence_id", STRING)),
    ({"inputs": [MATRIX], "parameters": {"sequence_start": 1}}, 400, cannot("sequence_start", BOOLEAN)),
    ({"inputs": [MATRIX], "parameters": {"binary_data_output": 1}}, 400, cannot("binary_data_output", BOOLEAN)),
    (
        {"inputs": [MATRIX], "parameters": {"p": []}},
        400,
        "parameter 'p' has invalid type. It should be either 'int', 'float', 'bool', or 'string'.",
    ),
    (
        {"inputs": [{**NO_DATA, "parameters": {"binary_data_size": 8}}]},
        400,
        "must specify valid 'Infer-Header-Content-Length' in request header and 'binary_data_size' when passing inputs "
        "in binary data format",
    ),
    (
        b" " * 2001,
        400,
        "request JSON size of 2001 bytes exceeds the maximum allowed input size of 2000 bytes. "
        "Use --http-max-input-size to increase the limit.",
    ),
    (b'{"inputs":[{"name":"\\ud800"}]}', 400, "Unable to parse 'name': a lone surrogate is not text"),
]


@pytest.mark.parametrize(("body", "status", "text"), REFUSED)
async def test_refused(client: httpx.AsyncClient, answered: Any, body: Any, status: int, text: str) -> None:
    response = await post(client, body)
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    assert list(response.json()) == ["error"]
    assert text in response.json()["error"]
    assert not answered.asked


def raw_input(size: int, **members: Any) -> Any:
    return {"inputs": [{**NO_DATA, "parameters": {"binary_data_size": size}, **members}]}


BYTES = {"datatype": "BYTES"}
REFUSED_BINARY: list[tuple[Any, bytes, str]] = [
    (raw_input(8), bytes(5), "unexpected size for input 'MATRIX', expecting 3 additional bytes for model 'numbers'"),
    (raw_input(8), bytes(9), "unexpected additional input data for model 'numbers'"),
    (
        raw_input(4),
        bytes(4),
        "[request id: <id_unknown>] input byte size mismatch for input 'MATRIX' for model 'numbers'. Expected 8, got 4",
    ),
    (
        {"id": "x", **raw_input(4)},
        bytes(4),
        "[request id: x] input byte size mismatch for input 'MATRIX' for model 'numbers'. Expected 8, got 4",
    ),
    (raw_input(5, **BYTES), b"\1\0\0\0a", "expected 2 string elements for inference input 'MATRIX'"),
    (raw_input(15, **BYTES), b"\1\0\0\0a" * 3, "unexpected number of string elements 3 for inference input 'MATRIX'"),
    (raw_input(3, **BYTES), b"\1\0\0", "incomplete string length indicator for inference input 'MATRIX'"),
    (raw_input(5, **BYTES), b"\2\0\0\0a", "incomplete string data for inference input 'MATRIX'"),
    (raw_input(-1), b"", cannot("binary_data_size", UNSIGNED)),
    (raw_input(2**64), b"", cannot("binary_data_size", UNSIGNED)),
]


@pytest.mark.parametrize(("header", "blob", "text"), REFUSED_BINARY)
async def test_refused_binary(client: httpx.AsyncClient, answered: Any, header: Any, blob: bytes, text: str) -> None:
    response = await post(client, header, blob)
    assert response.status_code == 400
    assert text in response.json()["error"]
    assert not answered.asked


@pytest.mark.parametrize(
    ("length", "text"),
    [
        ("3", "inference header size should be in range (0, 2), got: 3"),
        ("-1", "inference header size should be in range (0, 2), got: -1"),
        ("x", "Unable to parse Inference-Header-Content-Length, got: x"),
        ("1_0", "Unable to parse Inference-Header-Content-Length, got: 1_0"),
    ],
)
async def test_header_length(client: httpx.AsyncClient, length: str, text: str) -> None:
    response = await post(client, b"{}", **{LENGTH: length})
    assert (response.status_code, response.json()) == (400, {"error": text})


@pytest.mark.parametrize(
    ("path", "size", "text"),
    [
        (NUMBERS, 8, "Raw request must only have 1 input (found 1) to be deduced but got 4 inputs in 'numbers' model"),
        (
            "/v2/models/single/infer",
            10_001,
            "Raw input has a byte_size (10001 bytes) that exceeds the maximum allowed value of 10000 bytes. "
            "Use --max-raw-input-size to increase the limit.",
        ),
        ("/v2/models/single/infer", 9, "input byte size mismatch for input 'IN' for model 'single'. Expected 8, got 9"),
        (
            "/v2/models/free/infer",
            8,
            "The shape of the raw input 'IN' can not be deduced because there are more than one",
        ),
        ("/v2/models/texts/infer", 8, "For BYTE datatype raw input 'IN', the model must have input shape [1]"),
        ("/v2/models/free-texts/infer", 8, "For BYTE datatype raw input 'IN', the model must have input shape [1]"),
    ],
)
async def test_refused_raw_requests(client: httpx.AsyncClient, path: str, size: int, text: str) -> None:
    response = await post(client, bytes(size), path=path, **{LENGTH: "0"})
    assert response.status_code == 400
    assert text in response.json()["error"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            gzip.compress(bytes(2001), mtime=0),
            "Decompressed data size exceeds the maximum allowed value of 2000 bytes. ",
        ),
        (gzip.compress(b"{}", mtime=0)[:-9], "the request body cannot be decompressed as gzip: it is cut off"),
        (gzip.compress(b"{}", mtime=0) + b"x", "the request body cannot be decompressed as gzip: data after its end"),
        (b"{}", "the request body cannot be decompressed as gzip: "),
    ],
)
async def test_broken_compression(client: httpx.AsyncClient, body: bytes, text: str) -> None:
    response = await post(client, body, **{"content-encoding": "gzip"})
    assert response.status_code == 400
    assert response.json()["error"].startswith(text)


async def test_binary_bodies_are_larger_than_the_limit_on_json(client: httpx.AsyncClient, answered: Any) -> None:
    response = await post(client, raw_input(8000, shape=[1, 2, 1000]), bytes(8000))
    assert response.status_code == 200


async def test_outputs_json_has_no_numbers_for(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.responses = (InferResponse((Tensor.from_values("OUT", "FP16", [1]),)),)
    response = await post(client, {"inputs": [MATRIX]})
    text = "sending FP16 data via JSON is not supported. Please use the binary data format for output OUT"
    assert (response.status_code, response.json()) == (400, {"error": text})


@pytest.mark.parametrize("path", [NUMBERS, "/v2/models/llm/generate", "/v2/models/llm/generate_stream"])
@pytest.mark.parametrize("count", [1, 20_000])
async def test_strings_that_are_not_utf_8_are_never_replaced(
    client: httpx.AsyncClient, gateway: Any, path: str, count: int
) -> None:
    gateway.responses = (InferResponse((Tensor.from_values("OUT", "BYTES", [b"a\xff"] * count),)),)
    response = await post(client, {"inputs": [MATRIX]} if path == NUMBERS else {"text_input": "x"}, path=path)
    assert response.status_code == 400
    text = "sending BYTES data via JSON is not supported where they are not UTF-8 (invalid start byte). "
    assert response.json() == {"error": f"{text}Please use the binary data format for output OUT"}
    if path == NUMBERS:
        response = await post(client, {"inputs": [MATRIX], "parameters": {"binary_data_output": True}})
        assert response.content.endswith(b"\2\0\0\0a\xff")


# Large responses


LIMITED = 4000


@pytest.fixture
async def limited(gateway: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(gateway, ServerInfo("triton", "9.9", max_response_size=LIMITED))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://charonia") as connected:
        yield connected


@pytest.mark.parametrize("binary", [False, True])
async def test_a_response_has_a_bound(limited: httpx.AsyncClient, gateway: Any, binary: bool) -> None:
    most = LIMITED if binary else LIMITED // 4
    first, other = Tensor.from_values("A", "UINT8", [7] * 100), Tensor.from_values("B", "BYTES", [b"x" * (most - 104)])
    asked = {"inputs": [MATRIX], "parameters": {"binary_data_output": binary}}
    gateway.responses = (InferResponse((first, other)),)
    assert (await post(limited, asked)).status_code == 200
    gateway.responses = (InferResponse((Tensor.from_values("A", "UINT8", [7] * 101), other)),)
    refused = await post(limited, asked)
    hint = "" if binary else "It is a quarter of --max-response-bytes: ask for binary data. "
    text = (
        f"Response with output 'B' has a byte_size ({most + 1} bytes) that exceeds the maximum allowed value of {most} "
        f"bytes{'' if binary else ' as JSON'}. {hint}Use --max-response-bytes to increase the limit."
    )
    assert (refused.status_code, refused.json()) == (400, {"error": text})
    for path in ("/v2/models/llm/generate", "/v2/models/llm/generate_stream"):
        refused = await post(limited, {"text_input": "x"}, path=path)
        assert (refused.status_code, "output 'B' has a byte_size" in refused.json()["error"]) == (400, True)


async def test_a_long_string_is_written_in_pieces(client: httpx.AsyncClient, gateway: Any) -> None:
    texts = ['é"\\n' * 100_000, "", "b"]
    outputs = Tensor.from_values("A", "BYTES", [text.encode() for text in texts]), OUT
    gateway.responses = (InferResponse(outputs),)
    assert raw_tensors.is_long(outputs[0])
    answer = (await post(client, {"inputs": [MATRIX]})).json()
    assert [output["data"] for output in answer["outputs"]] == [texts, [1.5, 2.0]]
    generated = (await post(client, {"text_input": "x"}, path="/v2/models/llm/generate")).json()
    assert generated["A"] == texts


DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"


async def test_streams_are_not_for_infer(client: httpx.AsyncClient) -> None:
    stream = {"name": "stream", "datatype": "BOOL", "shape": [1], "data": [True]}
    response = await post(client, {"inputs": [stream]}, path=LLM)
    assert (response.status_code, response.json()["error"].startswith(DECOUPLED)) == (501, True)
    response = await post(client, b"not read", path="/v2/models/decoupled/infer")
    assert (response.status_code, response.json()) == (501, {"error": DECOUPLED})


@pytest.mark.parametrize("count", [0, 2])
async def test_one_response_is_expected(client: httpx.AsyncClient, gateway: Any, count: int) -> None:
    gateway.responses = (InferResponse((OUT,)),) * count
    response = await post(client, {"inputs": [MATRIX]})
    assert (response.status_code, response.json()) == (500, {"error": f"expected a single response, got {count}"})


async def test_an_empty_end_is_no_response(client: httpx.AsyncClient, gateway: Any) -> None:
    text = Tensor.from_values("text_output", "BYTES", [b"x"])
    gateway.responses = (InferResponse((text,)), InferResponse((), final=True))
    asked = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    assert (await post(client, {"inputs": [asked]}, path=LLM)).status_code == 200


@pytest.mark.parametrize("action", ["infer", "generate", "generate_stream"])
async def test_a_model_that_answers_once_may_answer_nothing(
    client: httpx.AsyncClient, gateway: Any, action: str
) -> None:
    gateway.responses = (InferResponse((), final=True),)
    body = {"inputs": [MATRIX]} if action == "infer" else {"MATRIX": [1, 2]}
    response = await post(client, body, path=f"/v2/models/numbers/{action}")
    said: dict[str, Any] = {"model_name": "numbers", "model_version": "3"}
    said |= {"outputs": []} if action == "infer" else {}
    assert (response.status_code, json.loads(response.text.removeprefix("data: "))) == (200, said)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (Unavailable("[request id: 1] Exceeds maximum queue size"), 503, "[request id: 1] Exceeds maximum queue size"),
        (Unavailable("Request timeout expired"), 503, "Request timeout expired"),
        (Internal("the model failed"), 500, "the model failed"),
        (RuntimeError("a secret"), 500, "Internal Server Error"),
    ],
)
async def test_errors_of_the_model(
    client: httpx.AsyncClient, gateway: Any, error: Exception, status: int, text: str
) -> None:
    gateway.texts, gateway.error = (), error
    response = await post(client, {"inputs": [MATRIX]})
    assert (response.status_code, response.json()) == (status, {"error": text})
    assert gateway.open_streams == 0


# Headers


@pytest.mark.parametrize(
    ("pattern", "given", "parameters"),
    [
        ("", {"x-a": "1"}, {}),
        ("^x-", {"x-a": "1", "X-B": "2", "y": "3"}, {"x-a": "1", "x-b": "2"}),
        ("X-", {"x-a": "1"}, {"x-a": "1"}),
        ("(?-i)X-", {"x-a": "1"}, {}),
    ],
)
async def test_headers_that_are_forwarded(answered: Any, pattern: str, given: dict[str, str], parameters: Any) -> None:
    rules = parse_http_rules(HttpOptions(http_header_forward_pattern=pattern))
    transport = httpx.ASGITransport(build_app(answered, ServerInfo(), rules=rules))
    async with httpx.AsyncClient(transport=transport, base_url="http://charonia") as own:
        assert (await post(own, {"inputs": [MATRIX]}, **given)).status_code == 200
        await own.post("/v2/models/numbers/generate", json={"MATRIX": [1, 2]}, headers=given)
    assert answered.asked[0].parameters == parameters
    assert answered.asked[1].parameters == {}


@pytest.mark.parametrize("header", ["priority", "triton_x", "headers"])
async def test_reserved_headers_are_not_forwarded(answered: Any, header: str) -> None:
    transport = httpx.ASGITransport(
        build_app(answered, ServerInfo(), rules=parse_http_rules(HttpOptions(http_header_forward_pattern=".*")))
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://charonia") as own:
        response = await post(own, {"inputs": [MATRIX]}, **{header: "1"})
    text = f"Header '{header}' is reserved for Triton usage and cannot be forwarded."
    assert (response.status_code, response.json()) == (400, {"error": text})


async def test_a_client_who_leaves_is_not_computed_for(gateway: Any) -> None:
    gateway.texts, gateway.hang = (), True
    body = [{"type": "http.request", "body": json.dumps({"inputs": [MATRIX]}).encode(), "more_body": False}]

    async def receive() -> Any:
        if body:
            return body.pop()
        await gateway.waiting.wait()
        return {"type": "http.disconnect"}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": NUMBERS, "headers": [], "query_string": b""}
    await build_app(gateway, ServerInfo())(scope, receive, send)
    assert (sent[0]["status"], gateway.open_streams) == (499, 0)
    assert [context.end.outcome for context in gateway.contexts] == ["cancelled"]
