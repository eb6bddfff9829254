"""Matrix products with constant weights of four or eight bits, whose groups of inputs have scales (layout: `matmul.h`).

Activations are quantised to int8, each group of a row by itself. The sum within a group is exact, groups are added in
fp32 in ascending order: a row's result does not depend on the rows beside it nor on the threads, and has the same bits
at every level. So have the packed weights.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from . import library
from .matmul import LANES, LINE_BYTES, WEIGHT_CODES, MatrixProduct, MatrixStruct, address, check_arrays, padded_bias
from .memory import HugePageArena

GROUP_SIZES = {4: (32, 64, 128), 8: (16, 32, 64, 128)}
"""By bits of a weight: the numbers of inputs that may share a scale."""

INT4_ZERO_POINT, INT8_ZERO_POINT = 8, 128
"""The weight that stands for zero, where groups have no zero points of their own."""

_NO_ZEROS, _ZERO_POINTS, _OFFSETS = range(3)
"""What a group has beside its scale, with the numbers of matmul.h."""

_KINDS = {4: 3, 8: 4}
"""By bits of a weight: its kind in matmul.h."""


class GroupedFormat(NamedTuple):
    """A matrix of weights [outputs, inputs] of `bits` each, in groups of `group_size` inputs, each with a scale, and a
    zero point if it has `zero_points`, or an offset if it has `offsets`. Activations `x` and results `out` are fp32 or
    bf16."""

    outputs: int
    inputs: int
    group_size: int
    zero_points: bool
    x: torch.dtype
    out: torch.dtype
    bits: int = 4
    offsets: bool = False

    @property
    def groups(self) -> int:
        """Of an output; the last may be shorter."""
        return -(-self.inputs // self.group_size)

    @property
    def line_bytes(self) -> int:
        """Of all packed weights with their scales and zero points or offsets."""
        together = 1 if self.zero_points or self.offsets else 2  # groups that share a line of scales
        steps = -(-self.groups // together)
        return -(-self.outputs // LANES) * steps * (1 + together * self.group_size * self.bits // 32) * LINE_BYTES


class GroupedRows(NamedTuple):
    """Outputs of a matrix: `weights` uint8 [n, inputs], `scales` float32 [n, groups], and `zeros` uint8 [n, groups] or
    `offsets` float32 [n, groups]. A weight stands for (weight - zero) * scale, or weight * scale - offset. Scales and
    offsets are kept with eleven bits of precision."""

    weights: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    offsets: Tensor | None = None


class GroupedMatmul(MatrixProduct):
    """x [N, inputs] -> x W^T + bias [N, outputs]. Weights are zero until they are packed."""

    def __init__(
        self,
        form: GroupedFormat,
        bias: Tensor | None,
        memory: HugePageArena,
        order: Tensor | None = None,
        packed: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`bias` [outputs] of any dtype is kept in float32. `order` [inputs]: input i of the packed weights is
        multiplied with x[order[i]]. `packed`: the `arrays` of another one of this form.

        Raises:
            ValueError: `packed` is of another form.
        """
        self.form = form
        whole = -(-form.outputs // LANES) * LANES
        if packed is None:
            factors = memory.allocate(whole * 4).view(torch.float32)[:whole]
            packed = {"lines": memory.allocate(form.line_bytes), "factors": factors}
        check_arrays(packed, {"lines": (torch.uint8, form.line_bytes), "factors": (torch.float32, whole)})
        self.arrays = packed
        """All that pack() writes: the same at every level, so it may be kept in a file."""
        self.lines, self.factors = packed["lines"], packed["factors"]
        self._bias = padded_bias(bias, form.outputs)
        self._order = None if order is None else order.to(torch.int32).contiguous()
        super().__init__(
            MatrixStruct(
                lines=address(self.lines),
                scales=address(self.factors),
                bias=address(self._bias),
                outputs=form.outputs,
                inputs=form.inputs,
                kind=_KINDS[form.bits],
                x_kind=WEIGHT_CODES[form.x],
                out_kind=WEIGHT_CODES[form.out],
                span=form.group_size,
                zeros=_ZERO_POINTS if form.zero_points else _OFFSETS if form.offsets else _NO_ZEROS,
                order=address(self._order),
            ),
            form.out,
        )

    def pack(self, first: int, rows: GroupedRows) -> None:
        """Take `rows` as the outputs from `first` on; each output once."""
        parts = [None if part is None else part.contiguous() for part in rows]
        library.bind_function("charonia_pack_spans")(self._at, *map(address, parts), first, len(rows.weights))
