"""Arrays as onnxruntime takes and gives them: its strings are text, and of BF16 numpy knows nothing."""

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
"""Inputs by name and the outputs wanted -> these outputs, in the same order."""


def session_runner(
    session: Any, options: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> RunSession:
    """How to run a session whose tensors are these, at no cost for what none of them needs."""
    wide = {spec.name for spec in inputs if spec.datatype == "BF16"}
    if wide or any(spec.datatype == "BF16" for spec in outputs):
        run = _run_values(session, options, wide)
    else:
        run = _run_arrays(session, options)
    texts = {spec.name for spec in (*inputs, *outputs) if spec.datatype == "BYTES"}
    return _with_texts(run, texts) if texts else run


def _run_arrays(session: Any, options: Any) -> RunSession:
    def run(inputs: Arrays, wanted: Sequence[str]) -> Sequence[NDArray[Any]]:
        return session.run(wanted, inputs, options)  # type: ignore[no-any-return]

    return run


def _run_values(session: Any, options: Any, wide: Collection[str]) -> RunSession:
    def run(inputs: Arrays, wanted: Sequence[str]) -> Sequence[NDArray[Any]]:
        values = {name: _value(array, name in wide) for name, array in inputs.items()}
        return [_array(value) for value in session.run_with_ort_values(list(wanted), values, options)]

    return run


def _value(array: NDArray[Any], wide: bool) -> Any:
    whole = np.ascontiguousarray(array)
    make: Any = onnxruntime.OrtValue
    return make.ortvalue_from_numpy_with_onnx_type(whole, _BFLOAT16) if wide else make.ortvalue_from_numpy(whole)


def _array(value: Any) -> NDArray[Any]:
    if value.element_type() != _BFLOAT16:
        return value.numpy()  # type: ignore[no-any-return]
    shape = tuple(value.shape())
    bits = ctypes.string_at(value.data_ptr(), 2 * int(np.prod(shape)))
    return np.frombuffer(bits, np.uint16).reshape(shape)


def _with_texts(run: RunSession, texts: Collection[str]) -> RunSession:
    def run_texts(inputs: Arrays, wanted: Sequence[str]) -> Sequence[NDArray[Any]]:
        given = {name: _decoded(name, array) if name in texts else array for name, array in inputs.items()}
        made = run(given, wanted)
        return [_encoded(array) if name in texts else array for name, array in zip(wanted, made, strict=True)]

    return run_texts


def _decoded(name: str, array: NDArray[Any]) -> NDArray[Any]:
    try:
        return _objects([item.decode() for item in array.flat], array.shape)
    except UnicodeDecodeError as error:
        message = f"input '{name}' of an ONNX model must be UTF-8: {error}"
        raise InvalidArgument(message, field=name) from None


def _encoded(array: NDArray[Any]) -> NDArray[Any]:
    return _objects([item.encode() for item in array.flat], array.shape)


def _objects(items: Iterable[object], shape: tuple[int, ...]) -> NDArray[Any]:
    return np.array(list(items), dtype=object).reshape(shape)
