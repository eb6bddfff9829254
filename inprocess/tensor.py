"""Tensors as programs have them: numpy's and torch's arrays, whatever exports DLPack, lists of numbers and texts. None
of them is copied where its layout allows; torch is imported only for its own tensors."""

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core import tensor as core
from ..core.errors import InvalidArgument
from ..core.model import ModelConfig
from ..core.tensor import NUMPY_TYPES

_BITS = "BF16"
_TEXTS = "BYTES"
_DATATYPES: dict[np.dtype[Any], str] = {
    np.dtype(kind): datatype for datatype, kind in NUMPY_TYPES.items() if datatype not in (_BITS, _TEXTS)
}


class Tensor(msgspec.Struct, eq=False):
    """A named type, a shape and the elements: what responses have by output, and requests may have by input. Who writes
    to its elements writes to those of the model, or of the program that gave them."""

    data_type: str
    """A datatype of KServe's v2 protocol."""
    shape: tuple[int, ...]
    data: NDArray[Any]
    """The elements, of the numpy dtype of the type: BF16 as bits in uint16, BYTES as objects of bytes."""

    @classmethod
    def from_dlpack(cls, array: Any) -> "Tensor":
        """The tensor of an array of numpy, torch or another library, whose memory it shares."""
        return to_tensor(array)

    @classmethod
    def from_bytes_array(cls, values: Any) -> "Tensor":
        """BYTES of nested lists, or an array, of bytes or texts."""
        return _texts(np.asarray(values, object))

    from_string_array = from_bytes_array

    def to_numpy(self) -> NDArray[Any]:
        """The elements as an array, which shares their memory."""
        return self.data.reshape(self.shape)

    def to_torch(self) -> Any:
        """The same as a tensor of torch; BF16 is `torch.bfloat16`. Raises `InvalidArgument` for BYTES."""
        import torch

        array = self._numbers()
        made = torch.from_numpy(array if array.flags.writeable else array.copy())
        return made.view(torch.bfloat16) if self.data_type == _BITS else made

    def to_bytes_array(self) -> NDArray[Any]:
        """The elements of BYTES as an array of objects, which are bytes."""
        if self.data_type != _TEXTS:
            raise InvalidArgument(f"the tensor is {self.data_type}, not BYTES")
        return self.to_numpy()

    def to_string_array(self) -> NDArray[Any]:
        """The elements of BYTES as an array of texts, read as UTF-8."""
        texts = [value.decode() for value in self.to_bytes_array().ravel().tolist()]
        array = np.empty(len(texts), object)
        array[:] = texts
        return array.reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.to_numpy(), dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        if self.data_type == _BITS:
            return self.to_torch().__dlpack__()
        return self._numbers().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.data.__dlpack_device__()

    def _numbers(self) -> NDArray[Any]:
        if self.data_type == _TEXTS:
            raise InvalidArgument("a tensor of BYTES is no array of numbers: use to_bytes_array or to_string_array")
        return self.to_numpy()


def to_tensor(value: Any, expected: str | None = None) -> Tensor:
    """What a program gives, as a tensor. `expected`: the datatype that the model declares; lists and numbers take it,
    and bits in uint16 may be BF16. Raises `InvalidArgument` for what is none, or lies elsewhere."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, np.ndarray):
        if hasattr(value, "__dlpack__") and not isinstance(value, np.generic):
            return _shared(value)
        value = _listed(value, expected)
    datatype = _DATATYPES.get(value.dtype)
    if datatype is None:
        return _converted(value)
    if expected == _BITS and datatype == "UINT16":
        datatype = _BITS
    return Tensor(datatype, value.shape, value if value.flags.c_contiguous else value.copy())


def named_tensor(name: str, value: Any, config: ModelConfig) -> core.Tensor:
    """An input as requests to the model of that config have it. Raises as `to_tensor`, with the name."""
    if type(value) is np.ndarray:  # the usual one, whose call is to cost little
        datatype = _DATATYPES.get(value.dtype)
        if datatype is not None and datatype != "UINT16" and value.flags.c_contiguous:
            return core.Tensor(name, datatype, value.shape, value)
    expected = next((spec.datatype for spec in config.inputs if spec.name == name), None)
    try:
        tensor = to_tensor(value, expected)
    except InvalidArgument as error:
        raise InvalidArgument(f"input '{name}': {error.message}", field=name) from None
    return core.Tensor(name, tensor.data_type, tensor.shape, tensor.data)


def _shared(value: Any) -> Tensor:
    """The tensor of another library's array, which exports DLPack."""
    bits = False
    if type(value).__module__.partition(".")[0] == "torch":
        import torch

        value = value.detach()
        bits = value.dtype is torch.bfloat16
        value = value.contiguous().cpu()  # a copy only of what lies elsewhere
        value = value.view(torch.uint16) if bits else value
    try:
        array = np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{type(value).__name__} cannot be read: {error}") from None
    return Tensor(_BITS, array.shape, array) if bits else to_tensor(array)


