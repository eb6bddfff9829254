"""Step plans as few bytes: what ranks are told once a step. Knows nothing of how bytes travel.

Plans go by rows. What can be foretold is not said: that the rows are those of the step before, that each goes on where
it stopped, with one token, and is sampled. So a step in which everybody decodes is a few bytes, however many decode.
What cannot goes as narrow columns, rows as their distances from each other. Sequences that are new go whole.
"""

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import msgspec
import numpy as np

from ...scheduler.plan import IntArray, NewSequence, RowSampling, StepPlan, StepResult
from .columns import Bytes, Columns, pack

_PLAN = Struct("<iHI")  # step, what is said of it, how many rows
_SAME_ROWS, _GOES_ON, _ONE_EACH, _ALL_SAMPLED, _APPENDED, _COPIES, _CLOSED, _LANDED, _NEW = (1 << n for n in range(9))
_NONE: IntArray = np.zeros(0, np.int32)
_NO_PAIRS: IntArray = np.zeros((0, 2), np.int32)


class Landed(NamedTuple):
    """Tokens that were sampled and have reached the host, for the stages that do not sample: `tokens[i]` at position
    `positions[i]` of `rows[i]`, all [S]."""

    rows: IntArray
    positions: IntArray
    tokens: IntArray

    @classmethod
    def of(cls, results: Sequence[StepResult]) -> "Landed":
        """Of steps in which no row was twice."""
        columns = (result[1:5] for result in results)
        rows, offsets, counts, tokens = (np.concatenate(column) for column in zip(*columns, strict=True))
        before = np.repeat(counts.cumsum(dtype=np.int32) - counts, counts)
        positions = np.repeat(offsets, counts) + np.arange(len(tokens), dtype=np.int32) - before
        return cls(np.repeat(rows, counts), positions, tokens)


class Bulletin(NamedTuple):
    """What all ranks are told of one step: what landed, then the plan."""

    plan: StepPlan
    landed: Landed | None = None


class _New(msgspec.Struct, array_like=True, frozen=True):
    row: int
    computed: int
    prompt: int
    sampling: RowSampling
    tokens: bytes


class _Known:
    """What writer and readers know of the steps so far: the last one's rows, and where every row stopped."""

    def __init__(self) -> None:
        self.rows = _NONE
        self._ends: IntArray = np.zeros(256, np.int32)
        self._ones = _NONE

    def ones(self, count: int) -> IntArray:
        """[count], for reading alone."""
        if count != len(self._ones):
            self._ones = np.ones(count, np.int32)
            self._ones.flags.writeable = False
        return self._ones

    def ends(self, rows: IntArray) -> IntArray:
        try:
            return self._ends[rows]
        except IndexError:
            self._ends = np.concatenate([self._ends, np.zeros(int(rows.max()) + 1, np.int32)])
            return self._ends[rows]

    def enter(self, new: tuple[NewSequence, ...]) -> None:
        if new:
            rows = np.array([sequence.row for sequence in new], np.int32)
            self.ends(rows)
            self._ends[rows] = [sequence.computed for sequence in new]

    def move(self, plan: StepPlan) -> None:
        self.rows = plan.rows
        self._ends[plan.rows] = plan.starts + plan.counts


