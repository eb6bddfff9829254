"""Zeroed memory on huge pages, where the system has them: for weights and caches, which every step reads whole."""

import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 1 << 21
REGION_BYTES = 1 << 26
"""The least that is asked of the system at a time. Pages that are never touched take no memory."""

CACHE_LINE_BYTES = 64


class HugePageArena:
    """Allocates parts of mapped regions; a region lives as long as any part of it."""

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> Tensor:
        """Zeros, uint8 [size], from the beginning of a cache line on.

        Raises:
            OSError: the system has no such memory.
        """
        size = -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        if size > len(self._region):
            self._region = _map_region(max(size, REGION_BYTES))
        part, self._region = self._region[:size], self._region[size:]
        return part


def aligned_empty(size: int) -> Tensor:
    """Uninitialized memory, uint8 [size], from the beginning of a cache line on."""
    memory = torch.empty(size + CACHE_LINE_BYTES, dtype=torch.uint8)
    return memory[-memory.data_ptr() % CACHE_LINE_BYTES :][:size]


def _map_region(size: int) -> Tensor:
    """A private mapping, for which huge pages take no more than the advice, from the beginning of a huge page on: else
    the advice would not reach the first."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    pages = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + size]
