"""Matrices as compressed-tensors stores them, and floats of eight bits, which other methods store alike."""

import torch
from torch import Tensor

from ..cpu.matmul import GroupedRows
from .code_forms import CodeForm, StoredForm, Zeros
from .matrix_parts import (
    BYTES,
    INTEGERS,
    NARROW,
    SCALES,
    CodedMatrix,
    MatrixParts,
    form_label,
    group_count,
    input_order,
    scale_rows,
    scale_shapes,
)
from .packed_words import unpack_words, words_for
from .quantization_config import CompressedTensors, CompressedWeights

FP8 = {"F8_E4M3": torch.float8_e4m3fn}


class BitStreamMatrix(CodedMatrix):
    """compressed-tensors' pack-quantized: a row is one stream of bits; numbers and zero points have 2^(bits - 1) added.
    Zero points are packed along outputs. With `weight_g_idx` inputs belong to groups in any order."""

    def __init__(self, parts: MatrixParts, stored: CompressedTensors) -> None:
        self._parts, packed, scales = parts, parts.shape("weight_packed"), parts.shape("weight_scale")
        self._points = parts.has("weight_zero_point")
        self._form = self._fitting(stored, packed, scales)
        bits, size = self._form.bits, self._form.group_size
        self._packed, self._scales = packed, scales
        narrow = parts.view("weight_scale", scales, SCALES).dtype in NARROW
        parts.view("weight_packed", packed, INTEGERS)
        if parts.has("weight_shape"):
            said = parts.view("weight_shape", (2,), {"I64": torch.int64, "I32": torch.int32}).tolist()
            if said != [parts.outputs, parts.inputs]:
                raise parts.error(f"weight_shape says {said}, but config.json means {[parts.outputs, parts.inputs]}")
        order = input_order(parts, "weight_g_idx", size) if parts.has("weight_g_idx") else None
        width, zeros = 4 if bits <= 4 else 8, Zeros.POINTS if self._points else Zeros.MIDDLE
        codes = CodeForm(width, size or parts.inputs, zeros, narrow, order)
        self._shift = (1 << (width - 1)) - (1 << (bits - 1))
        self.form = StoredForm(
            form_label("compressed-tensors", bits, size, order), bits + 16 / (size or parts.inputs), codes
        )

    def _fitting(
        self, stored: CompressedTensors, packed: tuple[int, ...], scales: tuple[int, ...]
    ) -> CompressedWeights:
        """The one form of the config that these shapes can be."""
        parts, found = self._parts, []
        for form in stored.forms:
            wanted = (parts.outputs, words_for(parts.inputs, form.bits))
            grouped = (parts.outputs, group_count(parts.inputs, form.group_size))
            fits = packed == wanted and (scales == grouped or (form.group_size == 0 and scales in ((1,), (1, 1))))
            if not form.floats and form.symmetric is not self._points and fits:
                found.append(form)
        if len({(form.bits, form.group_size) for form in found}) != 1:
            points = "with" if self._points else "without"
            raise parts.error(
                f"weight_packed {list(packed)} and weight_scale {list(scales)} {points} zero points are not what"
                f" quantization_config says of a matrix {[parts.outputs, parts.inputs]}"
            )
        return found[0]

    def codes(self, rows: slice) -> GroupedRows:
        parts, bits = self._parts, self._form.bits
        packed = parts.view("weight_packed", self._packed, INTEGERS, rows)
        codes = unpack_words(packed, bits, parts.inputs)
        scales = scale_rows(parts, self._scales, rows)
        order = self.form.codes.order if self.form.codes is not None else None
        zeros = self._zeros(rows) if self._points else None
        codes = codes if order is None else codes[:, order]
        return GroupedRows(codes + self._shift if self._shift and zeros is None else codes, scales, zeros)

    def _zeros(self, rows: slice) -> Tensor:
        parts, bits, groups = self._parts, self._form.bits, self._scales[-1]
        words = words_for(parts.outputs, bits)
        packed = parts.view("weight_zero_point", (words, groups), INTEGERS)
        return unpack_words(packed.t(), bits, parts.outputs).t()[rows]


