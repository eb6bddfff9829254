"""Products with weights in groups: against exact sums, bit for bit alike at every level, and rows that do not notice
each other."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

import pytest
import torch

from charonia.engine.checkpoint.code_forms import FLOAT4_CODES, as_float4
from charonia.engine.cpu.matmul import GROUP_SIZES, GroupedFormat, GroupedMatmul, GroupedRows
from charonia.engine.cpu.memory import HugePageArena
from tests.engine.cpu.conftest import HERE, ByThreads

Form: TypeAlias = tuple[int, int, str]
"""Bits of a weight, inputs in a group, and what each has beside its scale."""

KINDS = ("none", "zeros", "offsets")
FORMS = [(bits, size, kind) for bits, sizes in GROUP_SIZES.items() for size in sizes for kind in KINDS]

SHAPES = [*((form, (100, 70)) for form in FORMS), ((4, 32, "none"), (200, 896)), ((4, 128, "zeros"), (64, 4864))]
SHAPES += [((8, 16, "none"), (40, 2300)), ((4, 64, "none"), (1, 1)), ((8, 32, "offsets"), (17, 33))]
"""Outputs that are no whole lines, inputs that are no whole groups, and more inputs than one chunk."""


def form_of(form: Form, shape: tuple[int, int], x: torch.dtype, out: torch.dtype = torch.float32) -> GroupedFormat:
    bits, size, kind = form
    return GroupedFormat(*shape, size, kind == "zeros", x, out, bits, kind == "offsets")


def weights_for(form: GroupedFormat) -> GroupedRows:
    """Random weights; scales and offsets of all sizes, exact in eleven bits, some negative or zero."""
    generator = torch.Generator().manual_seed(form.inputs)
    codes = torch.randint(0, 1 << form.bits, (form.outputs, form.inputs), generator=generator, dtype=torch.uint8)
    scales = torch.randn(form.outputs, form.groups, generator=generator).bfloat16().float()
    scales *= 2.0 ** torch.randint(-6, 6, scales.shape, generator=generator)
    scales[:, ::7] = 0
    highest = 17 if form.bits == 4 else 256  # checkpoints have zero points of 16
    zeros = torch.randint(0, highest, scales.shape, generator=generator, dtype=torch.uint8)
    offsets = scales.roll(1, 0) * 8
    return GroupedRows(codes, scales, zeros if form.zero_points else None, offsets if form.offsets else None)


def made(form: GroupedFormat, order: torch.Tensor | None = None) -> tuple[GroupedMatmul, GroupedRows, torch.Tensor]:
    rows, bias = weights_for(form), torch.randn(form.outputs, generator=torch.Generator().manual_seed(1))
    packed = GroupedMatmul(form, bias, HugePageArena(), order)
    packed.pack(0, rows)
    return packed, rows, bias


def inputs(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def by_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """[N, inputs] -> [N, groups, size], zeros behind the last."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size))


