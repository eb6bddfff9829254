"""A stand-in for NCCL between threads: it refuses what no CUDA graph can have, and its end waits for graphs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from charonia.engine.checkpoint.build_context import TensorGroup
from charonia.engine.gpu.graphs import Launches


class StandInNccl:
    """A `TensorGroup` whose graphs hold what it exchanges. The first exchange of a size connects the ranks, and takes
    memory, which ends a capture; while one is captured nothing is computed."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._connected = set[tuple[str, torch.Size]]()
        self._is_capturing = False
        self.rank, self.size = group.rank, group.size
        self.graphs = 0
        """Those that live."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        if self._is_captured("all_reduce", partial):
            return partial.clone()
        return self._group.all_reduce(partial)

    def all_gather(self, part: Tensor, total: int) -> Tensor:
        if self._is_captured("all_gather", part):
            return part.new_zeros(*part.shape[:-1], total)
        return self._group.all_gather(part, total)

    @contextmanager
    def capture(self) -> Iterator[None]:
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def graph(self, launches: Launches) -> "NcclGraph":
        return NcclGraph(self, launches)

    def destroy(self) -> None:
        """What ncclCommDestroy does: it waits until no graph holds the communicator."""
        assert self.graphs == 0, "it would wait forever"

    def _is_captured(self, operation: str, mine: Tensor) -> bool:
        kind = operation, mine.shape
        if self._is_capturing and kind not in self._connected:
            raise RuntimeError("NCCL error: operation not permitted when stream is capturing")
        self._connected.add(kind)
        return self._is_capturing


class NcclGraph:
    """Launches that are recorded, with exchanges."""

    def __init__(self, nccl: StandInNccl, launches: Launches) -> None:
        self._nccl, self._launches = nccl, launches
        nccl.graphs += 1

    def replay(self) -> None:
        self._launches()

    def __del__(self) -> None:
        self._nccl.graphs -= 1
