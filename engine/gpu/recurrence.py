"""Recurrences over the matrices that heads keep of a sequence: the gated delta rule (arXiv 2412.06464) and Mamba-2's
selective scan (arXiv 2405.21060). Columns of a matrix stay in registers while a row's tokens go through them, one after
the other, be they of a prompt, drafts or one: so a token's result depends on the tokens before it alone, to the bit.
Where a prompt may go by chunks (`chunked_recurrence.py`) the kernel has the tokens before and behind them.
The reference is `layers.recurrence.TorchRecurrence`.
"""

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..cpu.recurrent import RecurrenceShape, ScanSteps
from .chunked_recurrence import CHUNK, CHUNKED_TYPES, ChunkedRecurrence
from .recurrence_steps import SHAPES, UNIT_EPS, chunk_span, softplus
from .runtime import DIVISIBLE, TRITON_TYPES, Specialisation
from .state_rows import StateMoves, StateRows

_COLUMNS = 16
"""Columns of a program; to be measured."""


@triton.jit
def _unit(x, scale):
    """x [n] of length `scale`."""
    return x * (scale * tl.rsqrt(tl.sum(x * x, 0) + UNIT_EPS))


@triton.jit
def _recurrence_kernel(
    x,
    gates,
    rates,
    bias,
    skip,
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
    beta_column,
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
    STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
    BEHIND: tl.constexpr,
):
    """Program (row, head and n) has COLUMNS columns of a head's matrix, [KEY_SIZE, VALUE_SIZE] of a slot: it reads
    those of the row's source, and writes those of its saves and of its slot. CORRECTS: by the delta rule. CHUNK: of
    rows with chunks it has the tokens before the first, or with BEHIND those behind the last; 0: all."""
    index = tl.program_id(0)
    across: tl.constexpr = (VALUE_SIZE + COLUMNS - 1) // COLUMNS
    head = tl.program_id(1) // across
    count = tl.load(counts + index)
    begin = count * 0
    if CHUNK > 0:
        lead, full = chunk_span(tl.load(starts + index), count, CHUNK)
        if BEHIND:
            begin = lead + full * CHUNK
            if full == 0:
                begin = count
        elif full > 0:
            count = lead
    if begin >= count:
        return
    key_line = tl.arange(0, KEYS)
    column = tl.program_id(1) % across * COLUMNS + tl.arange(0, COLUMNS)
    is_key = key_line < KEY_SIZE
    is_column = column < VALUE_SIZE
    inside = is_key[:, None] & is_column[None, :]
    place = (head * KEY_SIZE + key_line)[:, None] * VALUE_SIZE + column[None, :]
    size: tl.constexpr = HEADS * KEY_SIZE * VALUE_SIZE
    source = tl.load((rows if BEHIND else sources) + index).to(tl.int64)
    state = tl.load(matrices + source * size + place, mask=inside & (source >= 0), other=0.0)
    rate = tl.load(rates + head)
    shift = tl.load(bias + head)
    keyed = head // (HEADS // KEY_HEADS) * KEY_SIZE + key_line
    own = head * VALUE_SIZE + column
    first = tl.load(first_places + index).to(tl.int64)
    save = tl.load(save_begins + index)
    save_end = tl.load(save_ends + index)
    earlier = begin
    for at in range(save, save_end + 1):
        end = count
        is_kept = at < save_end
        if is_kept:
            end = tl.load(save_counts + at)
        if CHUNK > 0:
            is_kept = is_kept & (end > earlier) & (end <= count)
            end = tl.maximum(tl.minimum(end, count), begin)
        for token in tl.range(begin, end, num_stages=STAGES):
            line = x + (first + token) * x_stride
            key = tl.load(line + keys + keyed, mask=is_key, other=0.0).to(tl.float32)
            query = tl.load(line + queries + keyed, mask=is_key, other=0.0).to(tl.float32)
            value = tl.load(line + values + own, mask=is_column, other=0.0).to(tl.float32)
            gate = gates + (first + token) * gates_stride + head
            dt = softplus(tl.load(gate + decay_column).to(tl.float32) + shift)
            if CORRECTS:
                key = _unit(key, 1.0)
                query = _unit(query, scale)
                strength = tl.sigmoid(tl.load(gate + beta_column).to(tl.float32))
            else:
                dt = tl.minimum(tl.maximum(dt, least), most)
                strength = dt
            state = state * tl.exp(rate * dt)
            wanted = value
            if CORRECTS:
                wanted = value - tl.sum(state * key[:, None], 0)
            change = tl.broadcast_to((strength * wanted)[None, :], (KEYS, COLUMNS))
            state = tl.fma(tl.broadcast_to(key[:, None], (KEYS, COLUMNS)), change, state)
            result = tl.sum(state * query[:, None], 0)
            if SKIPS:
                result = tl.fma(value, tl.load(skip + head) + tl.zeros_like(value), result)
            at_out = out + (first + token) * (HEADS * VALUE_SIZE) + own
            tl.store(at_out, result.to(out.dtype.element_ty), mask=is_column)
        begin = end
        if is_kept:
            slot = tl.load(save_slots + at).to(tl.int64)
            tl.store(matrices + slot * size + place, state, mask=inside)
    slot = tl.load(rows + index).to(tl.int64)
    tl.store(matrices + slot * size + place, state, mask=inside)


