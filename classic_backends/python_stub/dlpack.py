"""DLPack capsules of arrays, both ways, without a copy; BF16, which numpy does not have, included.

The layout is that of https://dmlc.github.io/dlpack/latest/c_api.html without a version, which every library makes.
"""

from __future__ import annotations

import ctypes
import weakref
from itertools import count
from typing import Any

import numpy as np

CPU = 1
_HOST_DEVICES = (CPU, 3, 11)  # plain, pinned for CUDA, pinned for ROCm

_KINDS = {"i": 0, "u": 1, "f": 2, "b": 6}
_BFLOAT = 4
_TYPES = {(code, 8 * size): f"{kind}{size}" for kind, code in _KINDS.items() for size in (1, 2, 4, 8)}


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _ManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)

_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _Destructor]
_api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))

_UNUSED = b"dltensor"
_USED = b"used_dltensor"

_exported: dict[int, tuple[Any, ...]] = {}
_serials = count(1)


def _delete_exported(address: int) -> None:
    _exported.pop(_ManagedTensor.from_address(address).context, None)


def _destroy_capsule(capsule: int) -> None:
    if _is_valid(capsule, _UNUSED):  # nobody took the tensor over
        _delete_exported(_pointer_of(capsule, _UNUSED))


_deleter = _Deleter(_delete_exported)
_destructor = _Destructor(_destroy_capsule)


def to_capsule(array: np.ndarray[Any, Any], bfloat16: bool) -> Any:
    """A capsule of the array's memory, which lasts until its consumer lets go. `bfloat16`: the array has the bits."""
    if array.dtype.kind not in _KINDS:
        raise ValueError(f"DLPack has no type for {array.dtype}")
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    strides = (ctypes.c_int64 * array.ndim)(*(step // array.itemsize for step in array.strides))
    code = _BFLOAT if bfloat16 else _KINDS[array.dtype.kind]
    managed = _ManagedTensor()
    serial = next(_serials)
    managed.tensor.data = array.__array_interface__["data"][0]
    managed.tensor.device = _Device(CPU, 0)
    managed.tensor.ndim = array.ndim
    managed.tensor.dtype = _DataType(code, 8 * array.itemsize, 1)
    managed.tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    managed.tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
    managed.context = serial
    managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p)
    _exported[serial] = (managed, shape, strides, array)
    return _api.PyCapsule_New(ctypes.addressof(managed), _UNUSED, _destructor)


class _Imported:
    """The owner, in the eyes of numpy, of another library's tensor."""

    def __init__(self, address: int) -> None:
        managed = _ManagedTensor.from_address(address)
        tensor = managed.tensor
        dtype = tensor.dtype
        self.bfloat16 = (dtype.code, dtype.bits) == (_BFLOAT, 16)
        kind = "u2" if self.bfloat16 else _TYPES.get((dtype.code, dtype.bits))
        if managed.deleter:
            weakref.finalize(self, _Deleter(managed.deleter), address).atexit = False
        if kind is None or dtype.lanes != 1:
            raise ValueError(f"numpy has no type for DLPack's code {dtype.code} with {dtype.bits} bits")
        shape = tuple(tensor.shape[: tensor.ndim])
        size = int(kind[1:])
        strides = tuple(step * size for step in tensor.strides[: tensor.ndim]) if tensor.strides else None
        place = ((tensor.data or 0) + tensor.byte_offset, False)
        typestr = "|" + kind if size == 1 else "<" + kind
        self.__array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": place,
            "strides": strides,
            "version": 3,
        }
        self._empty = np.empty(shape, typestr) if 0 in shape else None

    def as_array(self) -> np.ndarray[Any, Any]:
        """The array over the tensor's memory."""
        return np.asarray(self) if self._empty is None else self._empty


def from_dlpack(source: Any) -> tuple[np.ndarray[Any, Any], bool]:
    """The array over the memory of a tensor on the host, or of a copy on the host of one that is not; and whether it
    has the bits of BF16. `source`: an object with `__dlpack__`, or a capsule.

    Raises:
        ValueError: the capsule was used before, or numpy has no such type.
    """
    if hasattr(source, "__dlpack__"):
        if hasattr(source, "__dlpack_device__") and int(source.__dlpack_device__()[0]) not in _HOST_DEVICES:
            source = _on_host(source)
        source = source.__dlpack__()
    capsule = id(source)
    if type(source).__name__ != "PyCapsule" or not _is_valid(capsule, _UNUSED):
        raise ValueError("a DLPack capsule that was not used before, or an object with __dlpack__, is needed")
    address = _pointer_of(capsule, _UNUSED)
    device = _ManagedTensor.from_address(address).tensor.device
    if device.type not in _HOST_DEVICES:
        return from_dlpack(_on_host(source))
    _api.PyCapsule_SetName(source, _USED)
    owner = _Imported(address)
    return owner.as_array(), owner.bfloat16


def _on_host(source: Any) -> Any:
    """A copy in the host's memory of a tensor of a GPU, through the library that it comes from, or else torch."""
    if hasattr(source, "cpu"):
        return source.cpu()
    from torch.utils.dlpack import from_dlpack as torch_from_dlpack

    return torch_from_dlpack(source).cpu()
