"""The forms of matrices that a checkpoint stores as codes, and the conversion of one into another that kernels have.

A code is an unsigned number or a float of eight bits; for groups see `GroupedRows`. Conversion changes no weight: codes
get more bits, and scales are repeated for smaller groups. Knows no file's layout.
"""

from collections.abc import Sequence
from enum import Enum
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from ..cpu import library
from ..cpu.matmul import GROUP_SIZES, GroupedRows
from ..gpu.runtime import FP8_GROUP_SIZES

FLOAT4_CODES = torch.tensor(
    [128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116], dtype=torch.uint8
)
"""By codes of floats of four bits: twice their value as a code of eight bits whose 128 is zero."""


class Zeros(Enum):
    """What a group has beside its scale; for `MIDDLE` nothing: code 2^(bits - 1) is zero."""

    MIDDLE = "middle"
    POINTS = "points"
    OFFSETS = "offsets"


class CodeForm(NamedTuple):
    """The form of a matrix's codes."""

    bits: int
    """4 or 8."""
    group_size: int
    """Inputs that share a scale; 0: all of an output's, and activations are quantised by row, too."""
    zeros: Zeros = Zeros.MIDDLE
    exact: bool = True
    """Whether eleven bits hold all scales and offsets."""
    order: Tensor | None = None
    """int64 [inputs]: code i of an output is multiplied with input order[i]; None: input i."""
    floats: bool = False
    """Whether codes are e4m3, and activations become that, too, by the same groups."""
    float4: bool = False
    """Whether codes of eight bits are all twice a float of four (E2M1), as `FLOAT4_CODES` has them."""

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def by_row(self) -> bool:
        return self.group_size == 0

    def __str__(self) -> str:
        kind = "fp8" if self.floats else f"{self.bits} bits"
        return f"{kind} by " + ("output" if self.by_row else f"groups of {self.group_size}")


class StoredForm(NamedTuple):
    """The form of a tensor in its file."""

    name: str
    """The name in messages."""
    bits: float
    """The bits of a number, with its share of scales."""
    codes: CodeForm | None = None
    """None: it can only be read as floats."""
    plain: bool = False
    """Whether it is stored as floats."""


class CodeRange(NamedTuple):
    """The consecutive inputs `columns` of a matrix with codes of `form` for `width` inputs."""

    form: CodeForm
    columns: range
    width: int

    @property
    def _divisor(self) -> int:
        """The number that group sizes must divide; 0: any size fits, because all inputs share a scale."""
        size = self.form.group_size
        return 0 if size == 0 or size >= self.width else gcd(size, self.columns.start)


def common_form(parts: Sequence[CodeRange]) -> CodeForm | None:
    """The form that all parts can be converted to, to be one product: the most bits, the smallest groups, and the most
    general zeros. None: inputs have different orders, or groups are too small."""
    forms = [part.form for part in parts]
    order = forms[0].order
    if any(form.floats for form in forms):
        return _common_floats(parts)
    if any(not _same_order(order, form.order) for form in forms):
        return None
    if order is not None and any(len(part.columns) != part.width for part in parts):
        return None
    exact, kinds = all(form.exact for form in forms), {form.zeros for form in forms}
    if all(form.by_row and form.bits == 8 and form.zeros is Zeros.MIDDLE for form in forms):
        return CodeForm(8, 0)
    divisor, bits = gcd(*(part._divisor for part in parts)), max(form.bits for form in forms)
    for wide in (bits, 8):
        if sizes := [size for size in GROUP_SIZES[wide] if divisor % size == 0]:
            zeros = next(kind for kind in (Zeros.OFFSETS, Zeros.POINTS, Zeros.MIDDLE) if kind in kinds)
            # A point times its scale may be longer than eleven bits.
            exact = exact and not kinds >= {Zeros.OFFSETS, Zeros.POINTS}
            size = _size_of_groups(sizes, len(parts[0].columns))
            float4 = all(form.float4 for form in forms) and size in GROUP_SIZES[4]
            return CodeForm(wide, size, zeros, exact, order, float4=float4)
    return None


