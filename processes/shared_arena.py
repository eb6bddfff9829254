"""Memory that a process shares with its children.

It has no name in any file system, so nothing of it is left when the processes are gone, however they end.
"""

import mmap
import os
import tempfile

_GROWTH_BYTES = 1 << 20


class SharedArena:
    """`size` bytes of memory, mapped here and by each child that gets the arena as an argument of `python_child`.
    `memory` is the mapping; it is replaced by a larger one when either side needs more. A view of the former one stays
    valid, and is of the same memory. Raises `OSError` if the memory cannot be had."""

    def __init__(self, size: int = 1 << 16, descriptor: int | None = None) -> None:
        """`descriptor`: of an arena that exists already, and is this object's from now on; `size` is not used then."""
        self.descriptor = anonymous_file("charonia-arena") if descriptor is None else descriptor
        if descriptor is None:
            _allocate(self.descriptor, size)
        self.memory = mmap.mmap(self.descriptor, 0)

    def require(self, size: int) -> None:
        """Let `memory` have at least `size` bytes, more than that where it grows."""
        if size > len(self.memory):
            _allocate(self.descriptor, -(-(size + size // 4) // _GROWTH_BYTES) * _GROWTH_BYTES)
            self.memory = mmap.mmap(self.descriptor, 0)

    def follow(self, size: int) -> None:
        """Let `memory` have the `size` bytes that the other side has required."""
        if size > len(self.memory):
            self.memory = mmap.mmap(self.descriptor, 0)

    def close(self) -> None:
        """Let go of the memory. Views stay valid: the mapping goes with the last of them."""
        os.close(self.descriptor)
        del self.memory


def anonymous_file(name: str) -> int:
    """The descriptor of a new file without a path; in memory, where the system can. `name` is shown in /proc alone."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _allocate(file: int, size: int) -> None:
    """Memory that is only promised would end the process that touches it in vain."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)
