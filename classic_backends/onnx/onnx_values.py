"""Arrays as onnxruntime takes and gives them: its strings are text, and numpy has no BF16."""

import ctypes
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ...core.errors import InvalidArgument
from ...core.tensor import TensorSpec
from ..runtime import Arrays

_BFLOAT16 = 16
"""onnx.TensorProto.BFLOAT16"""

RunSession: TypeAlias = Callable[[Arrays, Sequence[str]], Sequence[NDArray[Any]]]
"""Inputs by name and output names -> these outputs, in the same order."""


def session_runner(
    session: Any, options: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> RunSession:
    """The function that runs a session with these tensors; conversions cost nothing where no tensor needs them."""

    def run_arrays(given: Arrays, output_names: Sequence[str]) -> Sequence[NDArray[Any]]:
        return session.run(output_names, given, options)  # type: ignore[no-any-return]

    def run_values(given: Arrays, output_names: Sequence[str]) -> Sequence[NDArray[Any]]:
        values = {name: _to_value(array, name in bfloat16) for name, array in given.items()}
        return [_to_array(value) for value in session.run_with_ort_values(list(output_names), values, options)]

    bfloat16 = {spec.name for spec in (*inputs, *outputs) if spec.datatype == "BF16"}
    texts = {spec.name for spec in (*inputs, *outputs) if spec.datatype == "BYTES"}
    run = run_values if bfloat16 else run_arrays
    return _with_texts(run, texts) if texts else run


def _to_value(array: NDArray[Any], bfloat16: bool) -> Any:
    whole = np.ascontiguousarray(array)
    make: Any = onnxruntime.OrtValue
    return make.ortvalue_from_numpy_with_onnx_type(whole, _BFLOAT16) if bfloat16 else make.ortvalue_from_numpy(whole)


def _to_array(value: Any) -> NDArray[Any]:
    if value.element_type() != _BFLOAT16:
        return value.numpy()  # type: ignore[no-any-return]
    shape = tuple(value.shape())
    bits = ctypes.string_at(value.data_ptr(), 2 * int(np.prod(shape)))
    return np.frombuffer(bits, np.uint16).reshape(shape)


def _with_texts(run: RunSession, texts: Collection[str]) -> RunSession:
    def run_texts(given: Arrays, output_names: Sequence[str]) -> Sequence[NDArray[Any]]:
        decoded = {name: _decoded(name, array) if name in texts else array for name, array in given.items()}
        outputs = zip(output_names, run(decoded, output_names), strict=True)
        return [
            _objects((item.encode() for item in array.flat), array.shape) if name in texts else array
            for name, array in outputs
        ]

    return run_texts


def _decoded(name: str, array: NDArray[Any]) -> NDArray[Any]:
    try:
        return _objects((item.decode() for item in array.flat), array.shape)
    except UnicodeDecodeError as error:
        message = f"input '{name}' of an ONNX model must be UTF-8: {error}"
        raise InvalidArgument(message, field=name) from None


def _objects(items: Iterable[object], shape: tuple[int, ...]) -> NDArray[Any]:
    return np.array(list(items), dtype=object).reshape(shape)
