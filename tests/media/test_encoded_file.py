"""Files of what an encoder elsewhere made of an image: which are read, and which are refused, and why."""

import io
import json
import struct
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from charonia.core.errors import InvalidArgument
from charonia.media.encoded_file import grid_of_places, read_rows

ROWS = np.random.default_rng(0).standard_normal((6, 4), np.float32)


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def torch_file(**options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(torch.from_numpy(ROWS), file, **options)
    return file.getvalue()


def npy_file(descr: str, shape: Any, data: bytes = b"") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def safe_file(dtype: str, shape: list[int], data: bytes) -> bytes:
    header = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_numbers_are_read_as_they_are(dtype: Any) -> None:
    rows = ROWS.astype(dtype)
    for data in (npy(rows), npy(np.asfortranarray(rows)), npy(rows[None]), safetensors.numpy.save({"any": rows})):
        read, grid = read_rows(data)
        assert read.dtype == dtype
        assert np.array_equal(read, rows)
        assert grid == (0, 0, 0)


def test_bfloat16_is_its_bits_and_a_grid_may_stand_beside() -> None:
    tensor = torch.from_numpy(ROWS).bfloat16()
    file = safetensors.torch.save({"image_embeds": tensor, "image_grid_thw": torch.tensor([[1, 4, 6]])})
    read, grid = read_rows(file)
    assert read.dtype == np.uint16
    assert torch.equal(torch.from_numpy(read.view(np.int16)).view(torch.bfloat16), tensor)
    assert grid == (1, 4, 6)
    assert grid_of_places(grid, len(read)) == (1, 2, 3)
    assert grid_of_places((1, 2, 3), len(read)) == (1, 2, 3)


def test_a_size_may_be_true() -> None:
    """As `.npy` has it, a number."""
    assert read_rows(npy_file("'<f4'", (True, True), bytes(4))).rows.shape == (1, 1)


@pytest.mark.parametrize(
    "grid", [(1, 4, 5), (1, 3, 8), (0, 0, 1), (-1, -4, 6), (1, 8, 6), (1, 1, 5), (1 << 40, 1 << 40, 6)]
)
def test_a_grid_leads_to_the_rows(grid: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgument, match=r"image_grid_thw \[.*\] does not lead to its 6 rows"):
        grid_of_places(grid, 6)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (torch_file(), "it is a pickle"),
        (torch_file(_use_new_zipfile_serialization=False), "it is a pickle"),
        (npy(np.array([{}], object), allow_pickle=True), "dtype must be float32 or float16, got object"),
        (npy(ROWS.astype(np.float64)), "got float64"),
        (npy(ROWS)[:-1], r"its data are not those of float32 \[6, 4\]|its data are not those"),
        (npy(ROWS).replace(b"(6, 4)", b"(9**9,"), "it is no .npy"),
        (npy(ROWS)[:20], "it is no .npy"),
        (npy(ROWS[0]), r"must be \[rows, width\], got \[4\]"),
        (npy(ROWS[:0]), r"must be \[rows, width\], got \[0, 4\]"),
        (npy(np.stack([ROWS, ROWS])), r"got \[2, 6, 4\]"),
        (npy(np.where(ROWS[3, 1] == ROWS, np.nan, ROWS)), "row 3 has numbers that are not finite"),
        (safe_file("BF16", [2, 1], struct.pack("<HH", 0x3F80, 0x7F80)), "row 1 has numbers that are not finite"),
        (safe_file("F64", [1, 1], bytes(8)), "must be one of F32, F16, BF16, got F64"),
        (safe_file("F32", [1, 1 << 40], bytes(4)), "neither safetensors nor .npy"),
        (safetensors.numpy.save({"a": ROWS, "b": ROWS}), "must have one tensor, image_embeds.*; it has a, b"),
        (safetensors.numpy.save({"image_grid_thw": np.ones(3, np.int64)}), "it has none"),
        (safetensors.numpy.save({"a": ROWS, "image_grid_thw": np.ones(4, np.int64)}), "three whole numbers, got I64"),
        (b"a picture", "neither safetensors nor .npy"),
        (npy_file("'<f4'", (1,) * 100, bytes(4)), r"must be \[rows, width\], got \[1, 1, 1, 1, 1, 1, 1, 1\]"),
        (npy_file("'<f4'", (0, 10**30)), r"must be \[rows, width\], got \[0, 1000"),
        (npy_file("()", (1, 1), bytes(4)), "it is no .npy"),
        (npy_file("'<f4'", f"({'-' * 4000}1, 1)", bytes(4)), "it is no .npy"),
        (safe_file("F32", [1] * 100, bytes(4)), r"must be \[rows, width\]"),
        (safe_file("F32", [0, 1 << 63], b""), r"must be \[rows, width\]"),
        (safe_file("F32", [1] * 40_000, bytes(4)), "its header has 120,0.. bytes, and may have 65,536"),
        (struct.pack("<Q", 1 << 62) + b"{}", "neither safetensors nor .npy"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_named(data: bytes, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        read_rows(data)
