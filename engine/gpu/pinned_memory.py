"""Memory of the host that a GPU reads over the bus."""

import mmap
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from ...core.errors import Unavailable

_PORTABLE = 1
"""CUDA's flag of memory that is pinned for every device of the process."""


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that takes its own size, pinned as long as any view of it lives: torch's would be rounded up to a power of
    two, and kept for later.

    Raises:
        Unavailable: the system has no such memory, or lets it not be pinned.
    """
    size = int(np.prod(shape)) * dtype.itemsize
    cudart = torch.cuda.cudart()
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_DONTFORK)  # a child would be given copies of all that is pinned
        whole = np.frombuffer(pages, np.uint8)
        torch.cuda.check_error(cudart.cudaHostRegister(whole.ctypes.data, size, _PORTABLE))
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"{size} bytes of the host's memory cannot be pinned for the GPU: {error}") from error
    # Views hold the array, which holds the pages: they are unpinned before they are unmapped.
    finalize(whole, cudart.cudaHostUnregister, whole.ctypes.data).atexit = False
    return torch.from_numpy(whole).view(dtype).view(shape)
