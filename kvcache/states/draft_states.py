"""Slots for the states that a step passes through while it verifies drafts, where sequences have recurrent states.

A row's own slot has the state after all tokens of a step, wrong drafts included. So the step also keeps the state
before each draft; the next one goes on from that after the accepted tokens. Knows no tensors, no plans.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class DraftStates:
    """`size` slots, numbered from `first` on: those before are the snapshots of a `StatePool`."""

    def __init__(self, first: int, size: int) -> None:
        self._slots = range(first, first + size)
        self._unused = [*reversed(self._slots)]
        self._held: dict[int, dict[int, int]] = {}
        """Slots by position, by row."""
        self._being_read: list[int] = []

    @property
    def free(self) -> int:
        """Drafts that a plan in the making may have, all rows together."""
        return len(self._unused)

    def reserve(self, row: int, position: int, drafts: int) -> list[tuple[int, int]]:
        """(position, slot) of the states to be kept of a row that verifies so many drafts after its first `position`
        tokens. There must be as many `free`."""
        self._held[row] = {position + draft: self._unused.pop() for draft in range(drafts)}
        return [*self._held[row].items()]

    def accept(self, row: int, position: int) -> None:
        """The row's drafts were verified, and it goes on after `position` tokens. Other states of it are forgotten; if
        all drafts were right, its own slot has the state."""
        slots = self._held.pop(row)
        if position in slots:
            self._held[row] = {position: slots.pop(position)}
        self._unused += slots.values()

    def resume(self, counts: NDArray[np.int32]) -> list[tuple[int, int]]:
        """(row, slot) of the rows that go on from a slot in the plan in the making, which computes `counts` tokens of
        each row; others go on from their own. These slots are not reserved until `plan_is_made`."""
        resumed = []
        for row in [row for row in self._held if counts[row]]:
            [slot] = self._held.pop(row).values()
            self._being_read.append(slot)
            resumed.append((row, slot))
        return resumed

    def plan_is_made(self) -> None:
        """What the plan reads it reads before a later one writes it."""
        self._unused += self._being_read
        self._being_read.clear()

    def leave(self, row: int) -> None:
        """The row's sequence has left, and no plan in flight has it."""
        self._unused += self._held.pop(row, {}).values()

    def positions(self, row: int) -> list[int]:
        """After which tokens of the row states are held."""
        return sorted(self._held.get(row, ()))

    def check_integrity(self, occupied: Iterable[int]) -> None:
        """Raises `AssertionError` where a slot is lost, in two places, or held for a row without a sequence."""
        held = [slot for slots in self._held.values() for slot in slots.values()]
        assert sorted([*self._unused, *held]) == [*self._slots], "a state of drafts is lost"
        assert self._held.keys() <= set(occupied), "a row keeps what it left"
        assert not self._being_read, "a plan is being made"
