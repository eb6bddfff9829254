"""Tensors as the author of a pipeline has them: numpy arrays by name, and plain Python values where those will do."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidArgument
from ..core.request import ParameterValue
from ..core.tensor import NUMPY_TYPES, Tensor, TensorSpec

_KINDS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}
"""The kinds of numpy's types whose values each kind of ours takes from plain numbers."""


class NamedTensors(Mapping[str, NDArray[Any]]):
    """The tensors of a request or a response by name, read-only: strings are `bytes` in arrays of objects, BF16 its
    bits. `id`: the request's; `parameters`: beside the tensors."""

    def __init__(self, tensors: Iterable[Tensor], parameters: Mapping[str, ParameterValue], id: str = "") -> None:
        self.id = id
        self.parameters = parameters
        self._arrays = {tensor.name: tensor.data.reshape(tensor.shape) for tensor in tensors}
        for array in self._arrays.values():  # views: what is beneath may be a cache's, or another request's
            array.flags.writeable = False

    def __getitem__(self, name: str) -> NDArray[Any]:
        try:
            return self._arrays[name]
        except KeyError:
            raise KeyError(f"no tensor '{name}' among {sorted(self._arrays)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"NamedTensors({self._arrays})"

    @overload
    def text(self, name: str) -> str: ...
    @overload
    def text(self, name: str, default: str | None) -> str | None: ...
    def text(self, name: str, default: str | None = None) -> str | None:
        """The one string of a tensor; `default` if there is no such tensor.

        Raises:
            KeyError: there is none, and no default.
            InvalidArgument: there is not exactly one, or it is not UTF-8.
        """
        return default if default is not None and name not in self else _one(name, self.texts(name))

    def texts(self, name: str) -> list[str]:
        """All strings of a tensor. Raises as `text` does."""
        array = self[name]
        if not array.dtype.hasobject:
            raise TypeError(f"'{name}' holds {array.dtype}, not strings")
        try:
            return [element.decode() for element in array.ravel()]
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"'{name}' is not UTF-8: {error}", field=name) from None

    def item(self, name: str, default: Any = None) -> Any:
        """The one element of a tensor as Python's own value; `default` if there is no such tensor. Raises as `text`."""
        return default if default is not None and name not in self else _one(name, self[name].ravel().tolist())


def _one(name: str, values: list[Any]) -> Any:
    if len(values) != 1:
        raise InvalidArgument(f"'{name}' must have one element, got {len(values)}", field=name)
    return values[0]


def to_tensor(spec: TensorSpec, value: Any, batched: bool) -> Tensor:
    """The tensor that `spec` declares, of an array of its type, or of plain values; with fewer dimensions than the
    model's, `batched` counting for one, the first ones are 1.

    Raises:
        ValueError: it has another type or shape.
    """
    if spec.datatype == "BYTES":
        data = _strings(value)
    elif isinstance(value, np.ndarray | np.generic):
        data = np.asarray(value)
        wanted = np.dtype(NUMPY_TYPES[spec.datatype])
        if data.dtype != wanted:
            raise ValueError(f"must be {spec.datatype}, an array of {wanted}, got {data.dtype}")
    else:
        data = _numbers(spec.datatype, value)
    dims = (-1, *spec.dims) if batched else spec.dims
    data = data.reshape((1,) * (len(dims) - data.ndim) + data.shape)
    if data.ndim != len(dims) or any(dim not in (-1, size) for size, dim in zip(data.shape, dims, strict=True)):
        raise ValueError(f"must have shape {list(dims)}, got {list(data.shape)}")
    return Tensor(spec.name, spec.datatype, data.shape, data)


def _strings(value: Any) -> NDArray[Any]:
    array = np.array(value, np.object_, copy=None)
    flat = array.ravel()
    if all(type(element) is bytes for element in flat):
        return array
    strings = np.empty(flat.shape, np.object_)
    for index, element in enumerate(flat):
        if not isinstance(element, str | bytes):
            raise ValueError(f"must be strings, got {type(element).__name__}")
        strings[index] = element.encode() if isinstance(element, str) else bytes(element)
    return strings.reshape(array.shape)


def _numbers(datatype: str, value: Any) -> NDArray[Any]:
    """An array of plain numbers, which must be in the type's range, and whole where the type is."""
    wanted = np.dtype(NUMPY_TYPES[datatype])
    array = np.asarray(value)
    if datatype == "BF16":
        raise ValueError("must be BF16, which is given as its bits, an array of uint16")
    if array.dtype.kind not in _KINDS[wanted.kind] and array.size:
        raise ValueError(f"must be {datatype}, got {array.dtype.name if array.dtype.kind in 'biuf' else repr(value)}")
    try:
        with np.errstate(over="raise"):
            converted = array.astype(wanted)
    except FloatingPointError:
        raise ValueError(f"is beyond {datatype}: {value}") from None
    if wanted.kind in "iu" and not (converted == array).all():
        raise ValueError(f"is beyond {datatype}: {value}")
    return converted
