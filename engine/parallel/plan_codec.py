"""Step plans as few bytes: what ranks are told once a step. Knows nothing of how bytes travel.

Plans go by rows. What can be foretold is not told: that the rows are those of the step before, that each goes on where
it stopped, with one token, and is sampled. So a step in which everybody decodes is a few bytes, however many decode.
What cannot goes as narrow columns. Sequences that are new go whole.
"""

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...scheduler.plan import IntArray, NewSequence, SamplerParams, StepPlan, StepResult

Bytes: TypeAlias = bytes | memoryview

# Columns of integers: the lowest bytes of all values first, then the next ones, up to the highest that are not all 0:
# none of a column of zeros. For some hundred values slices of bytes take less time than any call of numpy.
_HEAD = Struct("<BI")  # bytes of each value, how many
_SIZE = Struct("<I")
_ZERO = b"\0"


def pack_column(column: IntArray) -> bytes:
    """A column [n], int32: little-endian, as every machine that we compute on."""
    return _packed(column.tobytes(), 0, 4)


def pack_pairs(pairs: IntArray) -> bytes:
    """Two columns side by side, [n, 2], int32."""
    wide = pairs.tobytes()
    return _packed(wide, 0, 8) + _packed(wide, 4, 8)


def _packed(wide: bytes, place: int, stride: int) -> bytes:
    """The column whose values are at `place` of every `stride` bytes."""
    planes = [wide[place::stride], wide[place + 1 :: stride], wide[place + 2 :: stride], wide[place + 3 :: stride]]
    count = len(planes[0])
    while planes and not planes[-1].strip(_ZERO):
        planes.pop()
    return _HEAD.pack(len(planes), count) + b"".join(planes)


def pack_bytes(content: bytes) -> bytes:
    """Something that is no column, in its place among them."""
    return _SIZE.pack(len(content)) + content


class ColumnReader:
    """Reads one column after the other."""

    def __init__(self, message: Bytes, place: int = 0) -> None:
        self._message, self.place = memoryview(message), place

    def next(self) -> IntArray:
        """[n], int32"""
        planes, count = self._head()
        wide = bytearray(4 * count)
        for plane in range(planes):
            wide[plane::4] = self._take(count)
        return np.frombuffer(wide, np.int32)

    def pairs(self) -> IntArray:
        """[n, 2], int32"""
        planes, count = self._head()
        wide = bytearray(8 * count)
        for plane in range(planes):
            wide[plane::8] = self._take(count)
        planes, count = self._head()
        for plane in range(4, 4 + planes):
            wide[plane::8] = self._take(count)
        return np.frombuffer(wide, np.int32).reshape(-1, 2)

    def bytes(self) -> memoryview:
        """The bytes that `pack_bytes` packed."""
        (size,) = _SIZE.unpack_from(self._message, self.place)
        self.place += _SIZE.size
        return self._take(size)

    def _head(self) -> tuple[int, int]:
        """Planes of the next column, and its values."""
        planes, count = _HEAD.unpack_from(self._message, self.place)
        self.place += _HEAD.size
        return planes, count

    def _take(self, size: int) -> memoryview:
        begin, self.place = self.place, self.place + size
        return self._message[begin : self.place]


_HEADER = Struct("<iH")  # step, what is told of it
_NEW, _ROWS, _STARTS, _COUNTS, _SAMPLES, _LOGITS, _APPENDED, _CLOSED, _SAMPLED, _SAMPLED_AT_STARTS = (
    1 << bit for bit in range(10)
)
_NONE: IntArray = np.zeros(0, np.int32)
_NO_PAIRS: IntArray = np.zeros((0, 2), np.int32)


