"""Requests that look alike are read alike, the first time and every other."""

import json
from typing import Any

import numpy as np
import pytest

from charonia.api.triton.infer_request import InferRequestReader
from charonia.core.errors import CharoniaError
from charonia.core.model import ModelConfig
from charonia.processes.client_shared_memory import SharedMemoryRegistry

CONFIG = ModelConfig("m", "1", "b")


def tensor(name: str, datatype: str, shape: list[int], size: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}


def head(*inputs: Any, **more: Any) -> bytes:
    return json.dumps({"inputs": inputs, **more}).encode()


def known(reader: InferRequestReader) -> int:
    return len(reader.headers)


PAIR = head(
    tensor("A", "FP32", [2, 1], 8),
    tensor("B", "INT64", [1], 8),
    parameters={"binary_data_output": True, "priority": 3},
    outputs=[{"name": "OUT", "parameters": {"classification": 2}}],
)


def pair(a: list[float], b: int) -> bytes:
    return np.array(a, np.float32).tobytes() + np.array([b], np.int64).tobytes()


def test_numbers_are_those_of_each_request() -> None:
    reader = InferRequestReader()
    calls = [reader.read(CONFIG, PAIR + pair([n, -n], n), len(PAIR)) for n in range(3)]
    assert known(reader) == 1
    for number, call in enumerate(calls):
        inputs = call.request.inputs
        assert inputs["A"].data.ravel().tolist() == [number, -number]
        assert inputs["B"].data.tolist() == [number]
        assert not inputs["A"].data.flags.writeable
        assert [(value.name, value.datatype, value.shape) for value in inputs.values()] == [
            ("A", "FP32", (2, 1)),
            ("B", "INT64", (1,)),
        ]
        assert (call.request.parameters, call.request.outputs) == ({"priority": 3}, ("OUT",))
        assert (call.outputs["OUT"].classes, call.default_output.binary) == (2, True)


@pytest.mark.parametrize("change", [-1, 1, -16, 100])
def test_another_length_is_refused_as_at_first(change: int) -> None:
    body = pair([1, 2], 3)
    wrong = body[:change] if change < 0 else body + bytes(change)
    texts = []
    for reader in (InferRequestReader(), read := InferRequestReader()):
        if reader is read:
            reader.read(CONFIG, PAIR + body, len(PAIR))
        with pytest.raises(CharoniaError) as raised:
            reader.read(CONFIG, PAIR + wrong, len(PAIR))
        texts.append(raised.value.message)
    assert texts[0] == texts[1]


def test_another_model_or_another_header_length_is_not_the_same() -> None:
    reader = InferRequestReader()
    reader.read(CONFIG, PAIR + pair([1, 2], 3), len(PAIR))
    with pytest.raises(CharoniaError):
        reader.read(CONFIG, PAIR + pair([1, 2], 3), len(PAIR) - 1)
    with pytest.raises(CharoniaError, match="'other'"):
        reader.read(ModelConfig("other", "1", "b"), PAIR + bytes(17), len(PAIR))


@pytest.mark.parametrize(
    ("header", "blob"),
    [
        (head(tensor("A", "FP32", [1], 4), id="7"), bytes(4)),
        (head(tensor("A", "BYTES", [1], 5)), b"\1\0\0\0x"),
        (head(tensor("A", "BOOL", [1], 1)), b"\7"),
        (head(tensor("A", "FP32", [0], 0)), b""),
        (head(tensor("A", "FP32", [1], 4), {"name": "B", "datatype": "INT8", "shape": [1], "data": [1]}), bytes(4)),
        (head(tensor("A", "FP32", [1], 4), parameters={"long": "x" * 5000}), bytes(4)),
    ],
    ids=["id", "bytes", "bool", "empty", "json", "long"],
)
def test_what_may_differ_or_is_rare_is_not_remembered(header: bytes, blob: bytes) -> None:
    reader = InferRequestReader()
    first, second = (reader.read(CONFIG, header + blob, len(header)).request for _ in range(2))
    assert known(reader) == 0
    for name in first.inputs:
        assert first.inputs[name].data.tolist() == second.inputs[name].data.tolist()


def test_a_request_without_inputs_is_one() -> None:
    reader, content = InferRequestReader(), head()
    for length in (None, len(content)):
        assert reader.read(CONFIG, content, length).request.inputs == {}
    assert (known(reader), len(reader.bodies)) == (0, 0)


