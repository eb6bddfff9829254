"""Recurrences over the matrices that heads keep of a sequence: the gated delta rule (arXiv 2412.06464) and Mamba-2's
selective scan (arXiv 2405.21060). Columns of a matrix stay in registers while a row's tokens go through them, one after
the other, be they of a prompt, drafts or one: so a token's result depends on the tokens before it alone, to the bit.
The reference is `layers.recurrence.TorchRecurrence`.
"""

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..cpu.recurrent import RecurrenceShape, ScanSteps
from .runtime import DIVISIBLE, TRITON_TYPES, Specialisation
from .state_rows import StateMoves, StateRows

_COLUMNS = 16
"""Columns of a program; to be measured."""
_UNIT_EPS = tl.constexpr(1e-6)


@triton.jit
def _softplus(x):
    """log(1 + exp x), exact for small exponentials, too."""
    power = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + power
    rest = above - 1.0
    small = tl.log(above) * (power / tl.where(rest == 0.0, 1.0, rest))
    return tl.where(x > 20.0, x, tl.where(rest == 0.0, power, small))


@triton.jit
def _unit(x, scale):
    """x [n] of length `scale`."""
    return x * (scale * tl.rsqrt(tl.sum(x * x, 0) + _UNIT_EPS))


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
):
    """Program (row, head and n) has COLUMNS columns of a head's matrix, [KEY_SIZE, VALUE_SIZE] of a slot: it reads
    those of the row's source, and writes those of its saves and of its slot. CORRECTS: by the delta rule."""
    index = tl.program_id(0)
    across: tl.constexpr = (VALUE_SIZE + COLUMNS - 1) // COLUMNS
    head = tl.program_id(1) // across
    count = tl.load(counts + index)
    if count == 0:
        return
    key_line = tl.arange(0, KEYS)
    column = tl.program_id(1) % across * COLUMNS + tl.arange(0, COLUMNS)
    is_key = key_line < KEY_SIZE
    is_column = column < VALUE_SIZE
    inside = is_key[:, None] & is_column[None, :]
    place = (head * KEY_SIZE + key_line)[:, None] * VALUE_SIZE + column[None, :]
    size: tl.constexpr = HEADS * KEY_SIZE * VALUE_SIZE
    source = tl.load(sources + index).to(tl.int64)
    state = tl.load(matrices + source * size + place, mask=inside & (source >= 0), other=0.0)
    rate = tl.load(rates + head)
    shift = tl.load(bias + head)
    keyed = head // (HEADS // KEY_HEADS) * KEY_SIZE + key_line
    own = head * VALUE_SIZE + column
    first = tl.load(first_places + index).to(tl.int64)
    save = tl.load(save_begins + index)
    save_end = tl.load(save_ends + index)
    begin = count * 0
    for at in range(save, save_end + 1):
        end = count
        if at < save_end:
            end = tl.load(save_counts + at)
        for token in tl.range(begin, end, num_stages=STAGES):
            line = x + (first + token) * x_stride
            key = tl.load(line + keys + keyed, mask=is_key, other=0.0).to(tl.float32)
            query = tl.load(line + queries + keyed, mask=is_key, other=0.0).to(tl.float32)
            value = tl.load(line + values + own, mask=is_column, other=0.0).to(tl.float32)
            gate = gates + (first + token) * gates_stride + head
            dt = _softplus(tl.load(gate + decay_column).to(tl.float32) + shift)
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
        if at < save_end:
            slot = tl.load(save_slots + at).to(tl.int64)
            tl.store(matrices + slot * size + place, state, mask=inside)
    slot = tl.load(rows + index).to(tl.int64)
    tl.store(matrices + slot * size + place, state, mask=inside)


class TritonRecurrence:
    """The same as `Recurrence`, by a kernel: a gated delta rule with betas at `beta_column`, or without them a
    selective scan; decays, or steps, are at `decay_column`."""

    untraceable: str | None = "Triton computes its recurrence"

    def __init__(self, shape: RecurrenceShape, decay_column: int, beta_column: int | None, steps: ScanSteps) -> None:
        self._shape = shape
        self._columns = decay_column, beta_column or 0
        self._corrects = beta_column is not None
        self._steps = steps

    def __call__(self, x: Tensor, gates: Tensor, matrices: Tensor, rows: StateRows) -> Tensor:
        """x [N, width] with queries, keys and values, and gates [N, other width] -> [N, heads * value size]; changes
        `matrices` [slots, heads, key size, value size]."""
        shape, (rates, bias, skip, least, most) = self._shape, self._steps
        out = x.new_empty(len(x), shape.heads * shape.value_size)
        batch, moves = rows.batch, rows.moves
        tensors = rates, bias, rates if skip is None else skip, out, matrices
        numbers = batch.rows, batch.counts, batch.first_places, *moves
        columns = x.stride(0), gates.stride(0), shape.queries, shape.keys, shape.values, *self._columns
        bounds = shape.key_size**-0.5, least, most
        plan = _plan(shape)
        grid = len(batch.counts), shape.heads * triton.cdiv(shape.value_size, plan["COLUMNS"])
        kinds = self._corrects, skip is not None
        _recurrence_kernel[grid](x, gates, *tensors, *numbers, *columns, *bounds, *kinds, **plan)
        return out


def _plan(shape: RecurrenceShape) -> dict[str, Any]:
    """The launch: by the shape alone, for it orders sums. A warp, whose lanes share out the lines of its columns."""
    sizes = {"HEADS": shape.heads, "KEY_HEADS": shape.key_heads}
    sizes |= {"KEY_SIZE": shape.key_size, "VALUE_SIZE": shape.value_size}
    return sizes | {"KEYS": triton.next_power_of_2(shape.key_size), "COLUMNS": _COLUMNS, "STAGES": 3, "num_warps": 1}


_SHAPES = (
    (RecurrenceShape(16, 16, 128, 128, 0, 2048, 4096), True),  # Qwen 3.5 0.8B
    (RecurrenceShape(32, 16, 128, 128, 0, 2048, 4096), True),  # Qwen 3-Next
    (RecurrenceShape(48, 1, 128, 64, 3200, 3072, 0), False),  # Granite 4 hybrid
    (RecurrenceShape(128, 8, 128, 64, 9216, 8192, 0), False),  # Nemotron-H 8B
    (RecurrenceShape(24, 1, 256, 64, 1792, 1536, 0), False),  # Falcon-H1
)
"""Shapes of published models, and whether by the delta rule, for proofs."""


def specialisations() -> Iterator[Specialisation]:
    for kind in TRITON_TYPES.values():
        for shape, corrects in _SHAPES:
            types = dict.fromkeys(("x", "gates", "out"), f"*{kind}")
            types |= dict.fromkeys(("rates", "bias", "skip", "matrices"), "*fp32")
            types |= dict.fromkeys(("rows", "counts", "first_places", *StateMoves._fields), "*i32")
            types |= dict.fromkeys(("x_stride", "queries", "keys", "values", "decay_column"), f"i32{DIVISIBLE}")
            types |= {"gates_stride": "i32", "beta_column": "i32"}
            types |= dict.fromkeys(("scale", "least", "most"), "fp32")
            plan = _plan(shape) | {"CORRECTS": corrects, "SKIPS": not corrects}
            yield Specialisation.of_plan(_recurrence_kernel, types, plan)
