"""Kernels of an installed package are compiled by a command: with a compiler that notes what it is asked."""

import sysconfig
import tomllib
from pathlib import Path

import pytest

from charonia.engine.cpu import build_kernels, compile_kernels
from charonia.engine.cpu.source_stamp import source_stamp


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cpu").mkdir()
    for name in ("b.c", "a.c", "a.h", "x.py"):
        (tmp_path / "cpu" / name).write_text(name)
    return tmp_path / "cpu"


def compiler(folder: Path, body: str) -> str:
    script = folder.parent / "cc"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return f"{script} -m64"


def test_the_library_takes_its_place_when_it_is_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'echo "$@" > "$0.said"; while [ "$1" != -o ]; do shift; done; echo built > "$2"'
    monkeypatch.setenv("CC", compiler(folder, body))
    library = compile_kernels.compile_kernels(folder)
    assert (library.name, library.read_text()) == (f"_native{sysconfig.get_config_var('EXT_SUFFIX')}", "built\n")
    said = (folder.parent / "cc.said").read_text().split()
    assert said[0] == "-m64"
    assert f'-DKERNEL_SOURCES="{source_stamp(folder)}"' in said
    assert said[-2:] == [str(folder / "a.c"), str(folder / "b.c")]
    assert {path.name for path in folder.iterdir()} == {"a.c", "b.c", "a.h", "x.py", library.name}


def test_a_compiler_that_fails_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_kernels, "__file__", str(folder / "compile_kernels.py"))
    for command, says in ((compiler(folder, "echo no omp >&2; exit 1"), "no omp"), ("/no/where/cc", "/no/where/cc")):
        monkeypatch.setenv("CC", command)
        assert compile_kernels.main() == 1
        told = capsys.readouterr().err
        assert says in told
        assert "apt-get install gcc" in told
        assert not list(folder.glob("_native*"))


def test_it_compiles_what_a_build_does(root: Path) -> None:
    build = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    [extension] = build["ext-modules"]
    assert tuple(extension["extra-compile-args"]) == compile_kernels.COMPILE_ARGUMENTS
    folder = root / "engine" / "cpu"
    assert {str(path.relative_to(root)) for path in folder.glob("*.c")} == set(extension["sources"])
    files = {path for kind in ("c", "h", "inc") for path in folder.glob(f"*.{kind}")}
    assert files == {path for pattern in build["package-data"]["charonia"] for path in root.glob(pattern)} & files
    assert compile_kernels.COMMAND in build_kernels.WITHOUT_KERNELS
