"""The ranks of one machine: processes of their own, started by the core and never left behind.

Knows nothing of what is said on their lines.
"""

import os
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Protocol

from ...processes.child_process import ChildProcess, python_child
from ...processes.shared_arena import SharedArena
from ..config import EngineConfig
from .broadcast_ring import RING_BYTES
from .layout import RankLayout

_DEATH_SECONDS = 5.0
"""How long a process may take to end once its line is broken."""


class LaunchedRanks(Protocol):
    """Ranks that were started, wherever they run."""

    @property
    def connections(self) -> Sequence[Connection]:
        """One to each rank. It breaks when the rank ends, however that comes."""

    @property
    def memory(self) -> SharedArena | None:
        """What all of them share with the core, if they can."""

    def exit_reason(self, rank: int) -> str:
        """What became of a rank whose line broke, for people: "died (exit code -9)"."""

    def kill(self) -> None:
        """End all of them at once; does not wait for it. For any thread."""

    def wait_for_exit(self, patience: float) -> None:
        """Return when none of them runs; they are killed after `patience` seconds."""

    def close(self) -> None:
        """Let go of lines and memory; they have ended, and nobody reads their lines."""


class LocalRanks:
    """A crew on this machine.

    Raises:
        OSError: memory, lines or processes cannot be made; nothing is left of them.
    """

    def __init__(self, config: EngineConfig, layout: RankLayout) -> None:
        self.memory = SharedArena(RING_BYTES)
        self.connections: list[Connection] = []
        self._processes: list[ChildProcess] = []
        try:
            for rank in range(layout.world):
                self._start(config, layout, rank)
        except BaseException:
            self.wait_for_exit(0.0)
            self.close()
            raise

    def _start(self, config: EngineConfig, layout: RankLayout, rank: int) -> None:
        ours, theirs = Pipe()
        self.connections.append(ours)
        with theirs:  # theirs alone: it breaks when the rank ends
            self._processes.append(python_child("charonia-rank", _rank_main, config, layout, rank, theirs, self.memory))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def exit_reason(self, rank: int) -> str:
        exit_code = self._processes[rank].wait(_DEATH_SECONDS)
        return f"died (exit code {exit_code})" if exit_code is not None else "does not answer"

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def wait_for_exit(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        for process in self._processes:
            process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()
        for process in self._processes:
            process.wait()

    def close(self) -> None:
        for line in self.connections:
            line.close()
        for process in self._processes:
            process.close()
        self.memory.close()


def _rank_main(config: EngineConfig, layout: RankLayout, rank: int, line: Connection, memory: SharedArena) -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or a lost rank is told of in pages of C++
    from .rank import RankArgs, run_rank  # imports torch

    run_rank(config, RankArgs(rank, layout, line, memory, local_rank=rank, local_ranks=layout.world))
    os._exit(0)  # it has parted from the others; what torch would tidy up takes seconds
