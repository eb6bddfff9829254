"""Step plans as few bytes: what ranks are told once a step. Knows nothing of how bytes travel.

Plans go by rows: a row is written as its distance from the one before, its start as what differs from where it stopped.
A step in which everybody decodes is a few dozen bytes, however many decode. Sequences that are new go whole.
"""

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import msgspec
import numpy as np

from ...scheduler.plan import IntArray, NewSequence, RowSampling, StepPlan, StepResult
from .columns import Bytes, Columns, pack

_PLAN = Struct("<iB")  # step, which of the rare parts are there
_APPENDED, _COPIES, _CLOSED, _LANDED, _NEW = (1 << place for place in range(5))
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


class _Ends:
    """Where each row stopped; writer and readers know the same."""

    def __init__(self) -> None:
        self._ends: IntArray = np.zeros(256, np.int32)

    def of(self, rows: IntArray) -> IntArray:
        try:
            return self._ends[rows]
        except IndexError:
            self._ends = np.concatenate([self._ends, np.zeros(int(rows.max()) + 1, np.int32)])
            return self._ends[rows]

    def enter(self, new: tuple[NewSequence, ...]) -> None:
        if new:
            rows = np.array([sequence.row for sequence in new], np.int32)
            self.of(rows)
            self._ends[rows] = [sequence.computed for sequence in new]

    def move(self, plan: StepPlan) -> None:
        self._ends[plan.rows] = plan.starts + plan.counts


class Writer:
    """Writes bulletins, in the order of their steps."""

    def __init__(self) -> None:
        self._ends = _Ends()
        self._encode = msgspec.msgpack.Encoder().encode

    def write(self, bulletin: Bulletin) -> bytes:
        plan, landed = bulletin
        rare, columns = self._rare(plan, landed)
        self._ends.enter(plan.new)
        distances = _distances(plan.rows)
        moved = plan.starts - self._ends.of(plan.rows)
        self._ends.move(plan)
        columns = [distances, moved, plan.counts, plan.samples.astype(np.int32), *columns]
        new = self._encode([_entry(sequence) for sequence in plan.new]) if plan.new else b""
        return _PLAN.pack(plan.step, rare) + pack(columns) + new

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
            columns += _distances(landed.rows), landed.positions - self._ends.of(landed.rows), landed.tokens
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
        self._ends = _Ends()
        self._decode = msgspec.msgpack.Decoder(list[_New]).decode

    def read(self, message: Bytes) -> Bulletin:
        step, rare = _PLAN.unpack_from(message)
        columns = Columns(message, _PLAN.size)
        rows = _rows(columns)
        moved, counts, samples = (columns.next() for _ in range(3))
        appended = _pairs(columns) if rare & _APPENDED else _NO_PAIRS
        copies = _pairs(columns) if rare & _COPIES else _NO_PAIRS
        closed = columns.next() if rare & _CLOSED else _NONE
        landed = self._landed(columns) if rare & _LANDED else None
        new = tuple(map(_sequence, self._decode(columns.rest))) if rare & _NEW else ()
        self._ends.enter(new)
        starts = moved + self._ends.of(rows)
        plan = StepPlan(step, rows, starts, counts, samples != 0, appended, new, closed, copies)
        self._ends.move(plan)
        return Bulletin(plan, landed)

    def _landed(self, columns: Columns) -> Landed:
        rows, beyond, tokens = _rows(columns), columns.next(), columns.next()
        return Landed(rows, beyond + self._ends.of(rows), tokens)


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
