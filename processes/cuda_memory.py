"""Memory of a GPU that another process lends by CUDA's interprocess handle.

Only the driver's library is called, since CUDA's runtime would need a package. Open memory holds its GPU's primary
context, which the first one creates. Source: https://docs.nvidia.com/cuda/cuda-driver-api/.
"""

import ctypes
import logging
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from ctypes import POINTER, byref
from functools import cache
from threading import Thread

import numpy as np

log = logging.getLogger(__name__)

HANDLE_BYTES = 64
"""The size of a CUipcMemHandle, which CUDA's runtime calls cudaIpcMemHandle_t."""

_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1
"""The one flag of cuda.h for opening a handle."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


_Pointer = ctypes.c_uint64
_ARGUMENTS = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(ctypes.c_void_p),),
    "cuIpcOpenMemHandle_v2": (POINTER(_Pointer), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_Pointer,),
    "cuMemGetAddressRange_v2": (POINTER(_Pointer), POINTER(ctypes.c_size_t), _Pointer),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, _Pointer, ctypes.c_size_t),
    "cuMemcpyHtoD_v2": (_Pointer, ctypes.c_void_p, ctypes.c_size_t),
    "cuStreamSynchronize": (ctypes.c_void_p,),
    "cuGetErrorString": (ctypes.c_int, POINTER(ctypes.c_char_p)),
}


class CudaError(Exception):
    """A call of the driver failed, or there is no driver; the text is the driver's."""


class CudaDriver:
    """The driver's library, for all threads. Raises `CudaError` if there is none or no GPU."""

    def __init__(self, library: str = _LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
            for name, arguments in _ARGUMENTS.items():
                getattr(self._library, name).argtypes = arguments
        except (OSError, AttributeError) as error:
            raise CudaError(f"there is no driver: {error}") from None
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the library without the GIL. Raises `CudaError`."""
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, byref(text))
            raise CudaError((text.value or b"unknown error").decode(errors="replace"))

    @contextmanager
    def current(self, context: ctypes.c_void_p) -> Iterator[None]:
        """Make this the context of the thread's calls within the block."""
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", byref(ctypes.c_void_p()))


@cache
def cuda_driver() -> CudaDriver:
    """This machine's driver. The first call blocks. Raises as `CudaDriver`."""
    return CudaDriver()


class CudaMemory:
    """An allocation of another process on a GPU, open while this object lives; `size` in bytes. Blocks, so not for an
    event loop. Raises `CudaError` for an unknown GPU (by CUDA's number), or a handle that is wrong or this process's
    own."""

    def __init__(self, handle: bytes, device: int, driver: CudaDriver) -> None:
        number = ctypes.c_int()
        self._context = ctypes.c_void_p()
        self._pointer = _Pointer()
        base, whole = _Pointer(), ctypes.c_size_t()
        self._driver = driver
        with ExitStack() as opened:
            driver.call("cuDeviceGet", byref(number), device)
            driver.call("cuDevicePrimaryCtxRetain", byref(self._context), number)
            opened.callback(driver.call, "cuDevicePrimaryCtxRelease_v2", number)
            with driver.current(self._context):
                ipc_handle = _Handle.from_buffer_copy(handle)
                driver.call("cuIpcOpenMemHandle_v2", byref(self._pointer), ipc_handle, _LAZY_PEER_ACCESS)
                opened.callback(_close_handle, driver, self._context, self._pointer)
                driver.call("cuMemGetAddressRange_v2", byref(base), byref(whole), self._pointer)
            self.size = base.value + whole.value - self._pointer.value
            # Closing waits for the GPU, which whoever drops the last reference must not.
            weakref.finalize(self, _close_aside, opened.pop_all()).atexit = False

    def read(self, offset: int, size: int) -> memoryview:
        """A copy of some bytes. Raises `CudaError`."""
        copy = np.empty(size, np.uint8)
        with self._driver.current(self._context):
            self._driver.call("cuMemcpyDtoH_v2", copy.ctypes.data, self._pointer.value + offset, size)
        return copy.data

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes to the GPU; returns when they are there. Raises `CudaError`."""
        source = np.frombuffer(data, np.uint8)
        with self._driver.current(self._context):
            self._driver.call("cuMemcpyHtoD_v2", self._pointer.value + offset, source.ctypes.data, len(source))
            self._driver.call("cuStreamSynchronize", None)  # a copy of pageable memory may still be on its way


def _close_handle(driver: CudaDriver, context: ctypes.c_void_p, pointer: ctypes.c_uint64) -> None:
    with driver.current(context):
        driver.call("cuIpcCloseMemHandle", pointer)


def _close_aside(opened: ExitStack) -> None:
    with suppress(RuntimeError):  # the interpreter ends, and with the process all that it has open
        Thread(target=_close, args=(opened,), name="charonia-cuda-close", daemon=True).start()


def _close(opened: ExitStack) -> None:
    try:
        opened.close()
    except CudaError as error:
        log.error("a client's memory on a GPU could not be closed: %s", error)
