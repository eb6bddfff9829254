"""The arrangement of a model's ranks, in numbers. Knows no processes and no tensors."""

from typing import NamedTuple


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
