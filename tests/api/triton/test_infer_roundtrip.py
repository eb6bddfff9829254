"""What the published client writes we read, and what we write it reads: every datatype, JSON and raw."""

from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from charonia.api.infer_call import InferCall, RequestedOutput
from charonia.api.json_tensors import dump_json
from charonia.api.triton.infer import encode_infer_response
from charonia.api.triton.infer_request import InferRequestReader
from charonia.core.model import ModelConfig
from charonia.core.request import InferRequest, InferResponse, ParameterValue
from charonia.core.tensor import NUMPY_TYPES, Tensor

CONFIG = ModelConfig("m", "1", "b")
SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
BINARY_ONLY = ("FP16", "BF16")


def values(datatype: str) -> st.SearchStrategy[Any]:
    if datatype == "BYTES":
        return SHAPES.flatmap(lambda shape: arrays.arrays(np.object_, shape, elements=TEXTS.map(str.encode)))
    return SHAPES.flatmap(lambda shape: arrays.arrays(NUMPY_TYPES[datatype], shape))


def asked(datatype: str, data: Any, binary: bool) -> Any:
    """The request as the published client writes it."""
    given_input = triton.InferInput("IN", list(data.shape), datatype)
    if datatype == "BF16":
        given_input._parameters["binary_data_size"] = data.nbytes
        given_input._raw_data = data.tobytes()
    else:
        given_input.set_data_from_numpy(data, binary_data=binary)
    outputs = [triton.InferRequestedOutput("IN", binary_data=binary)]
    return triton.InferenceServerClient.generate_request_body([given_input], outputs=outputs, request_id="é")


def same(one: Any, other: Any) -> bool:
    floats = one.dtype.kind == "f"
    return one.shape == other.shape and bool(np.array_equal(one, other, equal_nan=floats))


@pytest.mark.parametrize("binary", [False, True], ids=["json", "raw"])
@pytest.mark.parametrize("datatype", sorted(NUMPY_TYPES))
@given(drawn=st.data())
@settings(max_examples=20, deadline=None)
def test_there_and_back(datatype: str, binary: bool, drawn: st.DataObject) -> None:
    if datatype in BINARY_ONLY and not binary:
        return
    data = drawn.draw(values(datatype))
    body, length = asked(datatype, data, binary)
    call = InferRequestReader().read(CONFIG, body, length)
    tensor = call.request.inputs["IN"]
    read = tensor.data.reshape(tensor.shape)
    assert (tensor.datatype, call.request.id) == (datatype, "é")
    assert same(read, data.astype(read.dtype))

    answer = encode_infer_response(CONFIG, call, InferResponse((Tensor("IN", datatype, data.shape, read),)))
    result = triton.InferenceServerClient.parse_response_body(
        b"".join(answer.parts), header_length=answer.header_length
    )
    if datatype == "BF16":
        blob = b"".join(answer.parts)[answer.header_length or None :]
        assert blob == data.tobytes() if data.size else answer.header_length is None
        return
    heard = result.as_numpy("IN")
    if datatype == "BYTES" and heard.size:
        heard = np.array([each if isinstance(each, bytes) else each.encode() for each in heard.ravel()], np.object_)
    assert same(heard.reshape(data.shape), data.astype(heard.dtype))


@pytest.mark.parametrize("value", [0.1, np.nan, np.inf, 1e300])
@pytest.mark.parametrize("request_id", ["", 'an "id"'])
@pytest.mark.parametrize("parameters", [{}, {"key": "text", "number": 1.5}])
def test_a_response_reads_as_if_it_were_written_in_one_piece(
    value: float, request_id: str, parameters: dict[str, ParameterValue]
) -> None:
    raw, listed = np.array([1, 2], np.int32), np.array([[value, 1e-7], [value, -value]])
    call = InferCall(InferRequest(request_id), {"RAW": RequestedOutput(binary=True)})
    outputs = Tensor("LISTED", "FP64", (2, 2), listed), Tensor("RAW", "INT32", (2,), raw)
    written = {"name": "LISTED", "datatype": "FP64", "shape": [2, 2], "data": listed.ravel().tolist()}
    behind = {"name": "RAW", "datatype": "INT32", "shape": [2], "parameters": {"binary_data_size": 8}}
    document = {"id": request_id} if request_id else {}
    document |= {"model_name": "m", "model_version": "1", **({"parameters": parameters} if parameters else {})}
    whole = dump_json(document | {"outputs": [written, behind]}, strict=bool(np.isfinite(listed).all()))
    for _ in range(2):
        answer = encode_infer_response(CONFIG, call, InferResponse(outputs, parameters))
        assert b"".join(answer.parts) == whole + raw.tobytes()
        assert answer.header_length == len(whole)
