"""Matrix products with constant weights, packed once (`matmul.h` says how they lie): of fp32, bf16 or int8, and of four
or eight bits whose groups of inputs have scales.

A row's bits depend on no other row, on no thread, and not on the level. int8 is symmetric: weights by output,
activations by row, the largest number scaled to 127, the sum between exact. With groups, those of each row are
quantised to int8 by themselves; their exact sums are added in fp32, ascending.
"""

import ctypes
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from . import library
from .library import struct_fields
from .memory import HugePageArena
from .op_trace import PRODUCT, OpStruct, SymbolicTensor, TensorOrSymbol

LANES, LINE_BYTES = 16, 64
"""Outputs side by side in a line of packed weights, and its bytes, as in matmul.h."""

WEIGHT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""The dtypes that weights may be packed as, with the numbers of matmul.h."""

SOURCE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""The dtypes that weights may be packed from, with the numbers of matmul_pack.c."""


class MatmulFormat(NamedTuple):
    """A matrix of weights [outputs, inputs], kept as `kept`: int8, or the dtype of the activations `x`. They and the
    results, `out`, are fp32 or bf16."""

    outputs: int
    inputs: int
    kept: torch.dtype
    x: torch.dtype
    out: torch.dtype


class MatrixStruct(ctypes.Structure):
    """`Matrix` of matmul.h."""

    _fields_ = struct_fields(
        "p lines scales offsets bias", "l outputs inputs", "i kind x_kind out_kind span zeros", "p order"
    )


class MatrixProduct:
    """x [N, inputs] -> x W^T + bias [N, outputs] in `out`, for a packed matrix."""

    def __init__(self, matrix: MatrixStruct, out: torch.dtype) -> None:
        """The caller keeps what `matrix` has the addresses of."""
        self._matrix = matrix
        self.inputs = matrix.inputs
        self.outputs = matrix.outputs
        self._out = out
        self.address = ctypes.addressof(matrix)
        self._multiply = library.bind_function("charonia_matmul")
        self.kind = matrix.kind, matrix.span, matrix.zeros, matrix.inputs, matrix.outputs
        """What decides how much memory C needs to multiply with it."""

    def __call__(self, x: TensorOrSymbol) -> TensorOrSymbol:
        if isinstance(x, SymbolicTensor):
            operation = OpStruct(kind=PRODUCT, what=self.address, stride=self.inputs, size=self.outputs)
            return x.trace.add_op(operation, x, self.outputs, dtype=self._out)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(len(x), self.outputs, dtype=self._out)
        self.multiply_into(x, out)
        return out

    def multiply_into(self, x: Tensor, out: Tensor) -> None:
        """The same into a tensor that is there; lines of both may have gaps between them."""
        if self._multiply(self.address, x.data_ptr(), x.stride(0), len(x), out.data_ptr(), out.stride(0)):
            raise MemoryError("no memory for a matrix product")


def padded_bias(bias: Tensor | None, outputs: int) -> Tensor | None:
    """`bias` [outputs] of any dtype in float32, zeros behind it up to whole lines."""
    return None if bias is None else F.pad(bias.float(), (0, -outputs % LANES))


