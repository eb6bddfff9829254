"""The wheel holds everything: it runs where the tree is not."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import pytest


def files_that_ship(root: Path) -> list[str]:
    """Tracked and new files, as a build elsewhere would find them; a build in the tree would leave its own behind."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
    )
    return [n for n in listed.stdout.split() if not n.startswith(("tests/", "examples/")) and (root / n).is_file()]


def copied(root: Path, names: Iterable[str], source: Path) -> Path:
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, source / name)
    return source


def wheel_command(source: Path, into: Path) -> list[str]:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    return [*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(into), str(source)]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The machine's, that leaves out what takes long, for how fast the kernels are is not asked here (their helpers are
    functions, not copied to where they are called), and fails where gcc finds anything odd: a macro's variable once
    took the place of its caller's."""
    script, strict = tmp_path_factory.mktemp("cc") / "cc", "-Wall -Wno-psabi -Werror"
    warnings = strict if shutil.which("gcc") else ""
    script.write_text(f'#!/bin/sh\nexec {os.environ.get("CC", "cc")} "$@" -O0 -Dalways_inline=unused {warnings}\n')
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def installed(
    root: Path, compiler: Path, sibling: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The bin folder of a fresh environment that holds the wheel, made as in the images, and sees our dependencies."""
    scratch, images = tmp_path_factory.mktemp("wheel"), sibling("deploy/image_files.py")
    file = images.read_image_file(root / "deploy" / "images" / "cpu.Dockerfile")
    source = copied(root, images.build_context(root, files_that_ship(root)), scratch / "source")
    images.run_build(file, source, scratch / "venv", {"CC": str(compiler)}, linked=True)
    return scratch / "venv" / "bin"


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"]])
def test_the_command_runs_from_the_wheel(installed: Path, words: list[str]) -> None:
    run = subprocess.run([installed / "charonia", *words], capture_output=True, text=True, check=False, cwd=installed)
    assert run.returncode == 0, run.stderr
    assert "serve" in run.stdout


def test_every_package_imports_from_the_wheel(installed: Path, root: Path) -> None:
    code = (
        "import importlib, pathlib, charonia, sys\n"
        "home = pathlib.Path(charonia.__file__).parent\n"
        "assert home.is_relative_to(sys.prefix), home\n"
        "files = [*home.rglob('*.py'), *home.rglob('*.json'), *home.glob('extras/console/page/*')]\n"
        "print(*sorted(str(p.relative_to(home)) for p in files))\n"
    )
    run = subprocess.run([installed / "python", "-c", code], capture_output=True, text=True, check=True, cwd=installed)
    read = {name for name in files_that_ship(root) if name.startswith("engine/") and name.endswith(".json")}
    page = {name for name in files_that_ship(root) if name.startswith("extras/console/page/")}
    assert "extras/console/page/index.html" in page
    shipped = {name for name in files_that_ship(root) if name.endswith(".py")}
    assert shipped | read | page <= set(run.stdout.split())


LEVEL = "from charonia.engine.cpu import library; print(library.__file__, library.level())"


@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="no compiler here")
def test_the_kernels_are_in_the_wheel(installed: Path) -> None:
    run = subprocess.run([installed / "python", "-c", LEVEL], capture_output=True, text=True, check=True, cwd=installed)
    file, level = run.stdout.split()
    assert Path(file).is_relative_to(installed.parent)
    assert level != "None"


WITHOUT_TREE = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]"
ON_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_without_a_compiler_there_is_a_wheel_that_a_command_completes(
    root: Path, compiler: Path, tmp_path: Path
) -> None:
    """And the terminal hears of it, though pip says nothing."""
    source = copied(root, files_that_ship(root), tmp_path / "source")
    command, environment = wheel_command(source, tmp_path), {**os.environ, "CC": "false"}
    command = [sys.executable, "-c", ON_A_TERMINAL, *command]
    said = subprocess.run(
        command, check=True, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert "built WITHOUT its C kernels" in said.stdout
    [made] = tmp_path.glob("charonia-*.whl")
    with zipfile.ZipFile(made) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path / "installed")
    environment |= {"PYTHONPATH": str(tmp_path / "installed"), "CC": str(compiler)}

    def printed(code: str) -> list[str]:
        command = [sys.executable, "-c", f"{WITHOUT_TREE}; {code}"]
        run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
        return run.stdout.split()

    file, level = printed(LEVEL)
    assert Path(file).is_relative_to(tmp_path)
    assert level == "None"
    printed("from charonia.engine.cpu.compile_kernels import main; assert main() == 0")
    assert printed(LEVEL)[1] != "None"
