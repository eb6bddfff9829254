"""The arrangement of a model's ranks, in numbers, and the interface to ranks that were started. Imports no torch."""

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol


class RankLayout(NamedTuple):
    """`tensor` ranks share every layer of a stage, and `pipeline` stages follow each other:
    rank = stage * tensor + index in the stage."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def world(self) -> int:
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
        """The rank's name in logs and errors: "rank 1 of 4 (stage 0, tensor 1)"."""
        parts = [f"rank {rank} of {self.world}"]
        if self.tensor > 1 and self.pipeline > 1:
            parts.append(f"stage {self.stage_of(rank)}, tensor {rank % self.tensor}")
        return " (".join(parts) + ")" * (len(parts) - 1)

    def __str__(self) -> str:
        return f"{self.world} ranks (tensor {self.tensor}, pipeline {self.pipeline})"


class RankPlace(NamedTuple):
    """The place of one rank in the layout, and among the `local_ranks` on its machine."""

    rank: int
    layout: RankLayout
    host: str
    """The machine's address among those of the ranks."""
    local_rank: int
    local_ranks: int


class LaunchedRanks(Protocol):
    """Ranks that were started, on this machine or on others; `RankMonitor` and `RanksExecutor` use them."""

    @property
    def connections(self) -> Sequence[Connection]:
        """A connection to each rank, which closes when the rank ends."""

    def exit_reason(self, rank: int) -> str:
        """How a rank whose connection closed has ended, for people: "died (exit code -9)"."""

    def kill(self) -> None:
        """Kill all ranks, from any thread; does not wait for their end."""

    def wait_for_exit(self, timeout: float) -> None:
        """Return when no rank runs; they are killed after `timeout` seconds."""

    def close(self) -> None:
        """Close the connections, after the ranks have ended and nothing reads them."""