def _common_floats(parts: Sequence[CodeRange]) -> CodeForm | None:
    forms = [part.form for part in parts]
    if not all(form.floats for form in forms):
        return None
    if all(form.by_row for form in forms):
        return CodeForm(8, 0, floats=True)
    divisor = gcd(len(parts[0].columns), *(part._divisor for part in parts))
    sizes = [size for size in FP8_GROUP_SIZES if divisor % size == 0]
    return CodeForm(8, max(sizes), floats=True) if sizes else None


def _size_of_groups(sizes: Sequence[int], inputs: int) -> int:
    """The largest of the sizes that pad `inputs` least."""
    return min(sizes, key=lambda size: (-(-inputs // size) * size, -size))


def turn_codes(rows: GroupedRows, part: CodeRange, to: CodeForm) -> GroupedRows:
    """The inputs of `part` of `rows`, whole outputs in `part.form`, converted to their common form `to`."""
    form, columns = part.form, part.columns
    if to.order is None and to == form and len(columns) == part.width:
        return rows
    codes = rows.weights[:, columns.start : columns.stop]
    if to.by_row:
        return GroupedRows(codes, rows.scales)
    if form.group_size == 0:
        groups = torch.zeros(-(-len(columns) // to.group_size), dtype=torch.int64)
    else:
        groups = torch.arange(columns.start, columns.stop, to.group_size) // form.group_size
    scales, zeros, offsets = (None if numbers is None else numbers[:, groups] for numbers in rows[1:])
    assert scales is not None, "a group has a scale"
    if to.zeros is Zeros.MIDDLE and to.bits != form.bits:
        codes = codes + (to.middle - form.middle)
    elif to.zeros is Zeros.POINTS and zeros is None:
        zeros = torch.full(scales.shape, form.middle, dtype=torch.uint8)
    elif to.zeros is Zeros.OFFSETS and offsets is None:
        offsets, zeros = scales * (form.middle if zeros is None else zeros), None
    return GroupedRows(codes, scales, zeros, offsets)


def dequantise_codes(rows: GroupedRows, form: CodeForm) -> Tensor:
    """Whole outputs in `form` as float32 [n, inputs], without its order of inputs."""
    codes, scales, zeros, offsets = rows
    inputs = codes.shape[1]
    if form.order is zeros is None and scales.numel() * form.group_size == codes.numel() and _in_c(rows):
        wide = torch.empty(codes.shape)
        middle, least = (form.middle, 0) if offsets is None else (0, offsets.data_ptr())
        sizes = scales.numel(), form.group_size, middle
        library.bind_function("charonia_dequantise")(
            codes.data_ptr(), scales.data_ptr(), least, *sizes, wide.data_ptr()
        )
        return wide

    def spread(groups: Tensor) -> Tensor:
        return groups if form.group_size == 0 else groups.repeat_interleave(form.group_size, 1)[:, :inputs]

    wide = codes.float()
    if offsets is None and not form.floats:
        wide -= form.middle if zeros is None else spread(zeros)
    wide *= spread(scales)
    if offsets is not None:
        wide -= spread(offsets)
    if form.order is None:
        return wide
    ordered = torch.empty_like(wide)
    ordered[:, form.order] = wide
    return ordered


def _in_c(rows: GroupedRows) -> bool:
    parts = [part for part in rows if part is not None]
    whole = all(part.device.type == "cpu" and part.is_contiguous() for part in parts)
    return whole and rows.weights.dtype == torch.uint8 and library.level() is not None


def as_int8(codes: Tensor) -> Tensor:
    """The numbers of eight-bit codes whose 128 is zero."""
    return codes.bitwise_xor(128).view(torch.int8)


def as_float4(codes: Tensor) -> Tensor:
    """The codes of floats of four bits that `FLOAT4_CODES` has as `codes`."""
    back = torch.zeros(256, dtype=torch.uint8)
    back[FLOAT4_CODES[8:].long()] = torch.arange(8, 16, dtype=torch.uint8)
    back[FLOAT4_CODES[:8].long()] = torch.arange(8, dtype=torch.uint8)
    return back[codes.int()]


def _same_order(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second or (first is not None and second is not None and torch.equal(first, second))
