"""Products with int4 weights: against exact sums, bit for bit alike at every level, and rows that do not notice each
other."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from charonia.engine.cpu.matmul_int4 import GROUP_SIZES, ZERO_POINT, Int4Format, Int4Matmul, Int4Rows
from charonia.engine.cpu.memory import HugePageArena
from tests.engine.cpu.conftest import HERE

SHAPES = [(200, 896), (64, 4864), (100, 70), (1, 1), (17, 33), (40, 1000)]
"""Outputs that are no whole lines, inputs that are no whole groups, and more inputs than one chunk."""

FORMS = [(size, zeros) for size in GROUP_SIZES for zeros in (False, True)]


def weights_for(form: Int4Format) -> Int4Rows:
    """Random weights; scales of all sizes, exact in eleven bits, some negative or zero."""
    generator = torch.Generator().manual_seed(form.inputs)
    codes = torch.randint(0, 16, (form.outputs, form.inputs), generator=generator, dtype=torch.uint8)
    scales = torch.randn(form.outputs, form.groups, generator=generator).bfloat16().float()
    scales *= 2.0 ** torch.randint(-6, 6, scales.shape, generator=generator)
    scales[:, ::7] = 0
    zeros = torch.randint(0, 17, scales.shape, generator=generator, dtype=torch.uint8)
    return Int4Rows(codes, scales, zeros if form.zero_points else None)


def made(form: Int4Format, order: torch.Tensor | None = None) -> tuple[Int4Matmul, Int4Rows, torch.Tensor]:
    rows, bias = weights_for(form), torch.randn(form.outputs, generator=torch.Generator().manual_seed(1))
    packed = Int4Matmul(form, bias, HugePageArena(), order)
    packed.pack(0, rows)
    return packed, rows, bias


def inputs(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def by_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """[N, inputs] -> [N, groups, size], zeros behind the last."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size))


