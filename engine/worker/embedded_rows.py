"""The parts of prompts that are no tokens, such as images: a worker remembers their rows until they are computed, and
where they and what follows them stand for as long as the sequence has its row."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...scheduler.encoders.encoder_rows import EmbeddedSpan
from ...scheduler.plan import IntArray, LongArray, NewSequence
from ..step_batch import EmbeddedPlaces, StepBatch, StepPositions, to_device


class _RowSpans(NamedTuple):
    """The spans of a row, ascending, whose places see one another or are of a grid."""

    spans: tuple[EmbeddedSpan, ...]
    shift: int
    """The sum of `EmbeddedSpan.shift` of those before them."""

    def shift_at(self, position: int) -> int:
        return self.shift + sum(span.shift for span in self.spans if span.end <= position)


class ImagePlaces(NamedTuple):
    """What a model's places of images are like. `shifted`: `NewSequence.shift` may be other than 0. `token`: the one
    that stands there for layers that have embeddings of their own; None: whatever prompts have there."""

    shifted: bool = False
    token: int | None = None


PLAIN_PLACES = ImagePlaces()


class EmbeddedRows:
    """The embeddings that plans brought for the places of rows, in the host's memory; where these places are rotated,
    and up to where they see."""

    def __init__(self, device: torch.device, token: int | None = None) -> None:
        """`token`: as of `ImagePlaces`."""
        self._device = device
        self._token = token
        self._spans: dict[int, list[tuple[EmbeddedSpan, torch.Tensor]]] = {}
        self._placed: dict[int, _RowSpans] = {}

    def enter(self, sequence: NewSequence) -> IntArray:
        """Remember a sequence's spans; returns its tokens as layers are to have them."""
        if sequence.embedded:
            self._spans[sequence.row] = [(span, _tensor(span)) for span in sequence.embedded]
        spans = tuple(span.without_rows() for span in sequence.embedded if span.bidirectional or any(span.grid))
        if spans or sequence.shift:
            self._placed[sequence.row] = _RowSpans(spans, sequence.shift)
        if self._token is None or not sequence.embedded:
            return sequence.tokens
        tokens = sequence.tokens.copy()
        for span in sequence.embedded:
            tokens[span.start : span.end] = self._token
        return tokens

    def forget(self, row: int) -> None:
        self._spans.pop(row, None)
        self._placed.pop(row, None)

    def fill(self, batch: StepBatch) -> None:
        """Give a step the embeddings of its places, and forget those that lie behind it."""
        if not self._spans:
            return
        places, parts = [], []
        columns = batch.rows, batch.starts, batch.counts, batch.first_places
        for row, start, count, packed in zip(*(column.tolist() for column in columns), strict=True):
            for span, rows in self._spans.get(row, ()):
                first = max(span.start, start)
                end = min(span.end, start + count)
                if first < end:
                    places.append(np.arange(packed + first - start, packed + end - start))
                    parts.append(rows[:, first - span.start : end - span.start])
            if row in self._spans and self._spans[row][-1][0].end <= start + count:
                del self._spans[row]
        if not places:
            return
        filled = _side_by_side(parts).to(self._device)
        stacked = filled[1:] if len(filled) > 1 else None
        batch.embedded = EmbeddedPlaces(to_device(np.concatenate(places), self._device), filled[0], stacked)

    def placed(self, batch: StepBatch) -> StepBatch:
        """The step, with `StepPositions` if a row has spans."""
        rows = batch.rows.tolist() if self._placed else ()
        if self._placed.keys().isdisjoint(rows):
            return batch
        shifts = np.zeros(len(rows), np.int32)
        within: list[_SpanWithin] = []
        columns = batch.starts.tolist(), batch.counts.tolist(), batch.first_places.tolist()
        for index, (row, start, count, packed) in enumerate(zip(rows, *columns, strict=True)):
            if (own := self._placed.get(row)) is None:
                continue
            shifts[index] = own.shift_at(start)
            for span in own.spans:
                first, end = max(span.start, start), min(span.end, start + count)
                if first < end:
                    at = packed + first - start
                    within.append(_SpanWithin(span, own.shift_at(span.start), first, end, at, packed + count))
        batch.moved = StepPositions(shifts, _grid_positions(batch, shifts, within), _visible_ends(batch, within))
        return batch


class _SpanWithin(NamedTuple):
    """The part of a span that a step computes: places `first` to `end`, packed from `at` on."""

    span: EmbeddedSpan
    shift: int
    """The sum of `EmbeddedSpan.shift` of those before it."""
    first: int
    end: int
    at: int
    row_end: int
    """The packed place behind the row's last one."""

    @property
    def behind(self) -> int:
        return self.at + self.end - self.first


def _grid_positions(batch: StepBatch, shifts: IntArray, within: Sequence[_SpanWithin]) -> LongArray | None:
    """`StepPositions.grid` of a step with these spans."""
    of_grids = [part for part in within if any(part.span.grid)]
    if not of_grids:
        return None
    lines = np.repeat(batch.starts - batch.first_places + shifts, batch.counts) + np.arange(batch.size)
    grid: LongArray = np.tile(lines, (3, 1))
    for part in of_grids:
        span = part.span
        places = np.unravel_index(np.arange(part.first - span.start, part.end - span.start), span.grid)
        grid[:, part.at : part.behind] = np.stack(places) + (span.start + part.shift)
        grid[:, part.behind : part.row_end] += span.shift
    return grid


def _visible_ends(batch: StepBatch, within: Sequence[_SpanWithin]) -> IntArray | None:
    """`StepPositions.ends` of a step with these spans; nobody sees what is not computed yet."""
    if not any(part.span.bidirectional for part in within):
        return None
    ends = np.repeat(batch.starts - batch.first_places, batch.counts) + np.arange(1, batch.size + 1)
    for part in within:
        if part.span.bidirectional:
            ends[part.at : part.behind] = part.end
    return ends.astype(np.int32)


def _tensor(span: EmbeddedSpan) -> torch.Tensor:
    """Its rows, and those of layers: [1 + layers, length, hidden]."""
    dtype = getattr(torch, span.dtype)
    rows = torch.frombuffer(bytearray(span.rows), dtype=dtype).view(1, span.length, -1)
    if not span.deepstack:
        return rows
    stacked = torch.frombuffer(bytearray(span.deepstack), dtype=dtype).view(-1, *rows.shape[1:])
    return torch.cat((rows, stacked))


def _side_by_side(parts: list[torch.Tensor]) -> torch.Tensor:
    """Parts [1 + layers, n, hidden] behind one another; those with fewer layers have zeros there."""
    layers = max(len(part) for part in parts)
    full = (torch.cat((part, part.new_zeros(layers - len(part), *part.shape[1:]))) for part in parts)
    return torch.cat([*full], 1)
