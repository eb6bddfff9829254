"""Memory that one process writes and another reads: blocks of an anonymous file that both map. The reader reports which
blocks it no longer needs."""

import mmap
import os
from bisect import insort

from .child_process import anonymous_file

_ALIGNMENT = 64


def new_arena_file(size: int) -> int:
    """The descriptor of a file for an arena of `size` bytes; only written pages take memory."""
    file = anonymous_file("charonia-arena")
    os.ftruncate(file, size)
    return file


class SharedArena:
    """The writer's side, for one thread. The caller keeps owning `file`."""

    def __init__(self, file: int) -> None:
        self.size = os.fstat(file).st_size
        self._memory = mmap.mmap(file, self.size)
        self._free: list[tuple[int, int]] = [(0, self.size)]
        self._used: dict[int, int] = {}

    def __len__(self) -> int:
        """The blocks that the reader still needs."""
        return len(self._used)

    def place(self, data: memoryview) -> int | None:
        """Copy bytes into a free block and return its offset; None without room."""
        needed = max(1, -(-len(data) // _ALIGNMENT)) * _ALIGNMENT
        place = next((place for place, block in enumerate(self._free) if block[1] >= needed), None)
        if place is None:
            return None
        offset, length = self._free.pop(place)
        if length > needed:
            self._free.insert(place, (offset + needed, length - needed))
        self._used[offset] = needed
        self._memory[offset : offset + len(data)] = data
        return offset

    def release(self, offset: int) -> None:
        begin = offset
        end = offset + self._used.pop(offset)
        neighbours = [(at, length) for at, length in self._free if at + length == begin or at == end]
        for at, length in neighbours:
            self._free.remove((at, length))
            begin, end = min(begin, at), max(end, at + length)
        insort(self._free, (begin, end - begin))

    def trim(self) -> None:
        """Return the memory of all blocks to the system, if none is used."""
        if self._free and not self._used and hasattr(mmap, "MADV_REMOVE"):
            self._memory.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Unmap the arena: the reader is gone, and nothing more can be placed."""
        self._free.clear()
        self._memory.close()

    def check_integrity(self) -> None:
        """Check that every byte is in one block, and that no two free blocks touch."""
        blocks = sorted([*self._free, *self._used.items()])
        ends = [offset + length for offset, length in blocks]
        assert [offset for offset, _ in blocks] == [0, *ends[:-1]]
        assert ends[-1] == self.size
        free = {offset for offset, _ in self._free}
        assert not any(offset + length in free for offset, length in self._free)


class SharedArenaView:
    """The reader's side, over the same file."""

    def __init__(self, file: int) -> None:
        self._memory = memoryview(mmap.mmap(file, os.fstat(file).st_size, prot=mmap.PROT_READ))

    def read(self, offset: int, size: int) -> memoryview:
        """The bytes of a block, not to be touched once it is released."""
        return self._memory[offset : offset + size]

    def close(self) -> None:
        """Read nothing more; the memory is unmapped with the last bytes that were read."""
        self._memory.release()