def exact_products(x: torch.Tensor, rows: Int4Rows, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, outputs, groups]: the sum within each group in float64, activations quantised; and the sum of its sizes."""
    wide = by_groups(x.float(), size)
    largest = wide.abs().amax(-1, keepdim=True)
    by = torch.where(largest > 0, torch.tensor(127.0) / largest, 0.0)  # 127 / largest would multiply with the inverse
    codes = (wide * by).round().double()
    zeros = torch.full_like(rows.scales, ZERO_POINT) if rows.zeros is None else rows.zeros
    weights = by_groups(rows.weights.double(), size) - zeros.double().unsqueeze(-1)
    there = by_groups(torch.ones(1, x.shape[1], dtype=torch.float64), size)
    weights *= there * rows.scales.double().unsqueeze(-1)
    activations = codes * (largest.double() / 127)
    product, sizes = "ngk,ogk->nog", (activations.abs(), weights.abs())
    return torch.einsum(product, activations, weights), torch.einsum(product, *sizes)


@pytest.mark.parametrize(("size", "zeros"), FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_float64s(shape: tuple[int, int], size: int, zeros: bool, level: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        packed, rows, bias = made(Int4Format(*shape, size, zeros, dtype, torch.float32))
        for count in (1, 2, 3, 5, 33) if shape[0] < 64 else (1, 7):
            x = inputs(count, shape[1], dtype)
            sums, sizes = exact_products(x, rows, size)
            right, most = sums.sum(-1) + bias, sizes.sum(-1) + bias.abs()
            assert ((packed(x).double() - right).abs() / most).max() < 2e-6, (dtype, count)


@pytest.mark.parametrize(("size", "zeros"), FORMS)
def test_every_level_has_the_same_bits(
    size: int, zeros: bool, at_level: Callable[[str], AbstractContextManager[None]]
) -> None:
    for out in (torch.float32, torch.bfloat16):
        packed, _, _ = made(Int4Format(100, 1000, size, zeros, torch.bfloat16, out))
        for count in (*range(1, 14), 70):
            x = inputs(count, 1000, torch.bfloat16)
            found = []
            for name in HERE:
                with at_level(name):
                    found.append(packed(x))
            assert all(torch.equal(found[0], each) for each in found), (out, count)


@pytest.mark.parametrize("zeros", [False, True])
def test_a_row_has_the_same_bits_in_any_company(zeros: bool, level: str) -> None:
    for shape in ((100, 70), (48, 2304)):
        packed, _, _ = made(Int4Format(*shape, 32, zeros, torch.bfloat16, torch.float32))
        row = inputs(1, shape[1], torch.bfloat16)
        alone = packed(row)
        for rows in (*range(1, 20), 64, 127, 128, 253):
            company = inputs(rows, shape[1], torch.bfloat16) * 10
            at = rows * 2 // 3
            company[at] = row[0]
            assert torch.equal(packed(company)[at], alone[0]), (shape, rows)


def test_threads_change_no_bit(level: str) -> None:
    packed, _, _ = made(Int4Format(200, 1000, 32, False, torch.bfloat16, torch.bfloat16))
    x, before = inputs(9, 1000, torch.bfloat16), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(packed(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], each) for each in found)


@pytest.mark.parametrize("zeros", [False, True])
def test_packed_piece_by_piece_is_packed_whole(zeros: bool) -> None:
    form = Int4Format(40, 100, 32, zeros, torch.float32, torch.float32)
    whole, rows, _ = made(form)
    pieces = Int4Matmul(form, None, HugePageArena())
    for begin, end in ((24, 40), (0, 7), (7, 24)):
        pieces.pack(begin, Int4Rows(*(None if part is None else part[begin:end] for part in rows)))
    assert torch.equal(whole.lines, pieces.lines)
    assert torch.equal(whole.factors, pieces.factors)


def test_inputs_may_come_in_another_order(level: str) -> None:
    form = Int4Format(20, 100, 32, False, torch.bfloat16, torch.float32)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(2))
    (plain, _, _), (ordered, _, _) = made(form), made(form, order)
    x = inputs(4, 100, torch.bfloat16)
    assert torch.equal(ordered(x), plain(x[:, order]))


@pytest.mark.parametrize("size", [2.0**-100, 2.0**-10, 2.0**100])
def test_scales_of_any_size_keep_their_precision(size: float, level: str) -> None:
    form = Int4Format(3, 64, 32, False, torch.float32, torch.float32)
    packed, scales = Int4Matmul(form, None, HugePageArena()), torch.tensor([[1.0, 1025 * 2.0**-30]] * 3) * size
    packed.pack(0, Int4Rows(torch.full((3, 64), 9, dtype=torch.uint8), scales))
    small = torch.zeros(1, 64)
    small[0, 40] = 127
    assert torch.equal(packed(torch.full((1, 64), 127.0))[0], (127 * 32 * scales.double().sum(1)).float())
    assert torch.equal(packed(small)[0], 127 * scales[:, 1])


def test_what_is_no_number_shows(level: str) -> None:
    packed, rows, _ = made(Int4Format(20, 100, 32, False, torch.bfloat16, torch.float32))
    x = inputs(3, 100, torch.bfloat16)
    right = packed(x)
    for broken in (float("nan"), float("inf")):
        x[1, 97] = broken
        found = packed(x)
        assert not found[1].isfinite().any()
        assert torch.equal(found[::2], right[::2])
    rows.scales[4, 1] = float("nan")
    again = Int4Matmul(packed.form, None, HugePageArena())
    again.pack(0, rows)
    assert again(inputs(1, 100, torch.bfloat16)).isnan()[0].nonzero().tolist() == [[4]]


def test_rows_of_zeros_are_the_bias_and_no_rows_no_results(level: str) -> None:
    packed, _, bias = made(Int4Format(20, 100, 64, True, torch.bfloat16, torch.float32))
    assert torch.equal(packed(torch.zeros(2, 100).bfloat16())[1], bias)
    assert packed(torch.zeros(0, 100).bfloat16()).shape == (0, 20)
