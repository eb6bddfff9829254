"""The seam to C: levels, the pool of threads, life without a library."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from charonia.core.errors import Internal
from charonia.engine import kernel_choice
from charonia.engine.cpu import library


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_a_level_is_in_use_where_it_was_asked_for(level: str) -> None:
    assert library.level() == level


def test_levels_end_with_their_block(level: str, at_level: Callable[[str], AbstractContextManager[None]]) -> None:
    with at_level("portable"):
        assert library.level() == "portable"
    assert library.level() == level


POOLS = """
import re, torch
from charonia.engine.cpu import library
library.bind_function("charonia_threads")
print(len({line.split()[-1] for line in open("/proc/self/maps") if re.search(r"/lib[gi]?omp[^/]*$", line.strip())}))
"""
"""Counts the OpenMP libraries of a process that computes; tests beside this one may bring others."""


@pytest.mark.skipif(library.level() is None, reason="no C extension here")
def test_threads_are_torch_s() -> None:
    """One OpenMP in the process, and torch's number of threads."""
    if Path("/proc/self/maps").exists():
        assert run(POOLS).split() == ["1"]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert library.bind_function("charonia_threads")() == 1
        torch.set_num_threads(2)
        assert library.bind_function("charonia_threads")() == 2
    finally:
        torch.set_num_threads(before)


SHOW = """
import os
from charonia.engine.cpu import library
for kernels in ("sse9", "portable", "none"):
    if not os.fork():
        os.environ["CHARONIA_KERNELS"] = kernels
        try:
            print(library.level(), library.describe(), sep="; ", flush=True)
        except ValueError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""
"""What processes of three settings say: one imports torch for all of them."""


@pytest.mark.skipif(library.level() is None, reason="no C extension here")
def test_the_environment_caps_the_level_where_it_is_one_and_leaves_no_kernels() -> None:
    unknown, capped, absent = run(SHOW).splitlines()
    assert unknown.startswith("CHARONIA_KERNELS must be none, triton or one of portable, ")
    assert capped == "portable; C kernels at level portable"
    assert absent.startswith("None; no C kernels (CHARONIA_KERNELS=none): torch computes")


@pytest.mark.skipif(library.level() is None, reason="no C extension here")
def test_every_signature_is_a_function() -> None:
    assert all(isinstance(library.bind_function(name), ctypes._CFuncPtr) for name in library.SIGNATURES)


def test_only_what_kernels_compute_is_served() -> None:
    assert not library.supports(torch.float16, torch.device("cpu"))
    assert not library.supports(torch.float32, torch.device("cuda"))
    assert library.supports(torch.bfloat16, torch.device("cpu")) == (library.level() is not None)


@pytest.mark.skipif(library.level() is None, reason="no C extension here")
def test_a_library_of_other_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the error says what builds it again. Without sources, as in a wheel, there is nothing to compare."""
    ours, copy = Path(library.__file__).parent, tmp_path / "cpu"
    copy.mkdir()
    for path in ours.iterdir():
        if path.suffix in {".c", ".h", ".inc", ".so"}:
            shutil.copy(path, copy)
    monkeypatch.setattr(kernel_choice, "__file__", str(tmp_path / "kernel_choice.py"))
    assert library._open_library.__wrapped__() is not None
    with (copy / "matmul.h").open("a") as header:
        header.write("\n")
    with pytest.raises(
        Internal, match=r"was built from other C sources .* make install, or `python -m .*compile_kernels`"
    ):
        library._open_library.__wrapped__()
    for path in copy.iterdir():
        if path.suffix != ".so":
            path.unlink()
    assert library._open_library.__wrapped__() is not None


def test_people_are_told_what_computes(level: str) -> None:
    assert library.describe() == f"C kernels at level {level}"
    with patch.object(library, "level", lambda: None):
        assert "for want of a compiler" in library.describe()
