"""The integer products of AVX-512, compiled against a model of its instructions in plain C: proved where no processor
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
from tests.engine.cpu.test_matmul_grouped import FORMS, form_of, inputs, made

pytestmark = pytest.mark.skipif(
    library.level() is None or shutil.which("gcc") is None or platform.machine() != "x86_64",
    reason="no C extension, no gcc, or another processor's instructions",
)

FLAGS = "-shared -fPIC -std=gnu11 -Og -ffp-contract=fast -fopenmp -fvisibility=hidden -Wall -Wno-psabi -Werror"
SOURCES = ("matmul.c", "matmul_avx512.c", "matmul_pack.c")

ROWS = range(1, 14)


def grouped_products() -> Iterator[torch.Tensor]:
    for form in FORMS:
        product, _, _ = made(form_of(form, (70, 600), torch.bfloat16, torch.bfloat16 if form[2] else torch.float32))
        yield from (product(inputs(rows, 600, torch.bfloat16)) for rows in ROWS)


def int8_products() -> Iterator[torch.Tensor]:
    for out in (torch.float32, torch.bfloat16):
        form = MatmulFormat(70, 1003, torch.int8, torch.bfloat16, out)
        product = PackedMatmul(form, torch.arange(70.0), HugePageArena())
        product.pack(0, inputs(70, 1003, torch.bfloat16))
        yield from (product(inputs(rows, form.inputs, form.x)) for rows in ROWS)


@pytest.fixture(scope="module")
def of_this_machine() -> list[torch.Tensor]:
    return [*grouped_products(), *int8_products()]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products are the model's."""
    ours, theirs = Path(__file__).parent, Path(library.__file__).parent
    sources = [*(str(theirs / name) for name in SOURCES), str(ours / "avx512_model.c")]
    named = '-DCHARONIA_AVX512_MODEL="avx512_model.h"'
    asked = ["gcc", *FLAGS.split(), named, f"-I{theirs}", f"-I{ours}", *sources, "-lm", "-o", str(tmp_path / "it.so")]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    built = ctypes.CDLL(str(tmp_path / "it.so"))
    monkeypatch.setattr(library, "_open_library", lambda: built)
    library.bind_function.cache_clear()
    assert library.level() == "avx512bf16"
    yield
    library.bind_function.cache_clear()


def test_integer_products_have_this_machines_bits(of_this_machine: list[torch.Tensor], model: None) -> None:
    found = [*grouped_products(), *int8_products()]
    assert [torch.equal(one, other) for one, other in zip(found, of_this_machine, strict=True)] == [True] * len(found)
