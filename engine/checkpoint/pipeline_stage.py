"""Which layers of a model a stage of a pipeline computes: numbers alone. Knows no ranks and no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One of `count` consecutive parts of a model's depth. `split`: how many layers each has; empty: as even as can
    be, the last ones the shorter, for the head is theirs. The plain case is the only one."""

    index: int = 0
    count: int = 1
    layer_counts: tuple[int, ...] = ()

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, total: int) -> range:
        """This stage's, of a model that has `total`."""
        if self.layer_counts:
            start = sum(self.layer_counts[: self.index])
            return range(start, start + self.layer_counts[self.index])
        return range(-(-total * self.index // self.count), -(-total * (self.index + 1) // self.count))
