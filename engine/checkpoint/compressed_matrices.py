"""Matrices as compressed-tensors, GPTQ and AWQ store them: small unsigned integers packed into 32-bit words, the first
in the lowest bits, with scales and zero points; and floats of eight bits, which other methods store alike."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cpu.matmul import GroupedRows
from .code_forms import FLOAT4_CODES, CodeForm, StoredForm, Zeros, dequantise_codes
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
from .quantization_config import Awq, CompressedTensors, CompressedWeights, Gptq
from .weights import WHOLE

WORD_BITS = 32

_OCTETS = {"U8": torch.uint8}
_MXFP4_GROUP = 32


def words_for(count: int, bits: int) -> int:
    """The words that hold a stream of `count` numbers, some of which lie across two words."""
    return -(-count * bits // WORD_BITS)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [n, words] -> uint8 [n, count], numbers of 1 to 8 bits."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets[:, :count]
    if 8 % bits == 0:
        parts = [octets >> at & ((1 << bits) - 1) for at in range(0, 8, bits)]
        return torch.stack(parts, -1).flatten(1)[:, :count]
    first = torch.arange(count) * bits
    wide = F.pad(octets, (0, 1)).to(torch.int32)
    both = wide[:, first // 8] | wide[:, first // 8 + 1] << 8
    return (both >> (first % 8).to(torch.int32) & ((1 << bits) - 1)).to(torch.uint8)


class GptqMatrix(CodedMatrix):
    """GPTQ: words along the inputs, and zero points in words along the outputs, minus one in its first version. With
    `g_idx` inputs belong to groups in any order."""

    def __init__(self, parts: MatrixParts, stored: Gptq) -> None:
        self._parts, self._less = parts, stored.less
        words, scales = parts.shape("qweight"), parts.shape("scales")
        self._bits = bits = stored.bits
        if stored.varied and len(words) == 2 and parts.inputs:
            self._bits = bits = words[0] * WORD_BITS // parts.inputs
        if words != (words_for(parts.inputs, bits), parts.outputs) or len(scales) != 2 or not 1 <= bits <= 8:
            raise parts.error(f"qweight {list(words)} is not what {self._bits} bits are for {parts.inputs} inputs")
        self._groups = scales[0]
        size = _stored_group_size(parts, self._groups, stored.group_size, stored.varied)
        parts.view("qweight", words, INTEGERS)
        narrow = parts.view("scales", (self._groups, parts.outputs), SCALES).dtype in NARROW
        self._zero_shape = (self._groups, words_for(parts.outputs, bits))
        parts.view("qzeros", self._zero_shape, INTEGERS)
        order = input_order(parts, "g_idx", size) if parts.has("g_idx") else None
        codes = CodeForm(4 if bits <= 4 else 8, size or parts.inputs, Zeros.POINTS, narrow, order)
        share = (16 + bits) / (size or parts.inputs)
        self.form = StoredForm(form_label("gptq", bits, size, order), bits + share, codes)

    def codes(self, rows: slice) -> GroupedRows:
        parts, bits = self._parts, self._bits
        words = parts.view("qweight", (words_for(parts.inputs, bits), parts.outputs), INTEGERS, WHOLE, rows)
        codes = unpack_words(words.t(), bits, parts.inputs)
        order = self.form.codes.order if self.form.codes is not None else None
        zeros = unpack_words(parts.view("qzeros", self._zero_shape, INTEGERS), bits, parts.outputs)[:, rows]
        # A stored 255 is a zero point of 0 minus one: the sum must wrap around.
        points = ((zeros + self._less) & 255 if bits == 8 else zeros + self._less).t()
        scales = parts.view("scales", (self._groups, parts.outputs), SCALES, WHOLE, rows).float().t()
        return GroupedRows(codes if order is None else codes[:, order], scales, points)


_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of eight outputs in a word: AutoAWQ stores 0, 2, 4, 6, 1, 3, 5, 7."""


