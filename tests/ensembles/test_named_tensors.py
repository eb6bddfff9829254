"""Values of pipelines: what becomes of plain ones, what is refused, and how tensors are read."""

from typing import Any

import numpy as np
import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.tensor import Tensor
from charonia.ensembles.named_tensors import NamedTensors, to_tensor

from .graphs import spec


@pytest.mark.parametrize(
    ("datatype", "dims", "batched", "value", "shape", "elements"),
    [
        ("BYTES", (1,), False, "é", (1,), ["é".encode()]),
        ("BYTES", (-1,), False, ["a", b"b"], (2,), [b"a", b"b"]),
        ("BYTES", (-1,), True, np.array(["a", "b"]), (1, 2), [b"a", b"b"]),
        ("BYTES", (1,), True, np.array([[b"a"], ["b"]], object), (2, 1), [b"a", b"b"]),
        ("FP32", (2,), True, [1, 2.5], (1, 2), [1, 2.5]),
        ("FP32", (-1, 1), False, np.array([[1.5]], np.float32), (1, 1), [1.5]),
        ("INT8", (1,), False, -128, (1,), [-128]),
        ("UINT64", (1,), False, 2**64 - 1, (1,), [2**64 - 1]),
        ("INT32", (-1,), False, [], (0,), []),
        ("BOOL", (1,), False, True, (1,), [True]),
        ("BF16", (1,), False, np.array([7], np.uint16), (1,), [7]),
        ("INT64", (1, 1, 1), False, np.int64(3), (1, 1, 1), [3]),
    ],
)
def test_values_become_tensors(
    datatype: str, dims: tuple[int, ...], batched: bool, value: Any, shape: tuple[int, ...], elements: list[Any]
) -> None:
    made = to_tensor(spec("X", datatype, dims), value, batched)
    assert (made.name, made.datatype, made.shape, made.data.ravel().tolist()) == ("X", datatype, shape, elements)


@pytest.mark.parametrize(
    ("datatype", "value", "text"),
    [
        ("BYTES", 1, "must be strings, got int"),
        ("BYTES", [None], "must be strings, got NoneType"),
        ("INT32", 1.5, "must be INT32, got float64"),
        ("INT32", "1", "must be INT32, got '1'"),
        ("INT32", True, "must be INT32, got bool"),
        ("INT8", 128, "is beyond INT8: 128"),
        ("UINT8", -1, "is beyond UINT8: -1"),
        ("INT32", 2**70, f"must be INT32, got {2**70}"),
        ("FP16", 1e9, r"is beyond FP16: 1000000000\.0"),
        ("BOOL", 1, "must be BOOL, got int64"),
        ("FP32", np.array([1.0]), "must be FP32, an array of float32, got float64"),
        ("FP32", [[1.0], [1.0, 2.0]], "inhomogeneous"),
        ("FP32", [1.0, 2.0], r"must have shape \[1\], got \[2\]"),
        ("FP32", [[1.0]], r"must have shape \[1\], got \[1, 1\]"),
        ("BF16", 1.0, "must be BF16, which is given as its bits, an array of uint16"),
        ("FP32", None, "must be FP32, got None"),
    ],
)
def test_values_that_are_no_such_tensor_are_refused(datatype: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        to_tensor(spec("X", datatype), value, False)


def test_tensors_are_read_by_name() -> None:
    strings = Tensor("S", "BYTES", (2,), np.array([b"a", b"\xff"], object))
    one = Tensor("ONE", "BYTES", (1, 1), np.array(["é".encode()], object))
    number = Tensor("N", "FP32", (1,), np.array([1.5], np.float32))
    tensors = NamedTensors([strings, one, number], {"seed": 7}, "id")
    assert (tensors.id, tensors.parameters, sorted(tensors)) == ("id", {"seed": 7}, ["N", "ONE", "S"])
    assert (tensors.text("ONE"), tensors.texts("ONE"), tensors.item("N")) == ("é", ["é"], 1.5)
    assert (tensors.text("no", "none"), tensors.item("no", 3), tensors.get("no")) == ("none", 3, None)
    with pytest.raises(KeyError, match=r"no tensor 'no' among \['N', 'ONE', 'S'\]"):
        tensors.text("no")
    with pytest.raises(InvalidArgument, match="'S' is not UTF-8"):
        tensors.texts("S")
    with pytest.raises(InvalidArgument, match="'S' must have one element, got 2"):
        tensors.item("S")
    with pytest.raises(TypeError, match="'N' holds float32, not strings"):
        tensors.text("N")
    with pytest.raises(ValueError, match="read-only"):
        tensors["N"][0] = 2
    assert number.data.flags.writeable, "others may write what is beneath"
