"""What programs give and get, as tensors."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from charonia import InvalidArgument, Tensor
from charonia.core.model import ModelConfig
from charonia.core.tensor import TensorSpec
from charonia.inprocess.tensor import named_tensor, to_tensor


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint64, np.float16, np.float64])
def test_arrays_are_shared(dtype: Any) -> None:
    array = np.ones((2, 3), dtype)
    tensor = to_tensor(array)
    assert tensor.to_numpy() is not None
    assert np.shares_memory(tensor.to_numpy(), array)
    assert np.shares_memory(np.from_dlpack(tensor), array)
    assert tensor.__dlpack_device__() == (1, 0)
    assert np.asarray(tensor).dtype == array.dtype


def test_tensors_of_torch_are_shared() -> None:
    ours = torch.arange(6, dtype=torch.int64).reshape(2, 3)
    tensor = Tensor.from_dlpack(ours)
    assert (tensor.data_type, tensor.shape) == ("INT64", (2, 3))
    assert torch.from_dlpack(tensor).data_ptr() == ours.data_ptr()
    assert tensor.to_torch().data_ptr() == ours.data_ptr()
    assert to_tensor(torch.ones(2, requires_grad=True)).data_type == "FP32"
    assert to_tensor(ours.T).to_numpy().tolist() == ours.T.tolist()


def test_bfloat16_is_bits() -> None:
    ours = torch.tensor([1.0, -2.5, 3e38], dtype=torch.bfloat16)
    tensor = to_tensor(ours)
    assert tensor.data_type == "BF16"
    assert tensor.data.dtype == np.uint16
    assert torch.equal(tensor.to_torch(), ours)
    assert torch.equal(torch.from_dlpack(tensor), ours)
    assert to_tensor(tensor.data, "BF16").data_type == "BF16"
    values = [1.0, 1.00390625, -0.1, 3.4e38, float("inf"), float("nan")]
    listed = to_tensor(values, "BF16").to_torch()
    assert torch.equal(listed.nan_to_num(), torch.tensor(values, dtype=torch.bfloat16).nan_to_num())


@pytest.mark.parametrize(
    "values", [[["a", "é"]], [[b"a", "é".encode()]], np.array([["a", "é"]]), np.array([["a", "é"]], object)]
)
def test_texts_are_bytes(values: Any) -> None:
    tensor = to_tensor(values, "BYTES")
    assert (tensor.data_type, tensor.shape) == ("BYTES", (1, 2))
    assert tensor.to_bytes_array().tolist() == [[b"a", "é".encode()]]
    assert tensor.to_string_array().tolist() == [["a", "é"]]
    assert Tensor.from_string_array(values).to_string_array().tolist() == [["a", "é"]]


def test_lists_take_the_declared_type() -> None:
    assert to_tensor([1, 2], "FP16").data.dtype == np.float16
    assert to_tensor([[True]], "INT32").data.tolist() == [[1]]
    assert to_tensor(3, "UINT8").shape == ()
    assert to_tensor("text", "BYTES").to_string_array().tolist() == "text"
    assert to_tensor([], "INT8").data.dtype == np.int8
    assert to_tensor([1.5]).data_type == "FP64"


def test_other_layouts_are_copied() -> None:
    assert to_tensor(np.array([1, 2], ">i4")).data.tolist() == [1, 2]
    assert to_tensor(np.arange(6).reshape(2, 3)[:, ::2]).data.flags.c_contiguous
    assert Tensor("FP32", (2, 3), np.zeros(6, np.float32)).to_numpy().shape == (2, 3)


@pytest.mark.parametrize(
    ("value", "expected", "message"),
    [
        ([1.5], "INT32", "input 'X': is INT32, which does not hold what is listed: float64"),
        ([300], "UINT8", "input 'X': a list cannot be read"),
        ([1, "a"], "INT32", "input 'X': must be an array, or lists of numbers or texts, got a list"),
        (object(), None, "input 'X': must be an array"),
        ([1], "BYTES", "input 'X': texts and bytes may be elements of BYTES, not int"),
        ("\ud800", "BYTES", "input 'X': "),
        (np.zeros(1, complex), None, "input 'X': there is no datatype for an array of complex128"),
    ],
)
def test_what_is_no_tensor_is_refused(value: Any, expected: str | None, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        named_tensor(
            "X", value, ModelConfig("m", "1", "b", inputs=() if expected is None else (TensorSpec("X", expected, ()),))
        )
    assert str(refused.value).startswith(message)
    assert refused.value.field == "X"


def test_numbers_are_no_texts() -> None:
    with pytest.raises(InvalidArgument, match="the tensor is INT64, not BYTES"):
        to_tensor(np.zeros(1, int)).to_bytes_array()
    with pytest.raises(InvalidArgument, match="use to_bytes_array"):
        np.from_dlpack(to_tensor(["a"]))


def test_importing_the_package_reads_nothing() -> None:
    code = """if True:
    import sys, charonia
    assert not {name for name in sys.modules if name.startswith("charonia.")}, "it is not light"
    from charonia import Server, InvalidArgument
    assert "InvalidArgument" in dir(charonia) and issubclass(InvalidArgument, charonia.CharoniaError)
    assert not {"torch", "fastapi", "transformers"} & {*sys.modules}, "it is heavy"
    try:
        charonia.nothing
    except AttributeError as error:
        print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "module 'charonia' has no attribute 'nothing'\n", done.stderr
