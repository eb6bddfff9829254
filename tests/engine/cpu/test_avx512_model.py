"""Products of AVX-512, compiled against a model of its instructions in plain C: proved where no processor
has them."""

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from charonia.engine.cpu import library
from charonia.engine.cpu.matmul import MatmulFormat, PackedMatmul
from charonia.engine.cpu.memory import HugePageArena
from tests.engine.cpu import test_elementwise, test_experts, test_recurrent
from tests.engine.cpu.conftest import HERE, ByThreads, run_at_level
from tests.engine.cpu.test_matmul_grouped import FLOAT4_SHAPES, FORMS, floats_and_codes, form_of, inputs, made
from tests.engine.cpu.test_tiles import SMALL

pytestmark = [
    pytest.mark.skipif(
        library.level() is None or shutil.which("gcc") is None or platform.machine() != "x86_64",
        reason="no C extension, no gcc, or another processor's instructions",
    ),
    *([pytest.mark.proof] if library.level() in ("avx512bf16", "amx") else []),  # the instructions themselves are here
]

FLAGS = "-shared -fPIC -std=gnu11 -Og -ffp-contract=fast -fopenmp -fvisibility=hidden -Wall -Wno-psabi -Werror"
SOURCES = (
    "convolution.c",
    "elementwise.c",
    "experts.c",
    "gguf_blocks.c",
    "matmul.c",
    "matmul_avx512.c",
    "matmul_avx512core.c",
    "matmul_pack.c",
    "recurrence.c",
)

ROWS = range(1, 14)


def grouped_products() -> Iterator[torch.Tensor]:
    for form in FORMS:
        product, _, _ = made(form_of(form, (70, 600), torch.bfloat16, torch.bfloat16 if form[2] else torch.float32))
        yield from (product(inputs(rows, 600, torch.bfloat16)) for rows in ROWS)


def float4_products() -> Iterator[torch.Tensor]:
    for shape in FLOAT4_SHAPES:
        product, _ = floats_and_codes(shape, 32, torch.bfloat16)
        yield from (product(inputs(rows, shape[1], torch.bfloat16)) for rows in ROWS)


def int8_products() -> Iterator[torch.Tensor]:
    for out in (torch.float32, torch.bfloat16):
        form = MatmulFormat(70, 1003, torch.int8, torch.bfloat16, out)
        product = PackedMatmul(form, torch.arange(70.0), HugePageArena())
        product.pack(0, inputs(70, 1003, torch.bfloat16))
        yield from (product(inputs(rows, form.inputs, form.x)) for rows in ROWS)


def float_products() -> Iterator[torch.Tensor]:
    """Of as many rows as a whole tile and each smaller one beside it; fp32 in more than one chunk."""
    for kept in (torch.float32, torch.bfloat16):
        product = PackedMatmul(MatmulFormat(70, 1403, kept, kept, torch.float32), torch.arange(70.0), HugePageArena())
        product.pack(0, inputs(70, 1403, kept))
        yield from (product(inputs(rows, 1403, kept)) for rows in range(1, 19))


@pytest.fixture(scope="module")
def of_avx2() -> list[torch.Tensor]:
    if "avx2" not in HERE:
        pytest.skip("products of floats have the same bits in vectors alone")
    with run_at_level("avx2"):
        return list(float_products())


@pytest.fixture(scope="module")
def of_this_machine() -> list[torch.Tensor]:
    return [*grouped_products(), *float4_products(), *int8_products()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    shared_object = str(tmp_path_factory.mktemp("avx512") / "it.so")
    ours, theirs = Path(__file__).parent, Path(library.__file__).parent
    sources = [*(str(theirs / name) for name in SOURCES), str(ours / "avx512_model.c")]
    named = '-DCHARONIA_AVX512_MODEL="avx512_model.h"'
    asked = ["gcc", *FLAGS.split(), SMALL, named, f"-I{theirs}", f"-I{ours}", *sources, "-lm", "-o", shared_object]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return ctypes.CDLL(shared_object)


@pytest.fixture
def model(built: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are the model's."""
    monkeypatch.setattr(library, "_open_library", lambda: built)
    library.bind_function.cache_clear()
    library.bind_function("charonia_limit")(library.LEVELS.index("avx512bf16"))
    assert library.level() == "avx512bf16"
    yield
    library.bind_function.cache_clear()


@pytest.mark.parametrize("name", ["avx512core", "avx512bf16"])
def test_integer_products_have_this_machines_bits(of_this_machine: list[torch.Tensor], model: None, name: str) -> None:
    library.bind_function("charonia_limit")(library.LEVELS.index(name))
    found = [*grouped_products(), *float4_products(), *int8_products()]
    assert [torch.equal(one, other) for one, other in zip(found, of_this_machine, strict=True)] == [True] * len(found)


def test_float_products_without_vnni_have_the_bits_of_avx2(of_avx2: list[torch.Tensor], model: None) -> None:
    """Each output is summed in the order of its inputs, with products fused, however many rows a tile has."""
    library.bind_function("charonia_limit")(library.LEVELS.index("avx512core"))
    found = list(float_products())
    assert [torch.equal(one, other) for one, other in zip(found, of_avx2, strict=True)] == [True] * len(found)


@pytest.mark.parametrize("dtype", test_recurrent.DTYPES, ids=str)
def test_layers_with_a_state_are_right_in_vectors_of_16(model: None, dtype: torch.dtype) -> None:
    for layer in test_recurrent.LAYERS:
        test_recurrent.test_results_and_states_are_right("", layer, dtype)
        test_recurrent.test_the_same_bits_wherever_a_sequence_is_cut("", layer, dtype)
        test_recurrent.test_a_saved_state_is_taken_up_by_others("", layer, dtype)


@pytest.mark.parametrize("dtype", test_recurrent.DTYPES, ids=str)
def test_what_stands_between_products_is_right_too(model: None, dtype: torch.dtype) -> None:
    for size in (1, 17, 100):
        test_recurrent.test_gated_norms("", size, dtype)
        test_elementwise.test_norm("", size, dtype)
        test_elementwise.test_gate("", size, dtype, "silu")


def test_mixtures_of_experts_are_right_too(model: None, by_threads: ByThreads) -> None:
    """Between products: those of floats are not the model's."""
    for routing in (test_experts.LIKELY, test_experts.JUDGED):
        test_experts.test_a_mixture(torch.bfloat16, "mixed", routing, by_threads)
