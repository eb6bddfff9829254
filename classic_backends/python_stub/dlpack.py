"""DLPack capsules of tensors, both ways, without a copy; BF16, which numpy does not have, and GPUs' memory included.

The layout is that of https://dmlc.github.io/dlpack/latest/c_api.html without a version, which every library makes.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np

CPU = 1
_HOST_DEVICES = (CPU, 3, 11)  # plain, pinned for CUDA, pinned for ROCm
_CUDA_DEVICES = (2, 13)  # a GPU's, managed
_CUDA_LIBRARY = "libcuda.so.1"

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
    tensor = _Tensor()
    tensor.data = array.__array_interface__["data"][0]
    tensor.device = _Device(CPU, 0)
    tensor.dtype = _DataType(_BFLOAT if bfloat16 else _KINDS[array.dtype.kind], 8 * array.itemsize, 1)
    return _export(tensor, array.shape, tuple(step // array.itemsize for step in array.strides), array)


def _export(tensor: _Tensor, shape: tuple[int, ...], strides: tuple[int, ...], owner: Any) -> Any:
    """A capsule of a tensor without its dimensions, in the memory of `owner`."""
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    steps = (ctypes.c_int64 * len(shape))(*strides)
    managed = _ManagedTensor()
    serial = next(_serials)
    managed.tensor = tensor
    managed.tensor.ndim = len(shape)
    managed.tensor.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
    managed.tensor.strides = ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64))
    managed.context = serial
    managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p)
    _exported[serial] = (managed, sizes, steps, owner)
    return _api.PyCapsule_New(ctypes.addressof(managed), _UNUSED, _destructor)


class ImportedTensor:
    """Another library's tensor, and its owner in the eyes of numpy. `on_gpu`: it is in memory of CUDA's device
    `device`; `dtype`: numpy's, of BF16 the bits'."""

    def __init__(self, address: int) -> None:
        managed = _ManagedTensor.from_address(address)
        self._tensor = tensor = managed.tensor
        if managed.deleter:
            weakref.finalize(self, _Deleter(managed.deleter), address).atexit = False
        code = tensor.dtype.code
        bits = tensor.dtype.bits
        self.bfloat16 = (code, bits) == (_BFLOAT, 16)
        kind = "u2" if self.bfloat16 else _TYPES.get((code, bits))
        if kind is None or tensor.dtype.lanes != 1:
            raise ValueError(f"numpy has no type for DLPack's code {code} with {bits} bits")
        self.dtype = np.dtype(kind)
        self.shape = tuple(tensor.shape[: tensor.ndim])
        self._steps = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _row_major(self.shape)
        self.device = (int(tensor.device.type), int(tensor.device.id))
        self.on_gpu = self.device[0] in _CUDA_DEVICES
        self._address = (tensor.data or 0) + tensor.byte_offset

    def as_array(self) -> np.ndarray[Any, Any]:
        """The array over memory of the host; of a GPU's the array over a copy, as the tensor is once all that is in the
        GPU's default stream is done. Raises `ValueError` if that cannot be copied."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        strides = tuple(step * self.dtype.itemsize for step in self._steps)
        if self.on_gpu:
            last = sum((size - 1) * step for size, step in zip(self.shape, strides))
            copy = _copy_from_gpu(self.device[1], self._address, last + self.dtype.itemsize)
            return np.ndarray(self.shape, self.dtype, copy, 0, strides)
        self.__array_interface__ = {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._address, False),
            "strides": strides,
            "version": 3,
        }
        return np.asarray(self)

    def to_capsule(self) -> Any:
        """Another capsule of the same memory."""
        tensor = _Tensor()
        tensor.data = self._tensor.data
        tensor.byte_offset = self._tensor.byte_offset
        tensor.device = self._tensor.device
        tensor.dtype = self._tensor.dtype
        return _export(tensor, self.shape, self._steps, self)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps = [1]
    for size in reversed(shape[1:]):
        steps.append(steps[-1] * size)
    return tuple(reversed(steps[: len(shape)]))


def from_dlpack(source: Any) -> ImportedTensor:
    """The tensor of an object with `__dlpack__`, or of a capsule; of a device that is neither the host nor CUDA's, a
    copy on the host.

    Raises:
        ValueError: the capsule was used before, or numpy has no such type.
    """
    known = (*_HOST_DEVICES, *_CUDA_DEVICES)
    if hasattr(source, "__dlpack__"):
        if hasattr(source, "__dlpack_device__") and int(source.__dlpack_device__()[0]) not in known:
            source = _on_host(source)
        source = source.__dlpack__()
    capsule = id(source)
    if type(source).__name__ != "PyCapsule" or not _is_valid(capsule, _UNUSED):
        raise ValueError("a DLPack capsule that was not used before, or an object with __dlpack__, is needed")
    address = _pointer_of(capsule, _UNUSED)
    if _ManagedTensor.from_address(address).tensor.device.type not in known:
        return from_dlpack(_on_host(source))
    _api.PyCapsule_SetName(source, _USED)
    return ImportedTensor(address)


def _on_host(source: Any) -> Any:
    """A copy in the host's memory, through the library that the tensor comes from, or else torch."""
    if hasattr(source, "cpu"):
        return source.cpu()
    from torch.utils.dlpack import from_dlpack as torch_from_dlpack

    return torch_from_dlpack(source).cpu()


def _copy_from_gpu(device: int, address: int, size: int) -> np.ndarray[Any, Any]:
    """A copy of bytes of a GPU, by the driver: the library that the tensor comes from may be any."""
    copy = np.empty(size, np.uint8)
    library = _cuda()
    context = _primary_context(device)
    _check(library.cuCtxPushCurrent_v2(context))
    try:
        _check(library.cuMemcpyDtoH_v2(copy.ctypes.data, address, size))
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    return copy


@lru_cache(maxsize=None)
def _cuda() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_CUDA_LIBRARY)
    except OSError as error:
        raise ValueError(f"a tensor of a GPU cannot be copied: {error}") from None
    library.cuCtxPushCurrent_v2.argtypes = [ctypes.c_void_p]
    library.cuMemcpyDtoH_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t]
    _check(library.cuInit(0))
    return library


@lru_cache(maxsize=None)
def _primary_context(device: int) -> ctypes.c_void_p:
    """The one that CUDA's users share; held as long as the process lives."""
    number = ctypes.c_int()
    context = ctypes.c_void_p()
    _check(_cuda().cuDeviceGet(ctypes.byref(number), device))
    _check(_cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), number))
    return context


def _check(code: int) -> None:
    if code:
        raise ValueError(f"a tensor of a GPU cannot be copied: CUDA's error {code}")
