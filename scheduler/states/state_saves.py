"""Which states of running sequences are kept as snapshots, where a model's layers have states in place of a cache.

A snapshot may take as much memory as the blocks of thousands of tokens, so few are kept: where a later prompt probably
goes on. Knows no tensors and no queue; `StatePool` knows which snapshot makes room.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ...kvcache.block_hashes import shared_blocks
from ...kvcache.block_table import BlockTable
from ...kvcache.states.state_pool import StatePool
from ..config import SnapshotRule
from ..plan import IntArray, LongArray
from ..sequence import Sequence

_NEVER = 1 << 30


class StateSave(NamedTuple):
    """The state of a row after `position` tokens goes into `snapshot` with a plan in flight. `promised`: its hash,
    where others may wait for it."""

    row: int
    position: int
    snapshot: int
    promised: bytes | None = None


class StateSaves:
    """The positions of `size` rows, multiples of `block_size`, whose states are to be kept in `states`.

    A prompt keeps the end of its last block, but for a few tokens if that spares enough; the end of what it shares
    beyond a snapshot; the marks of its spec; and others by `rule`. Generated text keeps the newest few.
    """

    def __init__(self, size: int, states: StatePool, block_size: int, rule: SnapshotRule) -> None:
        self.states = states
        self._block_size = block_size
        self.least_gain = rule.least_gain
        self._prompt_tail = rule.prompt_tail
        self._most_per_prompt = rule.most_per_prompt
        self._prompt_stride = self._whole_blocks(rule.prompt_stride)
        self._generated_stride = self._whole_blocks(rule.generated_stride)
        self.next_at = np.full(size, _NEVER, np.int32)
        """[size] the next position of each row."""
        self._of_prompt: dict[int, list[int]] = {}
        """Positions by row that are still to come, the next one last; then those of generated text follow."""
        self._promised: dict[int, tuple[bytes, ...]] = {}
        """The hashes by row that were known when it entered."""
        self._prompt_end: dict[int, int] = {}
        """The last position by row that could be one of its prompt."""
        self._newest_generated: dict[int, bytes] = {}
        """By row the hash of the last snapshot of generated text."""

    def _whole_blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size) * self._block_size

    def enter(
        self,
        row: int,
        table: BlockTable,
        known: int,
        forks: Iterable[int] = (),
        marks: Iterable[int] = (),
        keeps_last: bool = False,
    ) -> None:
        """A sequence of `known` tokens enters a row with its table. `forks`: counts of tokens at which others part from
        it; `marks`: at which they may. `keeps_last`: what its last full block but for its last token leaves is wanted
        before all others."""
        last = (known - 1) // self._block_size * self._block_size
        answered = max(known - 1 - self._prompt_tail, 0)
        wanted = [table.forked, *forks, answered, *marks]
        positions = self._positions(table.cached, last, wanted, [last] if last > table.cached and keeps_last else [])
        self._promised[row] = tuple(table.promised)
        for position in positions:
            self._promise(row, position)
        self._of_prompt[row] = sorted(positions, reverse=True)
        self._prompt_end[row] = last
        self._advance(row)

    def _positions(self, cached: int, last: int, marks: list[int], always: list[int]) -> list[int]:
        """What is kept of a prompt whose last block but for its last token ends at `last`; of the known tokens of a
        sequence that was preempted, too. `marks`: the most wanted, the earlier ones before the later ones, behind those
        that are `always`."""
        stride = self._prompt_stride
        newest = last // stride * stride
        while (last - cached) // stride > self._most_per_prompt:
            stride *= 2
        wanted = [mark // self._block_size * self._block_size for mark in marks]
        wanted += [last, newest, *range(cached // stride * stride + stride, last, stride)]
        kept = [cached, *always]
        for position in wanted:
            if cached < position <= last and all(abs(position - other) >= self.least_gain for other in kept):
                kept.append(position)
        return kept[1:]

    def _promise(self, row: int, position: int) -> None:
        if (promised := self._promised_at(row, position)) is not None:
            self.states.promise(promised)

    def _promised_at(self, row: int, position: int) -> bytes | None:
        number, hashes = position // self._block_size, self._promised[row]
        return hashes[number - 1] if number <= len(hashes) else None

    def _advance(self, row: int) -> None:
        """Let the row's next position be the one after the current one."""
        if positions := self._of_prompt[row]:
            self.next_at[row] = positions[-1]
        else:
            stride, current = self._generated_stride, self.next_at[row]
            after = self._prompt_end[row] if current == _NEVER else max(int(current), self._prompt_end[row])
            self.next_at[row] = after // stride * stride + stride

    def ask(self, block_hash: bytes, position: int, tables: Mapping[int, BlockTable], scheduled: IntArray) -> None:
        """Let a row that has still to compute the block of this hash, which ends at `position`, keep the state there:
        another sequence shares what it computes up to that block. `tables`: of the rows that may."""
        for row, table in tables.items():
            if scheduled[row] < position and self._promised_at(row, position) == block_hash:
                if table.committed * self._block_size < position and position not in self._of_prompt[row]:
                    self._of_prompt[row] = sorted([*self._of_prompt[row], position], reverse=True)
                    self._promise(row, position)
                    self.next_at[row] = self._of_prompt[row][-1]
                return

    def reserve(self, rows: LongArray, ends: IntArray) -> list[StateSave]:
        """What a plan keeps whose rows [R] are computed up to `ends` [R]; called once for each. What there is already,
        or is no snapshot for, is left out."""
        saves: list[StateSave] = []
        for index in (ends >= self.next_at[rows]).nonzero()[0].tolist():
            row, end = int(rows[index]), int(ends[index])
            while (position := int(self.next_at[row])) <= end:
                if self._of_prompt[row]:
                    self._of_prompt[row].pop()
                    promised = self._promised_at(row, position)
                else:
                    promised = None
                self._advance(row)
                snapshot = None if promised is not None and promised in self.states else self.states.reserve()
                if snapshot is not None:
                    saves.append(StateSave(row, position, snapshot, promised))
                elif promised is not None:
                    self.states.settle(promised)
        self.states.plan_is_made()
        return saves

    def settle(
        self,
        saves: Iterable[StateSave],
        computed: IntArray,
        scheduled: IntArray,
        sequences: Mapping[int, Sequence],
    ) -> None:
        """A plan was applied: what it kept can be found from now on, as far as its rows came; what they have to come to
        again, after wrong drafts, is kept then. Their full blocks have been committed."""
        for row, position, snapshot, promised in saves:
            if promised is not None:
                self.states.settle(promised)
            if computed[row] < position:
                self.states.give_back(snapshot)
                if scheduled[row] < position:
                    self.next_at[row] = min(int(self.next_at[row]), position)
                continue
            block_hash = sequences[row].hashes[position // self._block_size - 1]
            self.states.publish(snapshot, block_hash)
            if promised is None:
                if row in self._newest_generated:
                    self.states.demote(self._newest_generated[row])
                self._newest_generated[row] = block_hash

    def leave(self, row: int) -> None:
        """The row's sequence has left, and no plan in flight has it."""
        for position in self._of_prompt.pop(row):
            if (promised := self._promised_at(row, position)) is not None:
                self.states.settle(promised)
        del self._promised[row], self._prompt_end[row]
        self._newest_generated.pop(row, None)
        self.next_at[row] = _NEVER

    def check_integrity(self, in_flight: Iterable[StateSave], occupied: Iterable[int], scheduled: IntArray) -> None:
        """Raises `AssertionError` where a snapshot or a promise leaked, or a position was passed over."""
        saves = list(in_flight)
        coming = [
            self._promised_at(row, position) for row, positions in self._of_prompt.items() for position in positions
        ]
        promises = [promised for promised in (*coming, *(save.promised for save in saves)) if promised is not None]
        self.states.check_integrity([save.snapshot for save in saves], promises)
        assert self._of_prompt.keys() == self._promised.keys() == set(occupied), "a row keeps what it left"
        for row, positions in self._of_prompt.items():
            assert scheduled[row] < self.next_at[row], "a state was to be kept and is past"
            assert positions == sorted(set(positions), reverse=True)
            assert not positions or self.next_at[row] == positions[-1]
        assert np.flatnonzero(self.next_at < _NEVER).tolist() == sorted(self._of_prompt)


def forks_of(sequence: Sequence, others: Iterable[Sequence], block_size: int) -> list[int]:
    """The counts of tokens, in whole blocks, at which each of the others parts from the sequence."""
    forks: list[int] = []
    for other in others:
        shareable = (other.shareable_tokens - 1) // block_size
        forks.append(min(shared_blocks(sequence.hashes, other.hashes), shareable) * block_size)
    return forks
