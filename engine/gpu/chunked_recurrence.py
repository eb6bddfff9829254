"""The recurrences of `recurrence.py` by chunks of a prompt's tokens, on tensor cores: the gated delta rule in the form
of arXiv 2412.06464, section 3.3, and Mamba-2's scan in that of arXiv 2405.21060, section 6.

Chunks are the spans between multiples of CHUNK positions that a step computes whole. What is before the first and
behind the last goes token by token, so a sequence has the same bits wherever its prompt is cut at multiples of CHUNK.
States and decays are float32.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cpu.recurrent import RecurrenceShape, ScanSteps
from .recurrence_steps import SHAPES, chunk_span, softplus, unit_factor
from .runtime import DIVISIBLE, TRITON_TYPES, Specialisation
from .state_rows import TILE_TOKENS, StateMoves, StateRows

CHUNK = 16
"""Tokens of a chunk; to be measured."""
CHUNKED_TYPES = (torch.bfloat16,)
"""The dtypes of queries, keys and values that go by chunks: others would be cut in two, for which registers spill."""
_COLUMNS = 16
"""Columns of a program; to be measured."""


@triton.jit
def _product(a, b):
    """A product whose sides are bfloat16, or are cut to the sum of two of these: what is least of it is left out."""
    left = a.to(tl.float32)
    right = b.to(tl.float32)
    first = left.to(tl.bfloat16)
    second = right.to(tl.bfloat16)
    total = tl.dot(first, second)
    if b.dtype != tl.bfloat16:
        total = tl.dot(first, (right - second.to(tl.float32)).to(tl.bfloat16), total)
    if a.dtype != tl.bfloat16:
        total = tl.dot((left - first.to(tl.float32)).to(tl.bfloat16), second, total)
    return total


@triton.jit
def _invert(a, CHUNK: tl.constexpr):
    """(1 + a)^-1 of a strictly lower triangle, by substitution."""
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    for line in range(1, CHUNK):
        factors = tl.sum(tl.where(row == line, a, 0.0), 0)
        solved = tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where(row == line, tl.where(row == column, 1.0, -solved[None, :]), inverse)
    return inverse


@triton.jit
def _log_decays(gates, at, shift, rate, least, most, CORRECTS: tl.constexpr):
    """The steps dt of tokens whose gates lie `at`, and the sums of all decays so far."""
    dt = softplus(tl.load(gates + at).to(tl.float32) + shift)
    if not CORRECTS:
        dt = tl.minimum(tl.maximum(dt, least), most)
    return dt, tl.cumsum(rate * dt, 0)


@triton.jit
def _decays_between(total, CHUNK: tl.constexpr):
    """exp(sum of decays from token column to token row) where that is no earlier, else 0."""
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    return tl.where(row >= column, tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)), 0.0)


@triton.jit
def _solve_kernel(
    x,
    gates,
    rates,
    bias,
    solved,
    tiles,
    starts,
    counts,
    first_places,
    x_stride,
    gates_stride,
    keys,
    decay_column,
    beta_column,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (tile, head, n) has the n-th chunk that begins in the tile, if one does: `solved` [place / CHUNK, HEADS,
    CHUNK, CHUNK] is what turns the chunk's values, less what its state says of them, into changes of the state."""
    index = tl.load(tiles + tl.program_id(0) * 2)
    offset = tl.load(tiles + tl.program_id(0) * 2 + 1)
    if index < 0:
        return
    count = tl.load(counts + index)
    lead, _ = chunk_span(tl.load(starts + index), count, CHUNK)
    begin = lead + (tl.cdiv(tl.maximum(offset - lead, 0), CHUNK) + tl.program_id(2)) * CHUNK
    if (begin < offset) | (begin >= offset + TILE) | (begin + CHUNK > count):
        return
    head = tl.program_id(1)
    first = tl.load(first_places + index).to(tl.int64) + begin
    token = tl.arange(0, CHUNK)
    key_line = tl.arange(0, KEYS)
    at = (first + token)[:, None] * x_stride + keys + head // (HEADS // KEY_HEADS) * KEY_SIZE + key_line[None, :]
    key = tl.load(x + at, mask=(key_line < KEY_SIZE)[None, :], other=0.0)
    gate = (first + token) * gates_stride + head
    shift = tl.load(bias + head)
    _, total = _log_decays(gates, gate + decay_column, shift, tl.load(rates + head), 0.0, 0.0, True)
    strength = tl.sigmoid(tl.load(gates + gate + beta_column).to(tl.float32))
    length = unit_factor(key)
    alike = tl.dot(key, tl.trans(key)) * length[:, None] * length[None, :]
    below = token[:, None] > token[None, :]
    inverse = _invert(tl.where(below, strength[:, None] * alike * _decays_between(total, CHUNK), 0.0), CHUNK)
    place = (first // CHUNK * HEADS + head) * CHUNK * CHUNK + token[:, None] * CHUNK + token[None, :]
    tl.store(solved + place, inverse * strength[None, :])


@triton.jit
def _chunks_kernel(
    x,
    gates,
    rates,
    bias,
    skip,
    solved,
    out,
    matrices,
    rows,
    starts,
    counts,
    first_places,
    sources,
    save_begins,
    save_ends,
    save_counts,
    save_slots,
    x_stride,
    gates_stride,
    queries,
    keys,
    values,
    decay_column,
    scale,
    least,
    most,
    CORRECTS: tl.constexpr,
    SKIPS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (row, head and n) takes COLUMNS columns of a head's matrix through the row's chunks, as that of
    `_recurrence_kernel` does through tokens."""
    index = tl.program_id(0)
    across: tl.constexpr = (VALUE_SIZE + COLUMNS - 1) // COLUMNS
    head = tl.program_id(1) // across
    lead, full = chunk_span(tl.load(starts + index), tl.load(counts + index), CHUNK)
    if full == 0:
        return
    token = tl.arange(0, CHUNK)
    key_line = tl.arange(0, KEYS)
    column = tl.program_id(1) % across * COLUMNS + tl.arange(0, COLUMNS)
    is_key = (key_line < KEY_SIZE)[None, :]
    is_column = (column < VALUE_SIZE)[None, :]
    inside = (key_line < KEY_SIZE)[:, None] & is_column
    place = (head * KEY_SIZE + key_line)[:, None] * VALUE_SIZE + column[None, :]
    size: tl.constexpr = HEADS * KEY_SIZE * VALUE_SIZE
    slot = tl.load(rows + index).to(tl.int64)
    source = slot
    if lead == 0:
        source = tl.load(sources + index).to(tl.int64)
    state = tl.load(matrices + source * size + place, mask=inside & (source >= 0), other=0.0)
    rate = tl.load(rates + head)
    shift = tl.load(bias + head)
    keyed = head // (HEADS // KEY_HEADS) * KEY_SIZE + key_line[None, :]
    own = head * VALUE_SIZE + column[None, :]
    first_save = tl.load(save_begins + index)
    save_end = tl.load(save_ends + index)
    for chunk in tl.range(full, disable_licm=True):  # what is hoisted is spilled
        begin = lead + chunk * CHUNK
        first = tl.load(first_places + index).to(tl.int64) + begin
        line = x + (first + token)[:, None] * x_stride
        key = tl.load(line + keys + keyed, mask=is_key, other=0.0)
        value = tl.load(line + values + own, mask=is_column, other=0.0).to(tl.float32)
        gate = (first + token) * gates_stride + head + decay_column
        dt, total = _log_decays(gates, gate, shift, rate, least, most, CORRECTS)
        length = tl.full((CHUNK,), 1.0, tl.float32)
        if CORRECTS:
            length = unit_factor(key)
            at = (first // CHUNK * HEADS + head) * CHUNK * CHUNK + token[:, None] * CHUNK + token[None, :]
            wanted = value - (tl.exp(total) * length)[:, None] * _product(key, state)
            change = _product(tl.load(solved + at), wanted) * length[:, None]
        else:
            change = dt[:, None] * value
        query = tl.load(line + queries + keyed, mask=is_key, other=0.0)
        asked = tl.full((CHUNK,), 1.0, tl.float32)
        if CORRECTS:
            asked = unit_factor(query) * scale
        weights = tl.dot(query, tl.trans(key)) * _decays_between(total, CHUNK)
        result = asked[:, None] * (tl.exp(total)[:, None] * _product(query, state) + _product(weights, change))
        if SKIPS:
            result += tl.load(skip + head) * value
        at_out = out + (first + token)[:, None] * (HEADS * VALUE_SIZE) + own
        tl.store(at_out, result.to(out.dtype.element_ty), mask=is_column)
        for save in range(first_save, save_end):
            kept = tl.load(save_counts + save) - begin
            if (kept > 0) & (kept <= CHUNK):
                saved = tl.load(save_slots + save).to(tl.int64)
                tl.store(matrices + saved * size + place, _state_after(kept, state, key, change, total), mask=inside)
        state = _state_after(CHUNK, state, key, change, total)
    tl.store(matrices + slot * size + place, state, mask=inside)


@triton.jit
def _state_after(tokens, state, key, change, total):
    """The state behind so many tokens of a chunk."""
    token = tl.arange(0, key.shape[0])
    last = tl.sum(tl.where(token == tokens - 1, total, 0.0), 0)
    left = tl.where(token < tokens, tl.exp(tl.minimum(last - total, 0.0)), 0.0)
    return tl.exp(last) * state + _product(tl.trans(key), left[:, None] * change)


class ChunkedRecurrence:
    """The chunks of a step's rows, for `TritonRecurrence`."""

    def __init__(self, shape: RecurrenceShape, decay_column: int, beta_column: int | None, steps: ScanSteps) -> None:
        self._shape = shape
        self._decay_column = decay_column
        self._beta_column = beta_column
        self._steps = steps

    def compute(self, x: Tensor, gates: Tensor, matrices: Tensor, rows: StateRows, out: Tensor) -> None:
        """Computes the chunks of rows that have some, into `out`; see `TritonRecurrence`."""
        shape, (rates, bias, skip, least, most) = self._shape, self._steps
        batch = rows.batch
        plan = _plan(shape, CHUNK)
        numbers = batch.starts, batch.counts, batch.first_places
        strides = x.stride(0), gates.stride(0)
        solved = rates
        if self._beta_column is not None:
            tiles = rows.tiles
            assert tiles is not None, "rows with chunks have several tiles"
            sizes = len(x) // CHUNK + 1, shape.heads, CHUNK, CHUNK
            solved = torch.empty(sizes, dtype=torch.float32, device=x.device)
            solving = shape.keys, self._decay_column, self._beta_column
            _solve_kernel[len(tiles), shape.heads, triton.cdiv(TILE_TOKENS, CHUNK)](
                x, gates, rates, bias, solved, tiles, *numbers, *strides, *solving, **_solve_plan(shape, CHUNK)
            )
        grid = len(batch.counts), shape.heads * triton.cdiv(shape.value_size, plan["COLUMNS"])
        tensors = rates, bias, rates if skip is None else skip, solved, out, matrices, batch.rows
        columns = shape.queries, shape.keys, shape.values, self._decay_column
        bounds = shape.key_size**-0.5, least, most
        kinds = self._beta_column is not None, skip is not None
        _chunks_kernel[grid](x, gates, *tensors, *numbers, *rows.moves, *strides, *columns, *bounds, *kinds, **plan)


def _sizes(shape: RecurrenceShape, chunk: int) -> dict[str, Any]:
    sizes = {"HEADS": shape.heads, "KEY_HEADS": shape.key_heads, "KEY_SIZE": shape.key_size}
    return sizes | {"KEYS": max(triton.next_power_of_2(shape.key_size), 16), "CHUNK": chunk}


def _solve_plan(shape: RecurrenceShape, chunk: int) -> dict[str, Any]:
    return _sizes(shape, chunk) | {"TILE": TILE_TOKENS, "num_warps": 4, "num_stages": 1}


def _plan(shape: RecurrenceShape, chunk: int) -> dict[str, Any]:
    launch = {"COLUMNS": _COLUMNS, "num_warps": 4, "num_stages": 1}
    return _sizes(shape, chunk) | {"VALUE_SIZE": shape.value_size} | launch


def specialisations() -> Iterator[Specialisation]:
    for kind in (TRITON_TYPES[dtype] for dtype in CHUNKED_TYPES):
        for shape, corrects in SHAPES:
            types = dict.fromkeys(("x", "gates", "out"), f"*{kind}")
            types |= dict.fromkeys(("rates", "bias", "skip", "solved", "matrices"), "*fp32")
            types |= dict.fromkeys(("tiles", "rows", "starts", "counts", "first_places", *StateMoves._fields), "*i32")
            types |= dict.fromkeys(("x_stride", "queries", "keys", "values", "decay_column"), f"i32{DIVISIBLE}")
            types |= {"gates_stride": "i32", "beta_column": "i32"}
            types |= dict.fromkeys(("scale", "least", "most"), "fp32")
            kinds = {"CORRECTS": corrects, "SKIPS": not corrects}
            yield Specialisation.of_plan(_chunks_kernel, types, _plan(shape, CHUNK) | kinds, ("mma",))
            if corrects:
                yield Specialisation.of_plan(_solve_kernel, types, _solve_plan(shape, CHUNK), ("mma",))
