"""Workers that are forks run every test once, say what happened, and never lose one in silence."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import pytest
from tests.cpu_seconds import CpuSeconds
from tests.side_by_side import SideBySide

def pytest_configure(config):
    config.pluginmanager.register(CpuSeconds(config.rootpath / "cpu.jsonl"))
    config.pluginmanager.register(SideBySide(2, lambda item: item.nodeid.partition("::")[0]))

@pytest.fixture(scope="session")
def ended(tmp_path_factory):
    yield
    (tmp_path_factory.getbasetemp() / "ended").touch()
"""
TESTS = {
    "a": "def test_one(ended): print('said of one')\ndef test_two(ended): print('said of two'); assert 1 == 2",
    "b": "import os\ndef test_three(ended, tmp_path): assert tmp_path.parent.name in '01'",
    "c": "import pytest\ndef test_four(): pytest.skip('not today')",
}


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-q", "-rfs", "--basetemp", str(folder / "scratch"), "--rootdir", str(folder), str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TESTS.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    return tmp_path


def test_each_runs_once_and_the_failure_is_told_as_ever(folder: Path) -> None:
    code, said = run(folder)
    assert code == 1
    assert "1 failed, 2 passed, 1 skipped" in said
    assert "assert 1 == 2" in said
    assert "said of two" in said
    assert "said of one" not in said
    assert "not today" in said
    assert [*folder.glob("scratch/[01]/ended")]
    assert len((folder / "cpu.jsonl").read_text().splitlines()) == 4
    assert "s of CPU" in said
    assert re.search(r"\d\.\d test_a\.py\n", said)


def test_a_test_whose_process_ends_ends_the_run(folder: Path) -> None:
    (folder / "test_a.py").write_text("import os\ndef test_deadly(): os.kill(os.getpid(), 9)")
    code, said = run(folder)
    assert code == 1
    assert "a worker has ended" in said
    assert "test_a.py::test_deadly" in said