class TritonRecurrence:
    """The same as `Recurrence`, by a kernel: a gated delta rule with betas at `beta_column`, or without them a
    selective scan; decays, or steps, are at `decay_column`."""

    untraceable: str | None = "Triton computes its recurrence"

    def __init__(
        self,
        shape: RecurrenceShape,
        decay_column: int,
        beta_column: int | None,
        steps: ScanSteps,
        chunked: bool = False,
    ) -> None:
        """`chunked`: prompts go by chunks where they have some."""
        self._shape = shape
        self._columns = decay_column, beta_column or 0
        self._corrects = beta_column is not None
        self._steps = steps
        self._chunks = ChunkedRecurrence(shape, decay_column, beta_column, steps) if chunked else None

    def __call__(self, x: Tensor, gates: Tensor, matrices: Tensor, rows: StateRows) -> Tensor:
        """x [N, width] with queries, keys and values, and gates [N, other width] -> [N, heads * value size]; changes
        `matrices` [slots, heads, key size, value size]."""
        shape, (rates, bias, skip, least, most) = self._shape, self._steps
        out = x.new_empty(len(x), shape.heads * shape.value_size)
        batch, moves = rows.batch, rows.moves
        tensors = rates, bias, rates if skip is None else skip, out, matrices
        numbers = batch.rows, batch.starts, batch.counts, batch.first_places, *moves
        columns = x.stride(0), gates.stride(0), shape.queries, shape.keys, shape.values, *self._columns
        bounds = shape.key_size**-0.5, least, most
        plan = _plan(shape)
        grid = len(batch.counts), shape.heads * triton.cdiv(shape.value_size, plan["COLUMNS"])
        kinds = self._corrects, skip is not None
        arguments = x, gates, *tensors, *numbers, *columns, *bounds, *kinds
        by_chunks = self._chunks is not None and x.dtype in CHUNKED_TYPES and rows.tiles is not None
        if self._chunks is None or not by_chunks or not (batch.prompts or rows.most >= CHUNK):
            _recurrence_kernel[grid](*arguments, CHUNK=0, BEHIND=False, **plan)
            return out
        _recurrence_kernel[grid](*arguments, CHUNK=CHUNK, BEHIND=False, **plan)
        self._chunks.compute(x, gates, matrices, rows, out)
        _recurrence_kernel[grid](*arguments, CHUNK=CHUNK, BEHIND=True, **plan)
        return out


def _plan(shape: RecurrenceShape) -> dict[str, Any]:
    """The launch: by the shape alone, for it orders sums. A warp, whose lanes share out the lines of its columns."""
    sizes = {"HEADS": shape.heads, "KEY_HEADS": shape.key_heads}
    sizes |= {"KEY_SIZE": shape.key_size, "VALUE_SIZE": shape.value_size}
    return sizes | {"KEYS": triton.next_power_of_2(shape.key_size), "COLUMNS": _COLUMNS, "STAGES": 3, "num_warps": 1}


def specialisations() -> Iterator[Specialisation]:
    for dtype, kind in TRITON_TYPES.items():
        for shape, corrects in SHAPES:
            types = dict.fromkeys(("x", "gates", "out"), f"*{kind}")
            types |= dict.fromkeys(("rates", "bias", "skip", "matrices"), "*fp32")
            types |= dict.fromkeys(("rows", "starts", "counts", "first_places", *StateMoves._fields), "*i32")
            types |= dict.fromkeys(("x_stride", "queries", "keys", "values", "decay_column"), f"i32{DIVISIBLE}")
            types |= {"gates_stride": "i32", "beta_column": "i32"}
            types |= dict.fromkeys(("scale", "least", "most"), "fp32")
            plan = _plan(shape) | {"CORRECTS": corrects, "SKIPS": not corrects}
            chunked = ((CHUNK, False), (CHUNK, True)) if dtype in CHUNKED_TYPES else ()
            for chunk, behind in ((0, False), *chunked):
                yield Specialisation.of_plan(_recurrence_kernel, types, plan | {"CHUNK": chunk, "BEHIND": behind})