class AwqMatrix(CodedMatrix):
    """AWQ: words along the outputs, of zero points, too."""

    def __init__(self, parts: MatrixParts, stored: Awq) -> None:
        self._parts = parts
        words = parts.shape("qweight")
        scales = parts.shape("scales")
        self._words = parts.outputs // 8
        if words != (parts.inputs, self._words) or parts.outputs % 8 or len(scales) != 2:
            raise parts.error(f"qweight {list(words)} is not what awq has for {[parts.outputs, parts.inputs]}")
        self._groups = scales[0]
        size = _stored_group_size(parts, self._groups, stored.group_size, False)
        parts.view("qweight", words, INTEGERS)
        parts.view("qzeros", (self._groups, self._words), INTEGERS)
        narrow = parts.view("scales", (self._groups, parts.outputs), SCALES).dtype in NARROW
        codes = CodeForm(4, size or parts.inputs, Zeros.POINTS, narrow)
        self.form = StoredForm(form_label("awq", 4, size), 4 + 20 / (size or parts.inputs), codes)

    def codes(self, rows: slice) -> GroupedRows:
        parts, some = self._parts, range(*rows.indices(self._parts.outputs))
        scales = parts.view("scales", (self._groups, parts.outputs), SCALES, WHOLE, rows).float().t()
        return GroupedRows(
            self._numbers("qweight", parts.inputs, some), scales, self._numbers("qzeros", self._groups, some)
        )

    def _numbers(self, part: str, height: int, rows: range) -> Tensor:
        """uint8 [rows, height]"""
        first, last = rows.start // 8, -(-rows.stop // 8)
        words = self._parts.view(part, (height, self._words), INTEGERS, WHOLE, slice(first, last))
        numbers = unpack_words(words, 4, 8 * (last - first)).view(height, -1, 8)[..., list(_AWQ_PLACES)]
        return numbers.flatten(1)[:, rows.start - 8 * first : rows.stop - 8 * first].t().contiguous()


def _stored_group_size(parts: MatrixParts, groups: int, said: int, varied: bool) -> int:
    """The group size in config.json, or, where matrices may differ, that of so many groups."""
    if groups == group_count(parts.inputs, said):
        return said
    if varied and groups and parts.inputs % groups == 0:
        return 0 if groups == 1 else parts.inputs // groups
    raise parts.error(f"it has {groups} groups, but quantization_config means {group_count(parts.inputs, said)}")


FP8 = {"F8_E4M3": torch.float8_e4m3fn}


class BitStreamMatrix(CodedMatrix):
    """compressed-tensors' pack-quantized: a row is a stream of bits. Numbers and zero points, which are packed along
    outputs, have 2^(bits - 1) added. With `weight_g_idx` inputs belong to groups in any order."""

    def __init__(self, parts: MatrixParts, stored: CompressedTensors) -> None:
        self._parts = parts
        packed = parts.shape("weight_packed")
        scales = parts.shape("weight_scale")
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
        """The only form of the config with these shapes."""
        parts = self._parts
        fitting = []
        for form in stored.forms:
            wanted = (parts.outputs, words_for(parts.inputs, form.bits))
            grouped = (parts.outputs, group_count(parts.inputs, form.group_size))
            fits = packed == wanted and (scales == grouped or (form.group_size == 0 and scales in ((1,), (1, 1))))
            if not form.floats and form.symmetric is not self._points and fits:
                fitting.append(form)
        if len({(form.bits, form.group_size) for form in fitting}) != 1:
            points = "with" if self._points else "without"
            raise parts.error(
                f"weight_packed {list(packed)} and weight_scale {list(scales)} {points} zero points are not what"
                f" quantization_config says of a matrix {[parts.outputs, parts.inputs]}"
            )
        return fitting[0]

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
        parts = self._parts
        bits = self._form.bits
        groups = self._scales[-1]
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
        by_row = form.activations and form.group_size == 0 and not self._points
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


