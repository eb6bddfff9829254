"""The kernels of AMX, compiled against a model of its instructions in plain C: proved where no processor has them."""

import ctypes
import errno
import mmap
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from charonia.engine.cpu import library
from charonia.engine.cpu.matmul import MatmulFormat, PackedMatmul
from charonia.engine.cpu.memory import HugePageArena
from tests.engine.cpu.conftest import ByThreads
from tests.engine.cpu.test_matmul_grouped import FORMS, form_of, made

pytestmark = pytest.mark.skipif(
    library.level() is None or shutil.which("gcc") is None or "amx" not in library.LEVELS,
    reason="no C extension, no gcc, or another kind of processor",
)

FLAGS = "-std=gnu11 -fPIC -fopenmp -fvisibility=hidden -ffp-contract=fast -Wall -Wno-psabi -Werror"
SMALL = "-Dalways_inline=unused"
"""Helpers are functions, not copied to where they are called: compiling that takes several times as long."""
MODEL = '-DCHARONIA_TILE_MODEL="tile_model.h"'
SOURCES = ("level.c", "matmul.c", "matmul_pack.c")
OURS, THEIRS = Path(__file__).parent, Path(library.__file__).parent

TRAPS = pytest.mark.skipif(
    library.level() not in ("avx2", "avx512core"), reason="has VNNI, and maybe tiles, or no AVX2"
)
"""Where the kernels' vectors run and their tile instructions trap."""


class TileModel(NamedTuple):
    """The library of the modelled level."""

    library: ctypes.CDLL

    def number(self, name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self.library, name)

    def count(self, name: str) -> int:
        return ctypes.c_int64.in_dll(self.library, name).value


