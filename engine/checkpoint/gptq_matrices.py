"""Matrices as GPTQ and AWQ store them: words of 32 bits, scales and zero points, all of them transposed."""

from torch import Tensor

from ..cpu.matmul import GroupedRows
from .code_forms import CodeForm, StoredForm, Zeros
from .matrix_parts import INTEGERS, NARROW, SCALES, CodedMatrix, MatrixParts, form_label, group_count, input_order
from .packed_words import WORD_BITS, unpack_words, words_for
from .quantization_config import Awq, Gptq
from .weights import WHOLE


class GptqMatrix(CodedMatrix):
    """GPTQ: words along the inputs, each for one output; zero points in words along the outputs, stored less one in its
    first version; with `g_idx` inputs belong to groups in any order."""

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
        # A stored 255 is a zero point of 0 less one: what wraps around is meant so.
        points = ((zeros + self._less) & 255 if bits == 8 else zeros + self._less).t()
        scales = parts.view("scales", (self._groups, parts.outputs), SCALES, WHOLE, rows).float().t()
        return GroupedRows(codes if order is None else codes[:, order], scales, points)


_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of eight outputs in a word, where each of them lies: AutoAWQ stores 0, 2, 4, 6, 1, 3, 5, 7."""


class AwqMatrix(CodedMatrix):
    """AWQ: words of eight outputs, for one input each; zero points likewise."""

    def __init__(self, parts: MatrixParts, stored: Awq) -> None:
        self._parts, words, scales = parts, parts.shape("qweight"), parts.shape("scales")
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
    """The group size that config.json says, or (where matrices may have others) that so many groups mean."""
    if groups == group_count(parts.inputs, said):
        return said
    if varied and groups and parts.inputs % groups == 0:
        return 0 if groups == 1 else parts.inputs // groups
    raise parts.error(f"it has {groups} groups, but quantization_config means {group_count(parts.inputs, said)}")
