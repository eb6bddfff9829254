"""The arrangement of a model's ranks, in numbers, and the ranks of one machine: child processes of the engine core.

Knows nothing of the messages on their connections. Imports no torch.
"""

import os
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

from ...processes.child_process import ChildProcess, python_child
from ..config import EngineConfig


class RankLayout(NamedTuple):
    """`tensor` ranks share every layer of a stage, `pipeline` stages follow each other; a stage's ranks are neighbours:
    rank = stage * tensor + place in the stage."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline

    @property
    def result_rank(self) -> int:
        """The rank that reports results: the first of the last stage."""
        return self.world - self.tensor

    def stage_of(self, rank: int) -> int:
        return rank // self.tensor

    def stages(self) -> list[range]:
        """The ranks of each stage."""
        return [range(first, first + self.tensor) for first in range(0, self.world, self.tensor)]

    def rank_name(self, rank: int) -> str:
        """The rank's name in logs and errors: its number of how many, and its place in the layout."""
        parts = [f"rank {rank} of {self.world}"]
        if self.tensor > 1 and self.pipeline > 1:
            parts.append(f"stage {self.stage_of(rank)}, tensor {rank % self.tensor}")
        return " (".join(parts) + ")" * (len(parts) - 1)

    def __str__(self) -> str:
        return f"{self.world} ranks (tensor {self.tensor}, pipeline {self.pipeline})"


class RankPlace(NamedTuple):
    """The place of one rank: in the layout, and as number `local_rank` of the `local_ranks` on its machine. `host`: the
    machine's address among those of the ranks."""

    rank: int
    layout: RankLayout
    host: str
    local_rank: int
    local_ranks: int


_DEATH_SECONDS = 5.0
"""How long a process may take to end once its connection is closed."""


class LaunchedRanks(Protocol):
    """Ranks that were started, on this machine or on others; `RankMonitor` and `RanksExecutor` use them."""

    @property
    def connections(self) -> Sequence[Connection]:
        """One to each rank. It closes when the rank ends, however that comes."""

    def exit_reason(self, rank: int) -> str:
        """How a rank whose connection closed has ended, for people: "died (exit code -9)"."""

    def kill(self) -> None:
        """Kill all ranks, from any thread; does not wait for their end."""

    def wait_for_exit(self, timeout: float) -> None:
        """Return when none of them runs; they are killed after `timeout` seconds."""

    def close(self) -> None:
        """Close the connections, which nothing reads any more, after the ranks have ended."""


class LocalRanks:
    """`LaunchedRanks` on this machine.

    Raises:
        OSError: connections or processes cannot be made; none is left.
    """

    def __init__(self, config: EngineConfig, layout: RankLayout) -> None:
        self.connections: list[Connection] = []
        self._processes: list[ChildProcess] = []
        try:
            for rank in range(layout.world):
                ours, theirs = Pipe()
                self.connections.append(ours)
                with theirs:  # the rank alone has it then: it closes when the rank ends
                    place = RankPlace(rank, layout, "127.0.0.1", rank, layout.world)
                    self._processes.append(python_child("charonia-rank", _rank_main, config, place, theirs))
        except BaseException:
            self.wait_for_exit(0.0)
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def exit_reason(self, rank: int) -> str:
        exit_code = self._processes[rank].wait(_DEATH_SECONDS)
        return f"died (exit code {exit_code})" if exit_code is not None else "does not answer"

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def wait_for_exit(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for process in self._processes:
            process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()
        for process in self._processes:
            process.wait()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self._processes:
            process.close()


def _rank_main(config: EngineConfig, place: RankPlace, connection: Connection) -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or a lost rank is logged in pages of C++
    from .rank import run_rank  # imports torch

    run_rank(config, place, connection)
    os._exit(0)  # it has left the others; what torch would tidy up takes seconds