def test_memory_that_a_client_lends_is_asked_for_each_time() -> None:
    reader = InferRequestReader(SharedMemoryRegistry(False))
    lent = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
    for header in (
        head({"name": "A", "datatype": "FP32", "shape": [1], "parameters": lent}),
        head(tensor("A", "FP32", [1], 4), outputs=[{"name": "OUT", "parameters": lent}]),
    ):
        with pytest.raises(CharoniaError):
            reader.read(CONFIG, header + bytes(4), len(header))
    assert known(reader) == 0


def test_headers_that_are_remembered_have_a_bound() -> None:
    reader = InferRequestReader()
    for number in range(1000):
        header = head(tensor(f"A{number}", "FP32", [1], 4))
        reader.read(CONFIG, header + bytes(4), len(header))
    assert known(reader) == 256


# Bodies of nothing but JSON


def numbers(name: str, datatype: str, data: str, dims: int = 2) -> str:
    return f'{{"name":"{name}","datatype":"{datatype}","shape":[{dims}],"data":{data}}}'


def body(*inputs: str, more: str = "") -> bytes:
    return f'{{"inputs":[{",".join(inputs)}]{more}}}'.encode()


def test_numbers_in_json_are_those_of_each_request() -> None:
    reader = InferRequestReader()
    outputs = ',"outputs":[{"name":"OUT"}],"parameters":{"priority":3}'
    for data in ([1.5, -2], [3, 1e300], [-0.0, 7e-2]):
        for text in (json.dumps(data), json.dumps(data, separators=(",", ":"))):
            content = body(numbers("A", "FP32", text), numbers("B", "INT64", "[4, -5]"), more=outputs)
            calls = [reader.read(CONFIG, content, None), InferRequestReader().read(CONFIG, content, None)]
            shown = [
                [(x.name, x.datatype, x.shape, x.data.dtype, x.data.tobytes()) for x in call.request.inputs.values()]
                for call in calls
            ]
            assert shown[0] == shown[1]
            assert (calls[0].request.outputs, calls[0].request.parameters) == (("OUT",), {"priority": 3})
    assert len(reader.bodies) == 1


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("FP32", "[1]"),
        ("FP32", "[1,2,3]"),
        ("FP32", "[1,]"),
        ("FP32", "[1,+2]"),
        ("FP32", "[]"),
        ("FP32", "[1 2]"),
        ("FP64", "[1," + "9" * 400 + "]"),
        ("INT8", "[1,128]"),
        ("UINT64", "[1,-1]"),
        ("INT32", "[1,2.0]"),
        ("INT32", "[1,9999999999999999999999]"),
    ],
)
def test_numbers_that_are_refused_are_so_as_at_first(datatype: str, data: str) -> None:
    texts = []
    for reader in (InferRequestReader(), read := InferRequestReader()):
        if reader is read:
            reader.read(CONFIG, body(numbers("A", datatype, "[1,2]")), None)
            assert len(reader.bodies) == 1
        with pytest.raises(CharoniaError) as raised:
            reader.read(CONFIG, body(numbers("A", datatype, data)), None)
        texts.append(raised.value.message)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "content",
    [
        body(numbers("A", "FP32", "[1,2]"), more=',"id":"7"'),
        body(numbers("A", "FP32", "[[1],[2]]")),
        body(numbers("A", "FP32", "[1,2]"), more=',"data":[1,2]'),
        body(numbers("A", "FP32", "[[1],[2]]"), more=',"data":[1,2]'),
        body(numbers("A", "FP32", '[3,4],"data":[1,2]')),
        body(numbers("A", "FP32", '[1,2],"x\\"data":[1,2]')),
        body(numbers("A", "FP32", '[[1],[2]],"x\\"data":[1,2]')),
        body(numbers("A", "BYTES", '["1","2"]')),
        body(numbers("A", "BOOL", "[true,false]")),
        body(numbers("A", "FP32", "[1,2]"), more=f',"parameters":{{"long":"{"x" * 5000}"}}'),
    ],
    ids=["id", "nested", "more", "elsewhere", "twice", "like", "likewise", "bytes", "bool", "long"],
)
def test_json_of_another_look_is_not_remembered(content: bytes) -> None:
    reader = InferRequestReader()
    first, second = (reader.read(CONFIG, content, None).request.inputs["A"] for _ in range(2))
    assert len(reader.bodies) == 0
    assert first.data.tolist() == second.data.tolist()
