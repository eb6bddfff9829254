"""Packed products against float64, at every level; and rows that do not notice each other."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from charonia.engine.cpu.matmul import MatmulFormat, PackedMatmul
from charonia.engine.cpu.memory import REGION_BYTES, HugePageArena
from tests.engine.cpu.conftest import HERE, ByThreads

SHAPES = [(896, 896), (64, 4864), (100, 70), (1, 1), (17, 3), (33, 2050)]
"""Outputs that are no whole groups, inputs that are no whole steps, and more inputs than one chunk."""

KEPT = [torch.float32, torch.bfloat16, torch.int8]


def made(
    shape: tuple[int, int], kept: torch.dtype, x: torch.dtype, *, bias: bool = True
) -> tuple[PackedMatmul, torch.Tensor]:
    """A product, and the weights and bias it stands for in float64, side by side."""
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=generator).to(x)
    added = torch.randn(shape[0], generator=generator) if bias else torch.zeros(shape[0])
    packed = PackedMatmul(MatmulFormat(*shape, kept, x, torch.float32), added if bias else None, HugePageArena())
    packed.pack(0, weight)
    exact = weight.double()
    if kept == torch.int8:
        scales = exact.abs().amax(1, keepdim=True) / 127
        exact = (exact / scales).round() * scales
    return packed, torch.cat((exact, added.double().unsqueeze(1)), 1)


def inputs(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_float64s(shape: tuple[int, int], kept: torch.dtype, level: str) -> None:
    for x_dtype in (torch.float32, torch.bfloat16) if kept == torch.int8 else (kept,):
        packed, exact = made(shape, kept, x_dtype)
        for rows in (1, 2, 3, 4, 6, 7, 31, 130):
            x = inputs(rows, shape[1], x_dtype)
            wide = x.double()
            if kept == torch.int8:
                scales = wide.abs().amax(1, keepdim=True) / 127
                wide = (wide / scales).round() * scales
            right = wide @ exact[:, :-1].T + exact[:, -1]
            size = wide.abs() @ exact[:, :-1].abs().T + exact[:, -1].abs()
            assert ((packed(x).double() - right).abs() / size).max() < TOLERANCE[kept], (rows, x_dtype)


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.int8: 2e-3}
"""Of the sum of all products' sizes. int8: a number at a half may be rounded to the other side, seldom."""


@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_a_row_has_the_same_bits_in_any_company(kept: torch.dtype, level: str) -> None:
    x_dtype = torch.bfloat16 if kept == torch.int8 else kept
    for shape in ((100, 70), (48, 2304)):
        packed, _ = made(shape, kept, x_dtype)
        row = inputs(1, shape[1], x_dtype)
        alone = packed(row)
        for rows in (*range(1, 20), 64, 127, 128, 253, 600):
            company = inputs(rows, shape[1], x_dtype) * 10
            at = rows * 2 // 3
            company[at] = row[0]
            assert torch.equal(packed(company)[at], alone[0]), (shape, rows)


def test_int8_has_the_same_bits_at_every_level(at_level: Callable[[str], AbstractContextManager[None]]) -> None:
    """With a bias, which is added after a rounding."""
    for columns in (70, 1003):
        found = []
        for name in HERE:
            with at_level(name):
                packed, _ = made((100, columns), torch.int8, torch.bfloat16)
                found.append([packed(inputs(rows, columns, torch.bfloat16)) for rows in (*range(1, 14), 70)])
        assert all(torch.equal(one, other) for each in found for one, other in zip(each, found[0], strict=True))