_WIDER = {"b": "biuf", "i": "iuf", "u": "iuf", "f": "f"}
"""By the kind of listed numbers: the kinds of datatypes that hold them."""


def _listed(value: Any, expected: str | None) -> NDArray[Any]:
    """Numbers, texts, and nested lists of them. Raises `InvalidArgument`."""
    try:
        if expected == _TEXTS or isinstance(value, bytes | str):
            return np.array(value, object)
        array = np.array(value)
        if array.dtype == object or (array.dtype.kind in "SU" and not _is_text(np.array(value, object))):
            raise InvalidArgument(f"must be an array, or lists of numbers or texts, got a {type(value).__name__}")
        if array.dtype.kind in "SU":
            return np.array(value, object)
        if expected is None:
            return array
        if expected == _BITS:
            return _rounded(array)
        kind = np.dtype(NUMPY_TYPES[expected])
        if array.size and kind.kind not in _WIDER.get(array.dtype.kind, ""):
            raise InvalidArgument(f"is {expected}, which does not hold what is listed: {array.dtype}")
        return np.array(value, kind)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgument(f"a {type(value).__name__} cannot be read: {error}") from None


def _rounded(array: NDArray[Any]) -> NDArray[Any]:
    """The bits of the nearest BF16, by rounding half to even."""
    bits = array.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), 0x7FC0, rounded).astype(np.uint16)


def _is_text(array: NDArray[Any]) -> bool:
    return all(isinstance(element, bytes | str) for element in array.ravel().tolist())


def _converted(array: NDArray[Any]) -> Tensor:
    """The tensor of an array whose dtype is not among v2's."""
    if array.dtype.kind in "SUO":
        return _texts(array)
    if array.dtype.name == "bfloat16":  # of ml_dtypes
        return Tensor(_BITS, array.shape, np.ascontiguousarray(array).view(np.uint16))
    native = array.dtype.newbyteorder("=")
    if native in _DATATYPES:
        return Tensor(_DATATYPES[native], array.shape, array.astype(native))
    raise InvalidArgument(f"there is no datatype for an array of {array.dtype}")


def _texts(array: NDArray[Any]) -> Tensor:
    """Texts and bytes as BYTES. Raises `InvalidArgument` for anything else."""
    elements = array.ravel().tolist()
    if not (array.dtype == object and all(type(element) is bytes for element in elements)):
        made = np.empty(len(elements), object)
        made[:] = list(_bytes_of(elements))
        return Tensor(_TEXTS, array.shape, made.reshape(array.shape))
    return Tensor(_TEXTS, array.shape, array)


def _bytes_of(elements: Iterable[Any]) -> Iterable[bytes]:
    for element in elements:
        if isinstance(element, bytes):
            yield element
        elif isinstance(element, str):
            try:
                yield element.encode()
            except UnicodeEncodeError:
                raise InvalidArgument("a text is not valid Unicode") from None
        else:
            raise InvalidArgument(f"texts and bytes may be elements of BYTES, not {type(element).__name__}")
