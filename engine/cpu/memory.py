"""Memory for what is read whole at every step: zeroed, on huge pages where the system has them, in few large pieces."""

import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 1 << 21
REGION_BYTES = 1 << 26
"""Bytes asked of the system at a time, at least. What is never touched takes no memory."""

CACHE_LINE_BYTES = 64
"""Bytes of a cache line."""


class HugePageArena:
    """Hands out parts of regions; a region lives as long as any part of it."""

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> Tensor:
        """uint8 [size], zeros, at the beginning of a cache line.

        Raises:
            OSError: the system has no such memory.
        """
        size = -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        if size > len(self._region):
            self._region = _map_region(max(size, REGION_BYTES))
        part, self._region = self._region[:size], self._region[size:]
        return part


def aligned_empty(size: int) -> Tensor:
    """uint8 [size], anything, at the beginning of a cache line."""
    memory = torch.empty(size + CACHE_LINE_BYTES, dtype=torch.uint8)
    return memory[-memory.data_ptr() % CACHE_LINE_BYTES :][:size]


def _map_region(size: int) -> Tensor:
    """Private, so that huge pages need no more than the advice; begun at one, or the advice would miss the first."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    pages = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + size]