class Fp8Block(NamedTuple):
    """The numbers that share a scale in a matrix of eight-bit floats."""

    sizes: tuple[int, int] | None
    """Outputs and inputs of a block; None: a whole output or matrix."""
    activations: bool
    """Whether activations become such floats, too."""


class Fp8Matrix(CodedMatrix):
    """Floats of eight bits with scales by matrix, output or block."""

    def __init__(self, parts: MatrixParts, blocks: list[Fp8Block]) -> None:
        self._parts = parts
        name = next((name for name in ("weight_scale_inv", "weight_scale") if parts.has(name)), None)
        if name is None:
            raise parts.error("it has floats of 8 bits, but neither weight_scale nor weight_scale_inv")
        self._name, self._shape = name, parts.shape(name)
        fitting = [block for block in blocks if self._shape in _block_shapes(parts, block.sizes)]
        if not fitting:
            raise parts.error(f"{name} {list(self._shape)} is not what quantization_config says of it")
        self._block, activations = block, _ = fitting[0]
        parts.view("weight", (parts.outputs, parts.inputs), FP8)
        parts.view(name, self._shape, SCALES)
        by = f" by blocks of {block[0]} x {block[1]}" if block else ""
        self._codes = CodeForm(8, block[1] if block else 0, floats=True)
        self.form = StoredForm(f"fp8{by}", 8, self._codes if activations else None)

    def codes(self, rows: slice) -> GroupedRows:
        parts = self._parts
        codes = parts.view("weight", (parts.outputs, parts.inputs), FP8, rows)
        if self._block is None:
            return GroupedRows(codes, scale_rows(parts, self._shape, rows, self._name))
        high, some = self._block[0], range(*rows.indices(parts.outputs))
        scales = parts.view(self._name, self._shape, SCALES, slice(some.start // high, -(-some.stop // high))).float()
        return GroupedRows(codes, scales[torch.arange(some.start, some.stop) // high - some.start // high])

    def floats(self, rows: slice) -> Tensor:
        return dequantise_codes(self.codes(rows), self._codes)


def _block_shapes(parts: MatrixParts, block: tuple[int, int] | None) -> list[tuple[int, ...]]:
    if block is None:
        return scale_shapes(parts, 0)
    return [(-(-parts.outputs // block[0]), -(-parts.inputs // block[1]))]


class Mxfp4Matrix(CodedMatrix):
    """Floats of four bits, two in an octet, the first in the lower half; 32 share a scale, a power of two
    (OCP Microscaling Formats 1.0). Twice such a float is a whole number, so codes of eight bits change no weight."""

    def __init__(self, parts: MatrixParts) -> None:
        self._parts = parts
        self._groups = parts.inputs // _MXFP4_GROUP
        wanted = parts.outputs, self._groups, _MXFP4_GROUP // 2
        if parts.shape("blocks") != wanted or parts.shape("scales") != wanted[:2] or parts.inputs % _MXFP4_GROUP:
            shapes = f"blocks {list(parts.shape('blocks'))} and scales {list(parts.shape('scales'))}"
            raise parts.error(f"{shapes} are not what mxfp4 has for {[parts.outputs, parts.inputs]}")
        self._wanted = wanted
        parts.view("blocks", wanted, _OCTETS)
        parts.view("scales", wanted[:2], _OCTETS)
        self.form = StoredForm("mxfp4", 4 + 8 / _MXFP4_GROUP, CodeForm(8, _MXFP4_GROUP, float4=True))

    def codes(self, rows: slice) -> GroupedRows:
        octets = self._parts.view("blocks", self._wanted, _OCTETS, rows).flatten(1)
        exponents = self._parts.view("scales", self._wanted[:2], _OCTETS, rows)
        if bool((exponents == 255).any()):
            raise self._parts.error("a scale is no number")
        nibbles = torch.stack((octets & 15, octets >> 4), -1).flatten(1)
        scales = torch.ldexp(torch.ones(exponents.shape), exponents.to(torch.int32) - 128)
        return GroupedRows(FLOAT4_CODES[nibbles.int()], scales)
