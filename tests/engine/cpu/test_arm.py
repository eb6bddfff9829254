"""The kernels for Linux on Arm, run under an emulator: proved where there is no such processor."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch

from charonia.engine.cpu import library
from charonia.engine.cpu.elementwise import ACTIVATION_CODES
from charonia.engine.cpu.matmul import MatmulFormat, PackedMatmul
from charonia.engine.cpu.memory import HugePageArena
from tests.engine.cpu import test_argmax, test_elementwise, test_recurrent
from tests.engine.cpu.emulator import IS_HERE, EmulatedLibrary, build_kernels
from tests.engine.cpu.test_matmul_grouped import FORMS, Form, floats_and_codes, form_of, inputs, made
from tests.engine.cpu.test_tiles import flushed, short_numbers

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(
        library.level() is None or not IS_HERE, reason="no C extension, no compiler for Arm, or no emulator of it"
    ),
]

LEVELS = ("portable", *library.LEVELS_OF["aarch64"])

Emulate: TypeAlias = Callable[[str], None]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_kernels(tmp_path_factory.mktemp("arm"))


@pytest.fixture(scope="module")
def emulated(program: Path) -> Iterator[EmulatedLibrary]:
    started = EmulatedLibrary(program)
    yield started
    started.close()


@pytest.fixture
def emulate(emulated: EmulatedLibrary, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulate]:
    """Call with a level: from then on kernels are the emulator's."""

    def use(level: str) -> None:
        monkeypatch.setattr(library, "_open_library", lambda: emulated)
        monkeypatch.setattr(library, "LEVELS", LEVELS)
        library.bind_function.cache_clear()
        library.use_level(level)
        assert library.level() == level

    yield use
    library.bind_function.cache_clear()


@pytest.mark.parametrize(
    ("processor", "level"), [("cortex-a72", "portable"), ("neoverse-n1", "dotprod"), ("max", "bfmmla")]
)
def test_the_best_level_of_a_processor_is_in_use(program: Path, processor: str, level: str) -> None:
    started = EmulatedLibrary(program, processor)
    assert LEVELS[started["charonia_level"]()] == level
    started.close()


def integer_products(forms: list[Form], counts: tuple[int, ...]) -> list[torch.Tensor]:
    """Of matrices in one chunk and in some, whose inputs are whole spans and pairs of steps or not; of rows in one
    block and in two."""
    return [*grouped_products(forms, counts), *float4_products(counts), *int8_products(counts)]


def grouped_products(forms: list[Form], counts: tuple[int, ...]) -> Iterator[torch.Tensor]:
    for form in forms:
        x, out = (torch.bfloat16, torch.float32) if form[0] == 4 else (torch.float32, torch.bfloat16)
        product, _, _ = made(form_of(form, (40, 2600 if form[1] == 32 else 200), x, out))
        yield from (product(inputs(count, product.form.inputs, x)) for count in counts)


def float4_products(counts: tuple[int, ...]) -> Iterator[torch.Tensor]:
    product, _ = floats_and_codes((40, 200), 32, torch.bfloat16)
    yield from (product(inputs(count, 200, torch.bfloat16)) for count in counts)


def int8_products(counts: tuple[int, ...]) -> Iterator[torch.Tensor]:
    for columns, out in ((1003, torch.float32), (70, torch.bfloat16), (6005, torch.float32)):
        form = MatmulFormat(40, columns, torch.int8, torch.bfloat16, out)
        product = PackedMatmul(form, torch.arange(40.0), HugePageArena())
        product.pack(0, inputs(40, columns, torch.bfloat16))
        yield from (product(inputs(count, columns, torch.bfloat16)) for count in counts)


SOME = [form for form in FORMS if form[:2] in ((4, 32), (8, 16))], (1, 2, 5, 6, 64)
ALL = FORMS, (*range(1, 14), 64, 130)


@pytest.mark.parametrize("level", LEVELS[:-1])
@pytest.mark.parametrize("cases", [SOME, ALL], ids=["some", "all"])
def test_integer_products_have_this_machines_bits(
    cases: tuple[list[Form], tuple[int, ...]], level: str, emulate: Emulate
) -> None:
    expected = integer_products(*cases)
    emulate(level)
    found = integer_products(*cases)
    assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * len(found)


