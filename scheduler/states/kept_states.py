"""The states of running rows beside the ones that rows themselves have: what a step keeps of them, and goes back to.

The one object that the running set has of recurrent states, where a model has any. Knows no queue and no results.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...kvcache.block_table import BlockTable
from ...kvcache.manager import KVCacheManager
from ..config import SnapshotRule
from ..events.block_contents import block_contents
from ..plan import NO_STATE_RESTORES, NO_STATE_SAVES, IntArray, LongArray
from ..sequence import Sequence
from .state_saves import StateSave, StateSaves, forks_of

FORKS_LOOKED_AT = 16
"""Waiting sequences that a prompt is compared with when it is admitted."""


class PlannedStates(NamedTuple):
    """What a plan does with states."""

    snapshots: tuple[StateSave, ...] = ()
    """The snapshots that later prompts may begin with."""
    saves: IntArray = NO_STATE_SAVES
    """[S, 3] as `StepPlan.state_saves`: of `snapshots`, and before drafts."""
    restores: IntArray = NO_STATE_RESTORES
    """[T, 2] as `StepPlan.state_restores`."""


NO_STATES = PlannedStates()


class KeptStates:
    """Snapshots and states before drafts of `size` rows, whose places `cache` has."""

    def __init__(self, size: int, cache: KVCacheManager, rule: SnapshotRule) -> None:
        assert cache.draft_states is not None, "sequences of this cache have no states"
        self._cache = cache
        self._drafts = cache.draft_states
        self.saves = None if cache.states is None else StateSaves(size, cache.states, cache.block_size, rule)
        """None: there is no room for snapshots, or prompts share nothing."""

    @property
    def most_drafts(self) -> int:
        """Drafts that the plan in the making may have, all rows together."""
        return self._drafts.free

    def enter(self, row: int, sequence: Sequence, table: BlockTable, waiting: Iterable[Sequence]) -> None:
        """A sequence enters a row with its table. `waiting`: the next of those that do not have one."""
        if self.saves is not None:
            spec = sequence.spec
            forks = forks_of(sequence, waiting, self._cache.block_size)
            self.saves.enter(row, table, sequence.known, forks, spec.snapshot_at, spec.handed_over)

    def ask_for_fork(
        self, sequence: Sequence, tables: Mapping[int, BlockTable], running: NDArray[np.bool_], scheduled: IntArray
    ) -> None:
        """Let a running row keep the state at the end of what a waiting sequence shares with it, if the row has yet to
        compute that, and no other snapshot is nearly as good."""
        if self.saves is None:
            return
        hashes, known = sequence.hashes, sequence.shareable_tokens
        forked = self._cache.forked(hashes, known)
        if forked - self._cache.shareable(hashes, known) >= self.saves.least_gain:
            block_hash = hashes[forked // self._cache.block_size - 1]
            stay = {row: table for row, table in tables.items() if running[row]}
            self.saves.ask(block_hash, forked, stay, scheduled)

    def plan_step(
        self, rows: LongArray, scheduled: IntArray, counts: IntArray, drafted: Mapping[int, list[int]]
    ) -> PlannedStates:
        """What a plan of `rows` [R] keeps and goes back to, which computes `counts` tokens of each row up to
        `scheduled`, some of them `drafted`; called once for each plan."""
        snapshots = () if self.saves is None else tuple(self.saves.reserve(rows, scheduled[rows]))
        saves = [save[:3] for save in snapshots]
        restores = self._drafts.resume(counts)
        for row, tokens in drafted.items():
            first = int(scheduled[row]) - len(tokens)
            saves += [(row, *state) for state in self._drafts.reserve(row, first, len(tokens))]
        self._drafts.plan_is_made()
        return PlannedStates(
            snapshots,
            np.array(saves, np.int32) if saves else NO_STATE_SAVES,
            np.array(restores, np.int32) if restores else NO_STATE_RESTORES,
        )

    def verify_drafts(self, rows: Iterable[int], computed: IntArray) -> None:
        """The drafts of these rows were verified: they go on from what is `computed`."""
        for row in rows:
            self._drafts.accept(row, int(computed[row]))

    def settle(
        self,
        snapshots: tuple[StateSave, ...],
        computed: IntArray,
        scheduled: IntArray,
        sequences: Mapping[int, Sequence],
    ) -> None:
        """A plan with these snapshots was applied, and the full blocks of its rows were committed: see
        `StateSaves.settle`."""
        if self.saves is None:
            return
        if self._cache.events is not None:
            size = self._cache.block_size
            for row, position, *_ in snapshots:
                if computed[row] >= position:
                    end = position // size
                    self._cache.events.describe(block_contents(sequences[row], end - 1, end, size))
        self.saves.settle(snapshots, computed, scheduled, sequences)

    def leave(self, row: int) -> None:
        """The row's sequence has left, and no plan in flight has it."""
        if self.saves is not None:
            self.saves.leave(row)
        self._drafts.leave(row)

    def check_integrity(
        self,
        snapshots: Iterable[StateSave],
        drafts: Mapping[int, int],
        occupied: Iterable[int],
        scheduled: IntArray,
        ended: NDArray[np.bool_],
    ) -> None:
        """Recompute what is kept from the `snapshots` of plans in flight and from the number of `drafts` that they
        verify, by row. Raises `AssertionError` where something leaked, or a row would go on from no state."""
        rows = list(occupied)
        if self.saves is not None:
            self.saves.check_integrity(snapshots, rows, scheduled)
        self._drafts.check_integrity(rows)
        for row in rows:
            end, number = int(scheduled[row]), drafts.get(row, 0)
            if not ended[row]:  # while drafts are verified the state before each; then that from which the row goes on
                kept = self._drafts.positions(row)
                assert kept == [*range(end - number, end)] if number else kept in ([], [end]), "goes on from no state"