def compiled(into: Path, *asked: str) -> Path:
    done = subprocess.run(
        ["gcc", *FLAGS.split(), f"-I{THEIRS}", f"-I{OURS}", *asked, "-lm", "-o", str(into)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return into


def trapping(directory: Path) -> list[str]:
    """The kernels as they are shipped, but for vectors of AVX2 in place of AVX-512; and what their traps do."""
    for path in (*THEIRS.glob("*.h"), *THEIRS.glob("*.inc"), THEIRS / "matmul_amx.c"):
        (directory / path.name).write_text(re.sub(r"avx512[a-z0-9]*,(?=.*amx-tile)", "", path.read_text()))
    shipped = ("-c", "-O3", "-fno-math-errno", "-fno-trapping-math")
    kernels = compiled(directory / "kernels.o", *shipped, str(directory / "matmul_amx.c"))
    return [str(kernels), str(OURS / "tile_trap.c")]


@pytest.fixture(scope="module", params=["modelled", pytest.param("trapped", marks=[pytest.mark.proof, TRAPS])])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TileModel:
    """The kernels, whose tile instructions are functions of the model; or the compiler's, each of which traps."""
    directory = tmp_path_factory.mktemp("model")
    sources = [*(str(THEIRS / name) for name in SOURCES), str(OURS / "tile_model.c")]
    kernels = [str(THEIRS / "matmul_amx.c")] if request.param == "modelled" else trapping(directory)
    return TileModel(
        ctypes.CDLL(str(compiled(directory / "tiles.so", "-shared", "-O2", SMALL, MODEL, *sources, *kernels)))
    )


@pytest.fixture
def tiles(model: TileModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[TileModel]:
    """Products are the model's. When they are done, every thread has given its registers back."""
    before = model.count("tile_products")
    monkeypatch.setattr(library, "_open_library", lambda: model.library)
    library.bind_function.cache_clear()
    model.library.charonia_limit(library.LEVELS.index("amx"))
    assert library.level() == "amx"
    yield model
    library.bind_function.cache_clear()
    assert model.count("tile_users") == 0
    assert model.count("tile_products") > before


def rows_of(count: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).to(dtype)


def packed(shape: tuple[int, int], kept: torch.dtype, x: torch.dtype, out: torch.dtype = torch.float32) -> PackedMatmul:
    generator = torch.Generator().manual_seed(sum(shape))
    weight, bias = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
    product = PackedMatmul(MatmulFormat(*shape, kept, x, out), bias, HugePageArena())
    product.pack(0, weight)
    return product


FEW, MANY = (1, 2, 15, 16, 17, 31, 32), (33, 63, 65, 130, 300)
"""Rows that are one tile, in one block or two; and rows that are some tiles, which may overlap, in one round or two."""

INT8 = [
    ((896, 128), torch.bfloat16, torch.float32, (*FEW, *MANY)),
    ((100, 70), torch.float32, torch.bfloat16, (*FEW, *MANY)),
    ((1, 1), torch.bfloat16, torch.float32, (1, 40)),
    ((17, 3), torch.bfloat16, torch.bfloat16, (5, 70)),
    ((33, 10400), torch.float32, torch.float32, (7, 33)),
    ((40, 16700), torch.bfloat16, torch.bfloat16, (3,)),
]
"""Shapes with groups, steps and chunks that are whole and that are not; types of rows and results; numbers of rows."""


@pytest.fixture(scope="module")
def other_levels() -> list[torch.Tensor]:
    """INT8's products at the best level of this machine."""
    return [product for case in INT8 for product in int8_products(*case)]


def int8_products(
    shape: tuple[int, int], x: torch.dtype, out: torch.dtype, counts: tuple[int, ...]
) -> Iterator[torch.Tensor]:
    product = packed(shape, torch.int8, x, out)
    return (product(rows_of(count, shape[1], x)) for count in counts)


def test_products_of_int8_are_other_levels_bits(other_levels: list[torch.Tensor], tiles: TileModel) -> None:
    ours = [product for case in INT8 for product in int8_products(*case)]
    assert [torch.equal(one, other) for one, other in zip(ours, other_levels, strict=True)] == [True] * len(ours)


def int4_products() -> Iterator[torch.Tensor]:
    """Of matrices in one chunk and in some, by rows in one block and in some. Up to fifteen rows need no tiles, in
    short spans up to thirty-one."""
    for form in (each for each in FORMS if each[0] == 4):
        dtypes = (torch.bfloat16, torch.float32)
        few = (16, 17) if form[1] == 128 else ()
        for shape, counts in (((70, 333), (*few, 32, 33, 300)), ((40, 6000), (40,))):
            product, _, _ = made(form_of(form, shape, *(dtypes if form[2] == "none" else reversed(dtypes))))
            yield from (product(rows_of(count, shape[1], product.form.x)) for count in counts)


@pytest.fixture(scope="module")
def int4_elsewhere() -> list[torch.Tensor]:
    return list(int4_products())


def test_products_of_int4_are_other_levels_bits(int4_elsewhere: list[torch.Tensor], tiles: TileModel) -> None:
    ours = list(int4_products())
    assert [torch.equal(one, other) for one, other in zip(ours, int4_elsewhere, strict=True)] == [True] * len(ours)


def documented(x: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """x W^T in the order of tdpbf16ps, flushed at each step. Exact in float64 before each rounding to float32, if no
    two numbers that are added lie further apart than its bits reach."""
    steps = -(-x.shape[1] // 32)
    wide = [np.zeros((len(each), steps * 32)) for each in (x, weight)]
    for padded, each in zip(wide, (x, weight), strict=True):
        padded[:, : each.shape[1]] = flushed(each.float().numpy())
    sums = np.zeros((len(x), len(weight)), np.float32)
    for at in range(0, steps * 32, 32):
        parts = [np.zeros_like(sums), np.zeros_like(sums)]
        for k in range(32):
            product = wide[0][:, None, at + k] * wide[1][None, :, at + k]
            parts[k % 2] = flushed((parts[k % 2] + product).astype(np.float32))
        sums = flushed(sums + flushed(parts[0] + parts[1]))
    return sums


def flushed(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, 0 * values, values)


def short_numbers(rows: int, columns: int, scale: float) -> torch.Tensor:
    """Whole numbers of seven bits, shifted by up to eight, times `scale`: float64 holds sums of their products."""
    generator = torch.Generator().manual_seed(rows + columns)
    whole = torch.randint(-127, 128, (rows, columns), generator=generator)
    return (whole * 2.0 ** -torch.randint(0, 9, (rows, columns), generator=generator) * scale).bfloat16()


@pytest.mark.parametrize("scale", [1, 2.0**-123], ids=["ordinary", "hardly normal"])
@pytest.mark.parametrize("inputs", [896, 71, 5300], ids=str)
def test_products_of_bf16_have_the_documented_order(inputs: int, scale: float, tiles: TileModel) -> None:
    weight = short_numbers(20, inputs, 1)
    product = PackedMatmul(
        MatmulFormat(20, inputs, torch.bfloat16, torch.bfloat16, torch.float32), None, HugePageArena()
    )
    product.pack(0, weight)
    for rows in (3, 36):
        x = short_numbers(rows, inputs, scale)
        found, right = product(x), torch.from_numpy(documented(x, weight))
        assert torch.equal(found, right), rows
        assert right.count_nonzero() > right.numel() / 2
        ascending = (x.double() @ weight.double().T).float()
        assert not torch.equal(found, ascending), "sums that any order rounds alike prove nothing"


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.int8], ids=str)
def test_a_row_on_tiles_has_the_same_bits_in_any_company(kept: torch.dtype, tiles: TileModel) -> None:
    for shape, counts in (((40, 134), (*range(1, 71), 255, 257, 300)), ((33, 5190), (32, 33, 70))):
        product = packed(shape, kept, torch.bfloat16)
        row = rows_of(1, shape[1], torch.bfloat16)
        alone = product(row)
        for rows in counts:
            company = rows_of(rows, shape[1], torch.bfloat16) * 10
            for at in {rows // 3, rows - 1}:
                company[at] = row[0]
            found = product(company)
            assert torch.equal(found[rows // 3], alone[0]), (shape, rows)
            assert torch.equal(found[-1], alone[0]), (shape, rows)


def test_threads_with_tiles_change_no_bit(tiles: TileModel, by_threads: ByThreads) -> None:
    found = by_threads(lambda: packed((700, 500), torch.bfloat16, torch.bfloat16)(rows_of(40, 500, torch.bfloat16)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.int8], ids=str)
def test_what_is_no_number_stays_in_its_row_of_a_tile(kept: torch.dtype, tiles: TileModel) -> None:
    product, x = packed((20, 30), kept, torch.bfloat16), rows_of(36, 30, torch.bfloat16)
    right = product(x)
    x[1, 7] = float("nan")
    found = product(x)
    assert found[1].isnan().all()
    assert torch.equal(found[2:], right[2:])


def before_a_wall(values: torch.Tensor) -> torch.Tensor:
    """The values at the end of a page; whoever reads the next one ends this process."""
    size = values.numel() * values.element_size()
    pages = mmap.mmap(-1, (size // mmap.PAGESIZE + 2) * mmap.PAGESIZE)
    room = len(pages) - mmap.PAGESIZE
    wall = ctypes.addressof(ctypes.c_char.from_buffer(pages, room))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(wall), mmap.PAGESIZE, 0) == 0
    kept = torch.frombuffer(pages, dtype=values.dtype, count=values.numel(), offset=room - size).view(values.shape)
    return kept.copy_(values)


def test_nothing_is_read_behind_the_rows(tiles: TileModel) -> None:
    """Rows that are read as they lie, and rows that end within a tile's."""
    for inputs in (96, 90):
        for rows in (1, 17, 33, 300):
            x = rows_of(rows, inputs, torch.bfloat16)
            product = packed((40, inputs), torch.bfloat16, torch.bfloat16)
            assert torch.equal(product(before_a_wall(x)), product(x))


@pytest.fixture
def detection(model: TileModel) -> Iterator[TileModel]:
    yield model
    for name, value in (("tile_model_promises", 1), ("tile_model_denies", 0)):
        model.number(name).value = value


def test_tiles_are_asked_for_only_where_they_would_be_used(detection: TileModel) -> None:
    limit, asked = detection.library.charonia_limit, detection.number("tile_model_asked")
    before = asked.value
    assert limit(library.LEVELS.index("avx512bf16")) < library.LEVELS.index("amx")
    detection.number("tile_model_promises").value = 0
    assert limit(library.LEVELS.index("amx")) < library.LEVELS.index("amx")
    assert asked.value == before
    detection.number("tile_model_promises").value = 1
    assert limit(library.LEVELS.index("amx")) == library.LEVELS.index("amx")
    assert asked.value == before + 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [(errno.EOPNOTSUPP, "Operation not supported"), (errno.ENOSPC, "a thread's signal stack is too small")],
)
def test_a_system_that_denies_tiles_is_served_by_the_level_below(
    error: int, reason: str, detection: TileModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = library.level()
    below = "avx512bf16" if best == "amx" else best
    detection.number("tile_model_denies").value = error
    monkeypatch.setattr(library, "_open_library", lambda: detection.library)
    library.bind_function.cache_clear()
    try:
        library.bind_function("charonia_limit")(library.LEVELS.index("amx"))
        assert library.level() == below
        assert library.describe() == (
            f"C kernels at level {below}; the processor has AMX, the system does not let this process use it ({reason})"
        )
    finally:
        library.bind_function.cache_clear()