def rounded_to_odd(values: np.ndarray) -> np.ndarray:
    """Cut off to float32, the last bit set where anything was lost; what is not normal is zero."""
    nearest = values.astype(np.float32)
    beyond = np.abs(nearest.astype(np.float64)) > np.abs(values)
    cut = np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)
    return flushed((cut.view(np.int32) | (cut.astype(np.float64) != values)).view(np.float32)).astype(np.float32)


def documented(x: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """x W^T in the order of bfmmla. Exact in float64 before each rounding, if no two numbers that are added lie further
    apart than its bits reach."""
    pairs = -(-x.shape[1] // 2)
    wide = [np.zeros((len(each), pairs * 2)) for each in (x, weight)]
    for padded, each in zip(wide, (x, weight), strict=True):
        padded[:, : each.shape[1]] = flushed(each.float().numpy())
    sums = np.zeros((len(x), len(weight)), np.float32)
    for at in range(0, pairs * 2, 2):
        first, then = (rounded_to_odd(wide[0][:, None, k] * wide[1][None, :, k]).astype(float) for k in (at, at + 1))
        sums = rounded_to_odd(sums.astype(float) + rounded_to_odd(first + then))
    return sums


@pytest.mark.parametrize(("columns", "scale"), [(96, 1), (71, 2.0**-123), (1301, 1)], ids=str)
def test_products_of_bf16_have_the_documented_order(columns: int, scale: float, emulate: Emulate) -> None:
    emulate("bfmmla")
    weight = short_numbers(20, columns, 1)
    form = MatmulFormat(20, columns, torch.bfloat16, torch.bfloat16, torch.float32)
    product = PackedMatmul(form, None, HugePageArena())
    product.pack(0, weight)
    for rows in (1, 3, 14):
        x = short_numbers(rows, columns, scale)
        found, right = product(x), torch.from_numpy(documented(x, weight))
        assert torch.equal(found, right), rows
        assert right.count_nonzero() > right.numel() / 2
    assert not torch.equal(found, (x.double() @ weight.double().T).float()), "sums that any order rounds alike"


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("level", LEVELS[::-1])
def test_a_row_has_the_same_bits_in_any_company(level: str, kept: torch.dtype, emulate: Emulate) -> None:
    emulate(level)
    for columns in (70, 2304):
        product = PackedMatmul(MatmulFormat(40, columns, kept, kept, torch.float32), None, HugePageArena())
        product.pack(0, inputs(40, columns, kept))
        row = inputs(1, columns, kept)
        alone = product(row)
        right = (row.double() @ inputs(40, columns, kept).double().T).float()
        assert torch.allclose(alone, right, rtol=1e-4, atol=1e-4)
        for rows in (2, 3, 4, 5, 6, 13, 64):
            company = inputs(rows, columns, kept) * 10
            company[rows * 2 // 3] = row[0]
            assert torch.equal(product(company)[rows * 2 // 3], alone[0]), (columns, rows)


@pytest.mark.parametrize("dtype", test_elementwise.DTYPES, ids=str)
def test_what_stands_between_products_is_right_too(dtype: torch.dtype, emulate: Emulate) -> None:
    emulate("bfmmla")
    for size in (3, 17, 100):
        test_elementwise.test_norm("", size, dtype)
        test_elementwise.test_norm_after_a_sum("", size, dtype)
        test_elementwise.test_soft_cap("", size, dtype)
        for activation in ACTIVATION_CODES:
            test_elementwise.test_gate("", size, dtype, activation)
    test_elementwise.test_turn("", 20, dtype)
    test_argmax.test_random_rows("", 2049, dtype)


@pytest.mark.parametrize("dtype", test_recurrent.DTYPES, ids=str)
def test_layers_with_a_state_are_right_too(dtype: torch.dtype, emulate: Emulate) -> None:
    emulate("bfmmla")
    for layer in test_recurrent.LAYERS:
        test_recurrent.test_results_and_states_are_right("", layer, dtype)
        test_recurrent.test_the_same_bits_wherever_a_sequence_is_cut("", layer, dtype)
        test_recurrent.test_a_saved_state_is_taken_up_by_others("", layer, dtype)
    for size in (1, 17, 64):
        test_recurrent.test_gated_norms("", size, dtype)