class PackedMatmul(MatrixProduct):
    """A product with weights in fp32, bf16 or int8. They are zero until they are packed."""

    def __init__(
        self,
        form: MatmulFormat,
        bias: Tensor | None,
        memory: HugePageArena,
        packed: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`bias` [outputs] of any dtype is kept in float32. `packed`: the `arrays` of another one of this form.

        Raises:
            ValueError: `packed` is of another form.
        """
        self.form = form
        wanted = array_sizes(form)
        if packed is None:
            scales = {name: torch.zeros(size, dtype=dtype) for name, (dtype, size) in wanted.items() if name != "lines"}
            packed = {"lines": memory.allocate(wanted["lines"][1]), **scales}
        check_arrays(packed, wanted)
        self.arrays = packed
        self._lines, self._scales, self._offsets = map(packed.get, ("lines", "scales", "offsets"))
        self._bias = padded_bias(bias, form.outputs)
        addresses = [address(tensor) for tensor in (self._lines, self._scales, self._offsets, self._bias)]
        kinds = [WEIGHT_CODES[dtype] for dtype in (form.kept, form.x, form.out)]
        super().__init__(MatrixStruct(*addresses, form.outputs, form.inputs, *kinds), form.out)

    def pack(self, first: int, rows: Tensor, scales: Tensor | None = None) -> None:
        """Take `rows` [n, inputs], fp32, bf16 or fp16, as the outputs from `first` on; or int8 with their `scales` [n],
        where int8 is kept."""
        if scales is not None and self._scales is not None:
            self._scales[first : first + len(rows)] = scales
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        source = (rows.data_ptr(), SOURCE_CODES[rows.dtype], rows.stride(0), first, *rows.shape)
        target = (address(self._lines), address(self._scales), address(self._offsets))
        if library.bind_function("charonia_pack")(*source, WEIGHT_CODES[self.form.kept], *target):
            raise MemoryError("no memory to pack a matrix")


ArraySizes: TypeAlias = Mapping[str, tuple[torch.dtype, int]]
"""The arrays that packed weights consist of: dtype and numbers."""


def array_sizes(form: MatmulFormat) -> dict[str, tuple[torch.dtype, int]]:
    whole = -(-form.outputs // LANES) * LANES
    steps = -(-form.inputs * form.kept.itemsize // 4)
    lines = {"lines": (torch.uint8, whole // LANES * steps * LINE_BYTES)}
    if form.kept != torch.int8:
        return lines
    return lines | {"scales": (torch.float32, whole), "offsets": (torch.int32, whole)}


def check_arrays(packed: Mapping[str, Tensor], wanted: ArraySizes) -> None:
    """C reads as many numbers as the form says.

    Raises:
        ValueError: the arrays are of another form.
    """
    sizes = {name: (array.dtype, array.numel()) for name, array in packed.items()}
    if sizes != wanted:
        raise ValueError(f"packed arrays are {sizes}, not {wanted}")


def address(tensor: Tensor | None) -> int:
    """Its memory's; 0 for None, which is C's null."""
    return 0 if tensor is None else tensor.data_ptr()


GROUP_SIZES = {4: (32, 64, 128), 8: (16, 32, 64, 128)}
"""By bits of a weight: the numbers of inputs that may share a scale."""

INT4_ZERO_POINT, INT8_ZERO_POINT = 8, 128
"""The weight that stands for zero, where groups have no zero points of their own."""

_NO_ZEROS, _ZERO_POINTS, _OFFSETS = range(3)
"""What a group has beside its scale, with the numbers of matmul.h."""

_KINDS = {4: 3, 8: 4}
"""By bits of a weight: its kind in matmul.h."""
_FLOAT4 = 5
"""The kind of floats of four bits."""


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
    floats: bool = False
    """Whether weights are codes of floats of four bits (E2M1), which stand for twice such a float times their scale."""

    @property
    def groups(self) -> int:
        """The groups of an output; the last may be shorter."""
        return -(-self.inputs // self.group_size)

    @property
    def line_bytes(self) -> int:
        """The bytes of all packed weights with their scales and zero points or offsets."""
        together = 1 if self.zero_points or self.offsets else 2  # groups that share a line of scales
        steps = -(-self.groups // together)
        return -(-self.outputs // LANES) * steps * (1 + together * self.group_size * self.bits // 32) * LINE_BYTES


class GroupedRows(NamedTuple):
    """Outputs of a matrix: `weights` uint8 [n, inputs], `scales` float32 [n, groups], and `zeros` uint8 [n, groups] or
    `offsets` float32 [n, groups]. A weight stands for (weight - zero) * scale, or weight * scale - offset. Scales and
    offsets are kept with eleven bits of precision. Weights in e4m3 stand for weight * scale."""

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
                kind=_FLOAT4 if form.floats else _KINDS[form.bits],
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
        library.bind_function("charonia_pack_spans")(self.address, *map(address, parts), first, len(rows.weights))
