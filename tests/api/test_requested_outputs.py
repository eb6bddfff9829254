"""Classification: the shapes, words and order of v2's section 6."""

from typing import Any

import numpy as np
import pytest

from charonia.api.infer_call import classify
from charonia.core.errors import InvalidArgument
from charonia.core.model import ModelConfig
from charonia.core.tensor import Tensor

PLAIN = ModelConfig("m", "1", "b", labels={"O": ("CAT", "DOG", "")})
BATCHED = ModelConfig("m", "1", "b", max_batch_size=8)


def said(tensor: Tensor) -> list[str]:
    assert tensor.datatype == "BYTES"
    return [element.decode() for element in tensor.data.ravel()]


@pytest.mark.parametrize(
    ("datatype", "values", "classes", "words"),
    [
        ("FP32", [1.5, 3.3, -2], 2, ["3.300000:1:DOG", "1.500000:0:CAT"]),
        ("FP64", [1.5, 3.3, 9], 1, ["9.000000:2"]),
        ("INT8", [-128, 127, 0], 9, ["127:1:DOG", "0:2", "-128:0:CAT"]),
        ("UINT64", [0, 2**64 - 1], 1, ["18446744073709551615:1:DOG"]),
        ("FP32", [2, 2, 2], 2, ["2.000000:0:CAT", "2.000000:1:DOG"]),
        ("FP32", [np.nan, 1, np.inf], 3, ["inf:2", "1.000000:1:DOG", "nan:0:CAT"]),
        ("INT32", [], 3, []),
    ],
)
def test_greatest_first(datatype: str, values: Any, classes: int, words: list[str]) -> None:
    tensor = classify(PLAIN, Tensor.from_values("O", datatype, values), classes)
    assert (said(tensor), tensor.shape) == (words, (len(words),))


def test_a_batch_has_its_own_for_each() -> None:
    tensor = classify(BATCHED, Tensor.from_values("O", "INT32", [[[1, 2], [4, 3]], [[9, 8], [7, 6]]]), 2)
    assert (tensor.shape, tensor.data.shape) == ((2, 2), (2, 2))
    assert said(tensor) == ["4:2", "3:3", "9:0", "8:1"]


def test_an_empty_batch() -> None:
    tensor = classify(BATCHED, Tensor("O", "FP32", (0, 5), np.empty((0, 5), np.float32)), 2)
    assert (tensor.shape, said(tensor)) == ((0, 2), [])


@pytest.mark.parametrize("datatype", ["BOOL", "BYTES", "FP16"])
def test_what_has_no_order(datatype: str) -> None:
    with pytest.raises(InvalidArgument, match=f"class result not available .* unsupported type '{datatype}'"):
        classify(PLAIN, Tensor.from_values("O", datatype, [1]), 1)


def test_too_large() -> None:
    with pytest.raises(InvalidArgument, match="classification output tensor too large"):
        classify(PLAIN, Tensor("O", "INT8", (1000001,), np.zeros(1000001, np.int8)), 1)
