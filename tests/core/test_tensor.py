"""Tensors know their v2 names."""

import numpy as np
import pytest

from charonia.core.tensor import NUMPY_TYPES, Tensor


@pytest.mark.parametrize("datatype", sorted(set(NUMPY_TYPES) - {"BYTES"}))
def test_values_take_the_named_type(datatype: str) -> None:
    tensor = Tensor.from_values("x", datatype, [[0, 1, 1]])
    assert tensor.shape == (1, 3)
    assert tensor.data.dtype == np.dtype(NUMPY_TYPES[datatype])


def test_bytes_stay_bytes() -> None:
    assert Tensor.from_values("text", "BYTES", [b"a\0b"]).scalar == b"a\0b"


def test_a_scalar_is_one_element() -> None:
    assert Tensor.from_values("x", "INT32", 7).scalar == 7
    with pytest.raises(ValueError, match="size 1"):
        _ = Tensor.from_values("x", "INT32", [1, 2]).scalar