@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_threads_change_no_bit(kept: torch.dtype, level: str, by_threads: ByThreads) -> None:
    packed, _ = made((200, 1000), kept, torch.float32 if kept == torch.float32 else torch.bfloat16)
    x = inputs(9, 1000, packed.form.x)
    found = by_threads(lambda: packed(x))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_packed_piece_by_piece_is_packed_whole(kept: torch.dtype) -> None:
    """Pieces that end within a group, from columns of a wider matrix, in any dtype a checkpoint has."""
    wide = torch.randn(40, 90, generator=torch.Generator().manual_seed(1)).half()
    weight, x = wide[:, 10:77], inputs(5, 67, torch.float32 if kept == torch.float32 else torch.bfloat16)
    results = []
    for stored, cuts in ((torch.float16, (40,)), (torch.float32, (7, 20, 13)), (torch.float16, (16, 1, 23))):
        packed = PackedMatmul(MatmulFormat(40, 67, kept, x.dtype, x.dtype), None, HugePageArena())
        for first, rows in zip(
            (0, *torch.tensor(cuts).cumsum(0).tolist()), weight.to(stored).split(cuts), strict=False
        ):
            packed.pack(first, rows)
        results.append(packed(x))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_halves_are_read_exactly() -> None:
    """All of them: subnormals, both zeros, infinities; and what is no number stays none."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    packed = PackedMatmul(
        MatmulFormat(len(every), 1, torch.float32, torch.float32, torch.float32), None, HugePageArena()
    )
    packed.pack(0, every.unsqueeze(1))
    assert torch.equal(packed(torch.ones(1, 1))[0].nan_to_num(7), every.float().nan_to_num(7))


@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_what_is_no_number_shows(kept: torch.dtype, level: str) -> None:
    x_dtype = torch.bfloat16 if kept == torch.int8 else kept
    packed, _ = made((20, 30), kept, x_dtype)
    x = inputs(3, 30, x_dtype)
    right = packed(x)
    for broken in (float("nan"), float("inf")):
        x[1, 7] = broken
        found = packed(x)
        assert not found[1].isfinite().any()
        assert torch.equal(found[::2], right[::2])


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_zeros_are_the_bias(out: torch.dtype, level: str) -> None:
    bias = torch.randn(20)
    for kept in (torch.int8, torch.bfloat16):
        packed = PackedMatmul(MatmulFormat(20, 30, kept, torch.bfloat16, out), bias, HugePageArena())
        assert torch.equal(packed(torch.zeros(2, 30).bfloat16())[1], bias.to(out))


def test_no_rows_are_no_results(level: str) -> None:
    packed, _ = made((20, 30), torch.int8, torch.bfloat16)
    assert packed(torch.zeros(0, 30).bfloat16()).shape == (0, 20)


def test_rows_may_lie_apart(level: str) -> None:
    packed, _ = made((20, 30), torch.bfloat16, torch.bfloat16)
    wide = inputs(6, 64, torch.bfloat16)
    assert torch.equal(packed(wide[::2, 5:35]), packed(wide[::2, 5:35].contiguous()))


def test_memory_is_zeros_at_lines_and_lives_with_its_parts() -> None:
    memory = HugePageArena()
    parts = [memory.allocate(size) for size in (1, 100, REGION_BYTES + 1, 64)]
    assert [len(part) for part in parts] == [64, 128, REGION_BYTES + 64, 64]
    assert all(part.data_ptr() % 64 == 0 for part in parts)
    assert parts[0].data_ptr() != parts[1].data_ptr()
    assert not any(part.any() for part in parts)
    del memory
    parts[0].fill_(1)
    assert not parts[1].any()


UNEVEN = """
import sys
import torch
from charonia.engine.cpu import library
from charonia.engine.cpu.matmul import MatmulFormat, PackedMatmul
from charonia.engine.cpu.memory import HugePageArena

torch.set_num_threads(1)
for level in sys.argv[1:]:
    print(level, flush=True)
    library.bind_function("charonia_limit")(library.LEVELS.index(level))
    for kept, rows in ((torch.float32, 92), (torch.bfloat16, 92), (torch.int8, 142)):
        x = torch.float32 if kept == torch.float32 else torch.bfloat16
        packed = PackedMatmul(MatmulFormat(4400, 1700, kept, x, x), None, HugePageArena())
        company = torch.zeros(rows, 1700, dtype=x)
        for _ in range(3):
            packed(company)
"""


@pytest.mark.skipif(not HERE, reason="no C extension here")
def test_a_last_few_rows_stay_within_their_memory() -> None:
    """They sum more groups at once than those before them: the allocator ends a process that wrote too far."""
    checked = {"LD_PRELOAD": "libc_malloc_debug.so.0", "GLIBC_TUNABLES": "glibc.malloc.check=3"}
    asked = [sys.executable, "-c", UNEVEN, *HERE]
    done = subprocess.run(asked, env={**os.environ, **checked}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"at level {done.stdout.split()[-1:]}: {done.stderr}"