class Int8Matrix(CodedMatrix):
    """compressed-tensors' int-quantized: a byte a number."""

    def __init__(self, parts: MatrixParts, stored: CompressedTensors) -> None:
        self._parts, self._scales = parts, parts.shape("weight_scale")
        self._points = parts.has("weight_zero_point")
        fitting = [
            form
            for form in stored.forms
            if not form.floats and form.bits == 8 and self._scales in scale_shapes(parts, form.group_size)
        ]
        if not fitting:
            raise parts.error(f"weight_scale {list(self._scales)} is not what quantization_config says of it")
        form = fitting[0]
        parts.view("weight", (parts.outputs, parts.inputs), BYTES)
        narrow = parts.view("weight_scale", self._scales, SCALES).dtype in NARROW
        zeros = Zeros.POINTS if self._points else Zeros.MIDDLE
        by_row = form.by_row and form.group_size == 0 and not self._points
        codes = CodeForm(8, 0 if by_row else form.group_size or parts.inputs, zeros, narrow)
        label = form_label("compressed-tensors", 8, form.group_size) + (", activations too" if by_row else "")
        self.form = StoredForm(label, 8 + 16 / (form.group_size or parts.inputs), codes)

    def codes(self, rows: slice) -> GroupedRows:
        parts = self._parts
        codes = parts.view("weight", (parts.outputs, parts.inputs), BYTES, rows)
        zeros = None
        if self._points:
            zeros = scale_rows(parts, self._scales, rows, "weight_zero_point", BYTES)
            zeros = zeros.to(torch.int8).view(torch.uint8).bitwise_xor(128)
        return GroupedRows(
            codes.contiguous().view(torch.uint8).bitwise_xor(128), scale_rows(parts, self._scales, rows), zeros
        )


class Fp8Matrix:
    """Floats of eight bits with scales by matrix, output or block."""

    def __init__(self, parts: MatrixParts, blocks: list[tuple[int, int] | None]) -> None:
        self._parts = parts
        name = next((name for name in ("weight_scale_inv", "weight_scale") if parts.has(name)), None)
        if name is None:
            raise parts.error("it has floats of 8 bits, but neither weight_scale nor weight_scale_inv")
        self._name, self._shape = name, parts.shape(name)
        fitting = [block for block in blocks if self._shape in _block_shapes(parts, block)]
        if not fitting:
            raise parts.error(f"{name} {list(self._shape)} is not what quantization_config says of it")
        self._block = found = fitting[0]
        parts.view("weight", (parts.outputs, parts.inputs), FP8)
        parts.view(name, self._shape, SCALES)
        by = f" by blocks of {found[0]} x {found[1]}" if found else ""
        self.form = StoredForm(f"fp8{by}", 8)

    def codes(self, rows: slice) -> GroupedRows:
        raise self._parts.error("it is stored as floats")

    def floats(self, rows: slice) -> Tensor:
        parts = self._parts
        wide = parts.view("weight", (parts.outputs, parts.inputs), FP8, rows).float()
        if self._block is None:
            return wide * scale_rows(parts, self._shape, rows, self._name)
        high, long = self._block
        some = range(*rows.indices(parts.outputs))
        scales = parts.view(self._name, self._shape, SCALES, slice(some.start // high, -(-some.stop // high))).float()
        of_rows = torch.arange(some.start, some.stop) // high - some.start // high
        return wide * scales[of_rows].repeat_interleave(long, 1)[:, : parts.inputs]


def _block_shapes(parts: MatrixParts, block: tuple[int, int] | None) -> list[tuple[int, ...]]:
    if block is None:
        return scale_shapes(parts, 0)
    return [(-(-parts.outputs // block[0]), -(-parts.inputs // block[1]))]
