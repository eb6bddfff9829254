"""Products with weights of four or eight bits whose groups of inputs have scales; activations are not quantised.

Few rows: tensor cores multiply codes exactly, as floats, and a group's sum is scaled; groups are split by the matrix
alone. Many rows: weights are widened to the model's dtype, and cuBLAS multiplies. The references are
`layers.int4.dequantize_int4` and `checkpoint.code_forms.dequantise_codes`.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..cpu.matmul import GroupedFormat, GroupedRows
from .input_parts import ADDED_OUTPUTS, add_parts
from .runtime import DIVISIBLE, TRITON_TYPES, Specialisation

MOST_ROWS = 64
"""Rows up to which our kernel multiplies; above, weights are widened. To be measured."""

_OUTPUTS = 64
_ENOUGH, _LEAST_GROUPS = 256, 16
"""Programs that occupy a device, and the fewest groups of a part."""
_NOTHING, _POINTS, _OFFSETS = range(3)
"""What a group has beside its scale."""


@triton.jit
def _decode(packed, zero, kind: tl.constexpr, FIXED: tl.constexpr, SIGNED: tl.constexpr):
    """Codes [outputs, n] minus `zero` [outputs], or FIXED, as floats of `kind`."""
    if SIGNED:  # the difference of four-bit numbers fits into eight bits
        centred = packed.to(tl.int8) - (FIXED if zero is None else zero.to(tl.int8)[:, None])
    else:
        centred = packed.to(tl.int16) - (FIXED if zero is None else zero.to(tl.int16)[:, None])
    return centred.to(kind)


@triton.jit
def load_inputs(x_at, places, inputs):
    """x [places, rows] of rows at the addresses `x_at` [1, rows]; zeros beyond the last input."""
    return tl.load(x_at + places[:, None], mask=places[:, None] < inputs, other=0.0)


@triton.jit
def add_group(
    total, codes, scales, zeros, at, some, later, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr
):
    """`total` [outputs, rows] plus the product of the groups `at` [outputs] with their inputs of x: `some` [inputs,
    rows], and for four bits the second half, `later`."""
    length: tl.constexpr = GROUP * BITS // 8
    kind: tl.constexpr = some.dtype
    fixed: tl.constexpr = 0 if ZEROS == 2 else 1 << (BITS - 1)
    packed = tl.load(codes + at[:, None] * length + tl.arange(0, length)[None, :])
    scale = tl.load(scales + at).to(tl.float32)
    zero = tl.load(zeros + at) if ZEROS == 1 else None
    if BITS == 4:
        own = tl.dot(_decode(packed & 15, zero, kind, fixed, True), some, input_precision="ieee")
        own = tl.dot(_decode(packed >> 4, zero, kind, fixed, True), later, own, input_precision="ieee")
    else:
        own = tl.dot(_decode(packed, zero, kind, fixed, False), some, input_precision="ieee")
    total += own * scale[:, None]
    if ZEROS == 2:
        sums = tl.sum(some.to(tl.float32), 0)
        if BITS == 4:
            sums += tl.sum(later.to(tl.float32), 0)
        total -= sums[None, :] * tl.load(zeros + at).to(tl.float32)[:, None]
    return total


@triton.jit
def _grouped_kernel(
    x,
    codes,
    scales,
    zeros,
    factors,
    bias,
    out,
    rows,
    outputs,
    inputs,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BIASED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """A tile of x [rows, inputs] times weights with codes [groups, outputs, bytes] and scales [groups, outputs], of
    `out` [rows, outputs]; with several PARTS of the groups, the sums of one in `out` [PARTS, rows, outputs]."""
    columns = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    lines = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    part = tl.program_id(2)
    length: tl.constexpr = GROUP * BITS // 8
    inner = tl.arange(0, length)
    # Lines beyond the last repeat the first ones, and are not stored.
    x_at = x + (lines % rows).to(tl.int64)[None, :] * inputs
    own = (columns % outputs).to(tl.int64)
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    for group in range(groups * part // PARTS, groups * (part + 1) // PARTS):
        places = group * GROUP + inner
        some = load_inputs(x_at, places, inputs)
        later = load_inputs(x_at, places + length, inputs) if BITS == 4 else some
        total = add_group(total, codes, scales, zeros, group * outputs + own, some, later, BITS, GROUP, ZEROS)
    valid = (columns < outputs)[:, None] & (lines < rows)[None, :]
    places = lines.to(tl.int64)[None, :] * outputs + columns[:, None]
    if PARTS > 1:
        tl.store(out + part.to(tl.int64) * rows * outputs + places, total, mask=valid)
    else:
        total *= tl.load(factors + own)[:, None]
        if BIASED:
            total += tl.load(bias + own)[:, None]
        tl.store(out + places, total.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _join_kernel(
    parts, factors, bias, out, rows, outputs, BIASED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """out [rows, outputs] = `parts` [PARTS, rows, outputs], added in ascending order, times `factors`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = columns < outputs
    total = add_parts(parts, row, columns, rows, outputs, PARTS, BLOCK)
    total *= tl.load(factors + columns, mask=valid, other=0.0)
    if BIASED:
        total += tl.load(bias + columns, mask=valid, other=0.0)
    tl.store(out + row * outputs + columns, total.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _widen_kernel(
    codes,
    scales,
    zeros,
    factors,
    out,
    outputs,
    inputs,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """Writes one group of some outputs as floats to `out` [outputs, inputs]."""
    group = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    length: tl.constexpr = GROUP * BITS // 8
    inner = tl.arange(0, GROUP)
    own = columns % outputs
    at = group.to(tl.int64) * outputs + own
    packed = tl.load(codes + at[:, None] * length + (inner % length)[None, :])
    if BITS == 4:
        packed = (packed >> (inner // length * 4).to(tl.uint8)[None, :]) & 15
    factor = tl.load(factors + own)
    scale = tl.load(scales + at).to(tl.float32) * factor
    if ZEROS == 2:
        offset = tl.load(zeros + at).to(tl.float32) * factor
        weights = packed.to(tl.float32) * scale[:, None] - offset[:, None]
    elif ZEROS == 1:
        zero = tl.load(zeros + at).to(tl.float32)
        weights = (packed.to(tl.float32) - zero[:, None]) * scale[:, None]
    else:
        weights = (packed.to(tl.float32) - (1 << (BITS - 1))) * scale[:, None]
    places = group * GROUP + inner
    mask = (columns < outputs)[:, None] & (places < inputs)[None, :]
    target = out + columns.to(tl.int64)[:, None] * inputs + places[None, :]
    tl.store(target, weights.to(out.dtype.element_ty), mask=mask)


class GroupedWeights:
    """Weights of `form` as the kernels read them. `pack` must fill in each output once."""

    def __init__(self, form: GroupedFormat, device: torch.device) -> None:
        groups, outputs = form.groups, form.outputs
        self.form = form
        self.kind = _POINTS if form.zero_points else _OFFSETS if form.offsets else _NOTHING
        self.codes = torch.empty(groups, outputs, form.group_size * form.bits // 8, dtype=torch.uint8, device=device)
        self.scales = torch.empty(groups, outputs, dtype=torch.float16, device=device)
        self.zeros = self.scales
        if self.kind:
            kind = torch.uint8 if form.zero_points else torch.float16
            self.zeros = torch.empty(groups, outputs, dtype=kind, device=device)
        self.factors = torch.empty(outputs, device=device)

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """The kernels' arguments."""
        return self.codes, self.scales, self.zeros, self.factors

    def pack(self, first: int, rows: GroupedRows) -> None:
        """Take `rows` as the outputs from `first` on. Scales and offsets are kept in float16, relative to a power of
        two of their output."""
        form, device = self.form, self.codes.device
        codes, scales, zeros, offsets = (None if part is None else part.to(device) for part in rows)
        assert codes is not None, "a group has codes"
        assert scales is not None, "a group has a scale"
        some = slice(first, first + len(codes))
        padded = F.pad(codes, (0, form.groups * form.group_size - codes.shape[1]))
        grouped = padded.view(len(codes), form.groups, form.group_size)
        if form.bits == 4:
            half = form.group_size // 2
            grouped = grouped[..., :half] | grouped[..., half:] << 4
        self.codes[:, some] = grouped.transpose(0, 1)
        both = scales.abs() if offsets is None else torch.maximum(scales.abs(), offsets.abs())
        factors = torch.ldexp(torch.ones(len(codes), device=device), torch.frexp(both.amax(1)).exponent)
        self.factors[some] = factors
        self.scales[:, some] = (scales / factors.unsqueeze(1)).t().half()
        if zeros is not None:
            self.zeros[:, some] = zeros.t()
        elif offsets is not None:
            self.zeros[:, some] = (offsets / factors.unsqueeze(1)).t().half()


class TritonGroupedMatmul:
    """x [N, in] -> x W^T + b [N, out] in x's dtype."""

    def __init__(
        self, weights: GroupedWeights, bias: Tensor | None, order: Tensor | None = None, invariant: bool = False
    ) -> None:
        """`order` [inputs]: input i of the packed weights is multiplied with x[order[i]]. `invariant`: any number of
        rows is multiplied as few are."""
        self._widens = not invariant
        self._weights = weights
        self._bias = None if bias is None else bias.float()
        self._order = None if order is None else order.to(weights.codes.device)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous() if self._order is None else x.index_select(1, self._order)
        if self._widens and len(x) > MOST_ROWS:
            weight = self._widened(x.dtype)
            return F.linear(x, weight, None if self._bias is None else self._bias.to(x.dtype))
        form = self._weights.form
        rows = len(x)
        out = x.new_empty(rows, form.outputs)
        if not rows:
            return out
        plan = _plan(rows, form)
        parts = plan["PARTS"]
        biased = self._bias is not None
        bias = self._weights.factors if self._bias is None else self._bias
        target = out if parts == 1 else x.new_empty(parts, *out.shape, dtype=torch.float32)
        grid = triton.cdiv(form.outputs, _OUTPUTS), triton.cdiv(rows, plan["BLOCK_ROWS"]), parts
        sizes = rows, form.outputs, form.inputs, form.groups, form.bits, form.group_size, self._weights.kind, biased
        _grouped_kernel[grid](x, *self._weights.arrays, bias, target, *sizes, **plan)
        if target is not out:
            ends = self._weights.factors, bias, out, rows, form.outputs, biased, parts, ADDED_OUTPUTS
            _join_kernel[rows, triton.cdiv(form.outputs, ADDED_OUTPUTS)](target, *ends, num_warps=4)
        return out

    def _widened(self, dtype: torch.dtype) -> Tensor:
        form = self._weights.form
        out = torch.empty(form.outputs, form.inputs, dtype=dtype, device=self._weights.codes.device)
        sizes = form.outputs, form.inputs, form.bits, form.group_size, self._weights.kind, _OUTPUTS
        grid = triton.cdiv(form.outputs, _OUTPUTS), form.groups
        _widen_kernel[grid](*self._weights.arrays, out, *sizes, num_warps=8)
        return out


def _plan(rows: int, form: GroupedFormat) -> dict[str, int]:
    """The launch: parts by the matrix, and rows of a block by how many rows there are."""
    parts = 1
    while triton.cdiv(form.outputs, _OUTPUTS) * parts < _ENOUGH and form.groups >= 2 * parts * _LEAST_GROUPS:
        parts *= 2
    block = 16 if rows <= 16 else 32
    warps, stages = (8, 3) if form.x == torch.float32 else (4, 6)  # float32 has no tensor cores, and registers spill
    return {"PARTS": parts, "BLOCK_ROWS": block, "BLOCK_OUTPUTS": _OUTPUTS, "num_warps": warps, "num_stages": stages}


INTEGER_FORMS = [
    (bits, group, kind)
    for bits, group in ((4, 32), (4, 128), (8, 16), (8, 32), (8, 128))
    for kind in (_NOTHING, _POINTS, _OFFSETS)
]
"""Forms of checkpoints: bits, inputs of a group, and what a group has beside its scale."""

_SHAPES = ((28672, 4096), (4096, 14336))
"""Outputs and inputs of products of Llama-3.1-8B, with one part and with several."""


def specialisations() -> Iterator[Specialisation]:
    """Products with the integers of every format, with and without zero points or offsets."""
    for x in TRITON_TYPES:
        for bits, group, kind in INTEGER_FORMS:
            if x == torch.float32 and (bits, group, kind) != (4, 32, _NOTHING):
                continue  # a model in float32 keeps checkpoints' integers as floats
            yield _widening(x, bits, group, kind)
            for rows, (outputs, inputs) in ((1, _SHAPES[1]), (16, _SHAPES[0]), (64, _SHAPES[1])):
                form = GroupedFormat(outputs, inputs, group, kind == _POINTS, x, x, bits, kind == _OFFSETS)
                yield _product(form, rows, kind)
        types = {"parts": "*fp32", "factors": "*fp32", "bias": "*fp32", "out": f"*{TRITON_TYPES[x]}"}
        constants = {"BIASED": True, "PARTS": 4, "BLOCK": ADDED_OUTPUTS}
        yield Specialisation(_join_kernel, types | {"rows": "i32", "outputs": f"i32{DIVISIBLE}"}, constants, {})


def weight_types(kind: int) -> dict[str, str]:
    zeros = "*u8" if kind == _POINTS else "*fp16"
    return {"codes": "*u8", "scales": "*fp16", "zeros": zeros, "factors": "*fp32"}


def _product(form: GroupedFormat, rows: int, kind: int) -> Specialisation:
    plan = _plan(rows, form)
    x = TRITON_TYPES[form.x]
    single = {"rows": 1} if rows == 1 else {}  # a 1 is a constant to Triton
    types = {"x": f"*{x}", **weight_types(kind), "bias": "*fp32", "out": f"*{x if plan['PARTS'] == 1 else 'fp32'}"}
    types |= ({} if single else {"rows": "i32"}) | dict.fromkeys(("outputs", "inputs", "groups"), f"i32{DIVISIBLE}")
    plan |= single | {"BITS": form.bits, "GROUP": form.group_size, "ZEROS": kind, "BIASED": False}
    wanted = () if form.x == torch.float32 else ("mma", "cp.async")
    return Specialisation.of_plan(_grouped_kernel, types, plan, wanted)


def _widening(x: torch.dtype, bits: int, group: int, kind: int) -> Specialisation:
    types = {**weight_types(kind), "out": f"*{TRITON_TYPES[x]}"}
    types |= dict.fromkeys(("outputs", "inputs"), f"i32{DIVISIBLE}")
    constants = {"BITS": bits, "GROUP": group, "ZEROS": kind, "BLOCK_OUTPUTS": _OUTPUTS}
    return Specialisation(_widen_kernel, types, constants, {"num_warps": 8})