class Writer:
    """Writes bulletins, in the order of their steps."""

    def __init__(self) -> None:
        self._known = _Known()
        self._encode = msgspec.msgpack.Encoder().encode

    def write(self, bulletin: Bulletin) -> bytes:
        plan, landed = bulletin
        rare, rare_columns = self._rare(plan, landed)
        self._known.enter(plan.new)
        said, columns = self._running(plan)
        self._known.move(plan)
        new = self._encode([_entry(sequence) for sequence in plan.new]) if plan.new else b""
        return _PLAN.pack(plan.step, said | rare, len(plan.rows)) + pack([*columns, *rare_columns]) + new

    def _running(self, plan: StepPlan) -> tuple[int, list[IntArray]]:
        """The rows that run: what can be foretold as a flag, the rest as columns. Bytes compare faster than arrays."""
        said, columns = 0, list[IntArray]()
        if plan.rows.tobytes() == self._known.rows.tobytes():
            said |= _SAME_ROWS
        else:
            columns.append(_distances(plan.rows))
        ends = self._known.ends(plan.rows)
        if plan.starts.tobytes() == ends.tobytes():
            said |= _GOES_ON
        else:
            columns.append(plan.starts - ends)
        if plan.counts.tobytes() == self._known.ones(len(plan.rows)).tobytes():
            said |= _ONE_EACH
        else:
            columns.append(plan.counts)
        if b"\0" not in plan.samples.tobytes():
            said |= _ALL_SAMPLED
        else:
            columns.append(plan.samples.astype(np.int32))
        return said, columns

    def _rare(self, plan: StepPlan, landed: Landed | None) -> tuple[int, list[IntArray]]:
        columns: list[IntArray] = []
        rare = _NEW if plan.new else 0
        for flag, pairs in ((_APPENDED, plan.appended), (_COPIES, plan.copies)):
            if len(pairs):
                rare |= flag
                columns += _distances(pairs[:, 0]), pairs[:, 1]
        if len(plan.closed):
            rare |= _CLOSED
            columns.append(plan.closed)
        if landed is not None:
            rare |= _LANDED
            columns += _distances(landed.rows), landed.positions - self._known.ends(landed.rows), landed.tokens
        return rare, columns


def _distances(rows: IntArray) -> IntArray:
    """From the row before; of the first, from -1: a block of rows from 0 on is all ones."""
    distances = rows.copy()
    distances[1:] -= rows[:-1]
    distances[:1] += np.int32(1)
    return distances


def _entry(sequence: NewSequence) -> _New:
    row, tokens, computed, sampling, prompt = sequence
    return _New(row, computed, prompt, sampling, pack([tokens]))


class Reader:
    """Reads what one `Writer` wrote: all of it, and in that order."""

    def __init__(self) -> None:
        self._known = _Known()
        self._decode = msgspec.msgpack.Decoder(list[_New]).decode

    def read(self, message: Bytes) -> Bulletin:
        step, said, count = _PLAN.unpack_from(message)
        columns = Columns(message, _PLAN.size)
        rows = self._known.rows if said & _SAME_ROWS else _rows(columns)
        moved = _NONE if said & _GOES_ON else columns.next()
        counts = self._known.ones(count) if said & _ONE_EACH else columns.next()
        samples = self._known.ones(count) if said & _ALL_SAMPLED else columns.next()
        appended = _pairs(columns) if said & _APPENDED else _NO_PAIRS
        copies = _pairs(columns) if said & _COPIES else _NO_PAIRS
        closed = columns.next() if said & _CLOSED else _NONE
        landed = self._landed(columns) if said & _LANDED else None
        new = tuple(map(_sequence, self._decode(columns.rest))) if said & _NEW else ()
        self._known.enter(new)
        starts = self._known.ends(rows) if said & _GOES_ON else self._known.ends(rows) + moved
        plan = StepPlan(step, rows, starts, counts, samples != 0, appended, new, closed, copies)
        self._known.move(plan)
        return Bulletin(plan, landed)

    def _landed(self, columns: Columns) -> Landed:
        rows, beyond, tokens = _rows(columns), columns.next(), columns.next()
        return Landed(rows, beyond + self._known.ends(rows), tokens)


def _rows(columns: Columns) -> IntArray:
    rows: IntArray = columns.next().cumsum(dtype=np.int32) - np.int32(1)
    return rows


def _pairs(columns: Columns) -> IntArray:
    rows, others = _rows(columns), columns.next()
    pairs: IntArray = np.empty((len(rows), 2), np.int32)
    pairs[:, 0], pairs[:, 1] = rows, others
    return pairs


def _sequence(entry: _New) -> NewSequence:
    return NewSequence(entry.row, Columns(entry.tokens).next(), entry.computed, entry.sampling, entry.prompt)
