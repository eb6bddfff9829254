"""Plans on their way: what to settle when a result arrives. Decides nothing."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .plan import IntArray, LongArray
from .step_time import StepWork


class InFlightStep(NamedTuple):
    """One plan. `ends` [R]: tokens of each of its `rows` [R] that are scheduled after it. `sampling`: rows that are to
    bring a token, in their order. `work`: what it computes."""

    step: int
    rows: LongArray
    scheduled_ends: IntArray
    sampled_rows: list[int]
    work: StepWork


class InFlightSteps:
    """Plans without a result, the oldest first."""

    def __init__(self) -> None:
        self._line: deque[InFlightStep] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[InFlightStep]:
        return iter(self._line)

    def push(self, flight: InFlightStep) -> None:
        self._line.append(flight)

    def pop_oldest(self, step: int) -> InFlightStep:
        """The oldest, which must be this step's.

        Raises:
            RuntimeError: it is another's.
        """
        if not self._line or self._line[0].step != step:
            raise RuntimeError(f"the result of step {step} came out of turn")
        return self._line.popleft()

    def includes_row(self, row: int) -> bool:
        """Whether some plan has the row."""
        return any((flight.rows == row).any() for flight in self._line)

    def steps_per_row(self, size: int) -> IntArray:
        """[size] plans that have each row."""
        counts = np.zeros(size, np.int32)
        for flight in self._line:
            counts[flight.rows] += 1
        return counts