class SampledBatch(NamedTuple):
    """Tokens that were sampled and have reached the host, for the stages that do not sample: `tokens[i]` at position
    `positions[i]` of `rows[i]`, all [S]."""

    rows: IntArray
    positions: IntArray
    tokens: IntArray

    @classmethod
    def from_results(cls, results: Sequence[StepResult]) -> "SampledBatch":
        """The tokens of steps in which no row occurs twice."""
        columns = (result[1:5] for result in results)
        rows, offsets, counts, tokens = (np.concatenate(column) for column in zip(*columns, strict=True))
        if b"\1\0\0\0" * len(counts) == counts.tobytes():  # one token each, as nearly always
            return cls(rows, offsets, tokens)
        before = np.repeat(counts.cumsum(dtype=np.int32) - counts, counts)
        positions = np.repeat(offsets, counts) + np.arange(len(tokens), dtype=np.int32) - before
        return cls(np.repeat(rows, counts), positions, tokens)


class StepBroadcast(NamedTuple):
    """The message to all ranks for one step: tokens sampled in steps before, then the plan."""

    plan: StepPlan
    sampled: SampledBatch | None = None


class _EncodedSequence(msgspec.Struct, array_like=True, frozen=True):
    row: int
    computed: int
    prompt: int
    sampling: SamplerParams
    tokens: bytes


class _StepState:
    """What writer and readers know of the steps so far.

    `rows` ran in the last one, and each of them would go on at `following`, where it stopped. `ones` and `all_true`
    [rows]: one token each, and each sampled. None of these arrays is ever changed: plans hold them too.
    """

    def __init__(self) -> None:
        self.rows = self.following = self.ones = _NONE
        self.all_true: NDArray[np.bool_] = np.ones(0, np.bool_)
        self._ends: IntArray = np.zeros(256, np.int32)
        self._places = np.zeros(0, np.intp)  # rows, as numpy finds them faster

    def enter(self, new: Sequence[NewSequence]) -> None:
        """They are in these rows now."""
        entered = np.array([sequence.row for sequence in new], np.intp)
        self.ends(entered)
        self._ends[entered] = [sequence.computed for sequence in new]
        self.following = self._ends[self._places]

    def turn_to(self, rows: IntArray) -> None:
        """Others run than in the step before."""
        places = rows.astype(np.intp)
        self.following = self.ends(places)
        self.rows, self._places = rows, places
        if len(rows) != len(self.ones):
            self.ones, self.all_true = np.ones(len(rows), np.int32), np.ones(len(rows), np.bool_)

    def move(self, starts: IntArray, counts: IntArray) -> None:
        """The rows compute so much from there on."""
        self.following = starts + counts

    def ends(self, rows: NDArray[np.intp]) -> IntArray:
        """The position where each of these rows stopped."""
        self._ends[self._places] = self.following
        try:
            return self._ends[rows]
        except IndexError:
            self._ends = np.concatenate([self._ends, np.zeros(int(rows.max()) + 1, np.int32)])
            return self._ends[rows]


class _MessageBuilder:
    """A message in the making. `told`: of what it tells."""

    def __init__(self) -> None:
        self.told = 0
        self._parts: list[bytes] = []

    def tell(self, what: int, *columns: IntArray) -> None:
        self.told |= what
        self._parts += map(pack_column, columns)

    def tell_packed(self, what: int, packed: bytes) -> None:
        self.told |= what
        self._parts.append(packed)

    def message(self, step: int) -> bytes:
        return b"".join((_HEADER.pack(step, self.told), *self._parts))


