"""The place of the largest number at every level, beside numpy's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from charonia.engine.cpu import library
from charonia.engine.cpu.sampling import argmax

DTYPES = (torch.float32, torch.bfloat16)
SIZES = (1, 2, 15, 16, 17, 2047, 2048, 2049, 5000)


def right(x: Tensor) -> list[int]:
    return x.float().numpy().argmax(-1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_random_rows(level: str, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(9, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    assert argmax(x).tolist() == right(x)
    assert argmax(x - 100).tolist() == right(x - 100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_of_equals(level: str, dtype: torch.dtype) -> None:
    x = torch.full((2, 6000), -3.0, dtype=dtype)
    x[0, [2100, 2101, 5000]] = -2.0
    assert argmax(x).tolist() == [2100, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_apart_and_numbers_apart(level: str, dtype: torch.dtype) -> None:
    x = torch.randn(6, 3000).to(dtype)
    assert argmax(x[1::2, 100:2500]).tolist() == right(x[1::2, 100:2500])
    assert argmax(x.T).tolist() == right(x.T.contiguous())


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
def test_the_largest_of_any_numbers(numbers: list[float]) -> None:
    """Infinities, zeros of both signs and numbers below the normal ones too."""
    x = torch.tensor([numbers], dtype=torch.float32)
    assert x[0, argmax(x)[0]] == np.float32(max(numbers))


def test_what_is_no_number_still_has_a_place() -> None:
    x = torch.tensor([[0.0, float("nan"), 1.0], [float("nan")] * 3])
    assert argmax(x).tolist() == [1, 0]


def test_no_rows_have_no_places() -> None:
    assert argmax(torch.empty(0, 5)).tolist() == []


def test_every_other_dtype_is_torchs() -> None:
    assert argmax(torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.float64)).tolist() == [1]
    assert torch.float64 not in library.DTYPE_CODES