def exact_products(x: torch.Tensor, rows: GroupedRows, form: GroupedFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, outputs, groups]: the sum within each group in float64, activations quantised; and the sum of its sizes."""
    size = form.group_size
    wide = by_groups(x.float(), size)
    largest = wide.abs().amax(-1, keepdim=True)
    by = torch.where(largest > 0, torch.tensor(127.0) / largest, 0.0)  # 127 / largest would multiply with the inverse
    codes = (wide * by).round().double()
    zeros = torch.full_like(rows.scales, 1 << (form.bits - 1)) if rows.zeros is None else rows.zeros
    weights = by_groups(rows.weights.double(), size) - zeros.double().unsqueeze(-1)
    there = by_groups(torch.ones(1, x.shape[1], dtype=torch.float64), size)
    if rows.offsets is not None:
        weights = by_groups(rows.weights.double(), size) * rows.scales.double().unsqueeze(-1)
        parts = weights.abs() + rows.offsets.double().abs().unsqueeze(-1)
        weights -= rows.offsets.double().unsqueeze(-1)
    else:
        weights *= rows.scales.double().unsqueeze(-1)
        parts = weights.abs()
    weights, parts = weights * there, parts * there
    activations = codes * (largest.double() / 127)
    product, sizes = "ngk,ogk->nog", (activations.abs(), parts)
    return torch.einsum(product, activations, weights), torch.einsum(product, *sizes)


@pytest.mark.parametrize(("form", "shape"), SHAPES, ids=str)
def test_products_are_float64s(form: Form, shape: tuple[int, int], level: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        packed, rows, bias = made(form_of(form, shape, dtype))
        for count in (1, 2, 3, 7):
            x = inputs(count, shape[1], dtype)
            sums, sizes = exact_products(x, rows, packed.form)
            right, most = sums.sum(-1) + bias, sizes.sum(-1) + bias.abs()
            assert ((packed(x).double() - right).abs() / most).max() < 2e-6, (dtype, count)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_level_has_the_same_bits(form: Form, at_level: Callable[[str], AbstractContextManager[None]]) -> None:
    for out in (torch.float32, torch.bfloat16):
        packed, _, _ = made(form_of(form, (70, 600), torch.bfloat16, out))
        for count in (*range(1, 14), 70):
            x = inputs(count, 600, torch.bfloat16)
            found = []
            for name in HERE:
                with at_level(name):
                    found.append(packed(x))
            assert all(torch.equal(found[0], each) for each in found), (out, count)


@pytest.mark.parametrize("form", [(4, 32, "none"), (4, 64, "zeros"), (8, 16, "none"), (8, 32, "offsets")], ids=str)
def test_a_row_has_the_same_bits_in_any_company(form: Form, level: str) -> None:
    for shape in ((100, 70), (20, 2304)):
        packed, _, _ = made(form_of(form, shape, torch.bfloat16))
        row = inputs(1, shape[1], torch.bfloat16)
        alone = packed(row)
        for rows in (*range(1, 20), 64, 127, 128):
            company = inputs(rows, shape[1], torch.bfloat16) * 10
            at = rows * 2 // 3
            company[at] = row[0]
            assert torch.equal(packed(company)[at], alone[0]), (shape, rows)


def test_threads_change_no_bit(level: str, by_threads: ByThreads) -> None:
    packed, _, _ = made(GroupedFormat(200, 1000, 32, False, torch.bfloat16, torch.bfloat16))
    x = inputs(9, 1000, torch.bfloat16)
    found = by_threads(lambda: packed(x))
    assert all(torch.equal(found[0], each) for each in found)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_piece_by_piece_is_packed_whole(kind: str) -> None:
    form = form_of((4, 32, kind), (40, 100), torch.float32)
    whole, rows, _ = made(form)
    pieces = GroupedMatmul(form, None, HugePageArena())
    for begin, end in ((24, 40), (0, 7), (7, 24)):
        pieces.pack(begin, GroupedRows(*(None if part is None else part[begin:end] for part in rows)))
    assert torch.equal(whole.lines, pieces.lines)
    assert torch.equal(whole.factors, pieces.factors)


def test_inputs_may_come_in_another_order(level: str) -> None:
    form = GroupedFormat(20, 100, 32, False, torch.bfloat16, torch.float32)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(2))
    (plain, _, _), (ordered, _, _) = made(form), made(form, order)
    x = inputs(4, 100, torch.bfloat16)
    assert torch.equal(ordered(x), plain(x[:, order]))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_largest_sums_stay_exact(form: Form, level: str) -> None:
    """Of the largest weights and activations, of either sign."""
    bits, size, kind = form
    packed = GroupedMatmul(form_of(form, (16, 2 * size), torch.float32), None, HugePageArena())
    weights = torch.full((16, 2 * size), (1 << bits) - 1, dtype=torch.uint8)
    points = torch.zeros(16, 2, dtype=torch.uint8) if kind == "zeros" else None
    offsets = torch.full((16, 2), -3.0) if kind == "offsets" else None
    packed.pack(0, GroupedRows(weights, torch.ones(16, 2), points, offsets))
    each = (1 << bits) - 1 + {"zeros": 0, "offsets": 3, "none": -(1 << (bits - 1))}[kind]
    for sign in (1, -1):
        for rows in (1, 2, 6):
            found = packed(torch.full((rows, 2 * size), 127.0 * sign))
            assert torch.equal(found, torch.full((rows, 16), 127.0 * sign * each * 2 * size))


@pytest.mark.parametrize("size", [2.0**-100, 2.0**-10, 2.0**100])
def test_scales_of_any_size_keep_their_precision(size: float, level: str) -> None:
    form = GroupedFormat(3, 64, 32, False, torch.float32, torch.float32)
    packed, scales = GroupedMatmul(form, None, HugePageArena()), torch.tensor([[1.0, 1025 * 2.0**-30]] * 3) * size
    packed.pack(0, GroupedRows(torch.full((3, 64), 9, dtype=torch.uint8), scales))
    small = torch.zeros(1, 64)
    small[0, 40] = 127
    assert torch.equal(packed(torch.full((1, 64), 127.0))[0], (127 * 32 * scales.double().sum(1)).float())
    assert torch.equal(packed(small)[0], 127 * scales[:, 1])


def test_what_is_no_number_shows(level: str) -> None:
    packed, rows, _ = made(GroupedFormat(20, 100, 32, False, torch.bfloat16, torch.float32))
    x = inputs(3, 100, torch.bfloat16)
    right = packed(x)
    for broken in (float("nan"), float("inf")):
        x[1, 97] = broken
        found = packed(x)
        assert not found[1].isfinite().any()
        assert torch.equal(found[::2], right[::2])
    rows.scales[4, 1] = float("nan")
    again = GroupedMatmul(packed.form, None, HugePageArena())
    again.pack(0, rows)
    assert again(inputs(1, 100, torch.bfloat16)).isnan()[0].nonzero().tolist() == [[4]]


def test_rows_of_zeros_are_the_bias_and_no_rows_no_results(level: str) -> None:
    packed, _, bias = made(GroupedFormat(20, 100, 64, True, torch.bfloat16, torch.float32))
    assert torch.equal(packed(torch.zeros(2, 100).bfloat16())[1], bias)
    assert packed(torch.zeros(0, 100).bfloat16()).shape == (0, 20)


FLOAT4_SHAPES = [(100, 70), (40, 2300)]


def floats_and_codes(shape: tuple[int, int], size: int, x: torch.dtype) -> tuple[GroupedMatmul, GroupedMatmul]:
    """One matrix in floats of four bits, all of which are there, and in codes of eight."""
    form = GroupedFormat(*shape, size, False, x, x, floats=True)
    rows, bias = weights_for(form), torch.linspace(-1, 1, shape[0])
    small = GroupedMatmul(form, bias, HugePageArena())
    small.pack(0, rows)
    wide = GroupedMatmul(form._replace(bits=8, floats=False), bias, HugePageArena())
    wide.pack(0, rows._replace(weights=FLOAT4_CODES[rows.weights.int()]))
    return small, wide


@pytest.mark.parametrize("size", GROUP_SIZES[4])
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16], ids=str)
def test_floats_of_four_bits_have_the_bits_of_codes_of_eight(x: torch.dtype, size: int, level: str) -> None:
    """Also where every activation and weight is as large as they get."""
    for shape in FLOAT4_SHAPES:
        small, wide = floats_and_codes(shape, size, x)
        assert small.form.line_bytes < 0.56 * wide.form.line_bytes
        for count in (1, 2, 5, 7, 13):
            some = inputs(count, shape[1], x)
            for rows in (some, torch.ones_like(some), some.sign()):
                assert torch.equal(small(rows), wide(rows)), (shape, count)


def test_floats_of_four_bits_that_are_all_the_largest(level: str) -> None:
    for code, number in ((7, 12.0), (15, -12.0)):
        form = GroupedFormat(17, 96, 32, False, torch.float32, torch.float32, floats=True)
        product = GroupedMatmul(form, None, HugePageArena())
        product.pack(0, GroupedRows(torch.full((17, 96), code, dtype=torch.uint8), torch.ones(17, 3)))
        x = torch.full((7, 96), 127.0)
        assert torch.equal(product(x), torch.full((7, 17), 96 * 127 * number))
        assert torch.equal(product(-x), torch.full((7, 17), -96 * 127 * number))


def test_codes_of_floats_of_four_bits_come_back() -> None:
    """Of zero there are two, which are alike."""
    expected = torch.arange(16, dtype=torch.uint8)
    expected[8] = 0
    assert torch.equal(as_float4(FLOAT4_CODES), expected)