class PlanEncoder:
    """Writes bulletins, in the order of their steps."""

    def __init__(self) -> None:
        self._known = _StepState()
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, bulletin: StepBroadcast) -> bytes:
        plan, landed = bulletin
        told = _MessageBuilder()
        if plan.new:
            told.tell_packed(_NEW, pack_bytes(self._encode([_encode_sequence(sequence) for sequence in plan.new])))
            self._known.enter(plan.new)
        self._tell_running(told, plan)
        _add_rare_columns(told, plan)
        if landed is not None:
            self._tell_landed(told, plan, landed)
        self._known.move(plan.starts, plan.counts)
        return told.message(plan.step)

    def _tell_running(self, told: _MessageBuilder, plan: StepPlan) -> None:
        """The rows that run, as far as they cannot be foretold."""
        known = self._known
        if not _equal_bytes(plan.rows, known.rows):
            told.tell(_ROWS, plan.rows)
            known.turn_to(plan.rows)
        if not _equal_bytes(plan.starts, known.following):
            told.tell(_STARTS, plan.starts - known.following)
        if not _equal_bytes(plan.counts, known.ones):
            told.tell(_COUNTS, plan.counts)
        if not _equal_bytes(plan.samples, known.all_true):
            told.tell(_SAMPLES, plan.samples.astype(np.int32))
        if not _equal_bytes(plan.num_logits, plan.samples.astype(np.int32)):
            told.tell(_LOGITS, plan.num_logits)

    def _tell_landed(self, told: _MessageBuilder, plan: StepPlan, landed: SampledBatch) -> None:
        """Mostly they are what the rows go on with."""
        rows, positions, tokens = landed
        if _equal_bytes(rows, plan.rows) and _equal_bytes(positions, plan.starts):
            told.tell(_SAMPLED_AT_STARTS, tokens)
        else:
            told.tell(_SAMPLED, rows, positions - self._known.ends(rows.astype(np.intp)), tokens)


def _add_rare_columns(told: _MessageBuilder, plan: StepPlan) -> None:
    if len(plan.appended):
        told.tell_packed(_APPENDED, pack_pairs(plan.appended))
    if len(plan.closed):
        told.tell(_CLOSED, plan.closed)


def _equal_bytes(one: NDArray[np.int32] | NDArray[np.bool_], other: NDArray[np.int32] | NDArray[np.bool_]) -> bool:
    """Bytes compare faster than arrays."""
    return one.tobytes() == other.tobytes()


def _encode_sequence(sequence: NewSequence) -> _EncodedSequence:
    row, tokens, computed, sampling, prompt = sequence
    return _EncodedSequence(row, computed, prompt, sampling, pack_column(tokens))


class PlanDecoder:
    """Reads what one `PlanEncoder` wrote: all of it, and in that order."""

    def __init__(self) -> None:
        self._known = _StepState()
        self._decode = msgspec.msgpack.Decoder(list[_EncodedSequence]).decode

    def decode(self, message: Bytes) -> StepBroadcast:
        known = self._known
        step, told = _HEADER.unpack_from(message)
        columns = ColumnReader(message, _HEADER.size)
        new = self._newcomers(columns) if told & _NEW else ()
        if told & _ROWS:
            known.turn_to(columns.next())
        rows, starts = known.rows, known.following
        if told & _STARTS:
            starts = starts + columns.next()
        counts = columns.next() if told & _COUNTS else known.ones
        samples = columns.next() != 0 if told & _SAMPLES else known.all_true
        logits = columns.next() if told & _LOGITS else samples.astype(np.int32)
        appended = columns.pairs() if told & _APPENDED else _NO_PAIRS
        closed = columns.next() if told & _CLOSED else _NONE
        plan = StepPlan(step, rows, starts, counts, samples, logits, appended, new, closed)
        landed = self._landed(told, plan, columns)
        known.move(starts, counts)
        return StepBroadcast(plan, landed)

    def _newcomers(self, columns: ColumnReader) -> tuple[NewSequence, ...]:
        new = tuple(map(_decode_sequence, self._decode(columns.bytes())))
        self._known.enter(new)
        return new

    def _landed(self, told: int, plan: StepPlan, columns: ColumnReader) -> SampledBatch | None:
        if told & _SAMPLED_AT_STARTS:
            return SampledBatch(plan.rows, plan.starts, columns.next())
        if told & _SAMPLED:
            rows, beyond, tokens = columns.next(), columns.next(), columns.next()
            return SampledBatch(rows, self._known.ends(rows.astype(np.intp)) + beyond, tokens)
        return None


def _decode_sequence(entry: _EncodedSequence) -> NewSequence:
    return NewSequence(entry.row, ColumnReader(entry.tokens).next(), entry.computed, entry.sampling, entry.prompt)
