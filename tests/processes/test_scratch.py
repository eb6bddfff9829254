"""Scratch directories: gone when they are closed, and swept when nobody is left to close them."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from charonia.processes.scratch import ScratchDirectory, remove_abandoned_scratch

LEFT_BEHIND = """
import os, subprocess, sys
from charonia.processes.scratch import ScratchDirectory
print(ScratchDirectory().path, subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL).pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_what_is_in_use_is_not_swept_and_what_is_closed_is_gone(scratch: Path) -> None:
    with ScratchDirectory() as directory:
        (directory / "model").mkdir()
        assert remove_abandoned_scratch() == 0
        assert list(scratch.iterdir()) == [directory]
    assert not list(scratch.iterdir())


def test_what_a_killed_process_left_is_swept_and_nothing_else(scratch: Path) -> None:
    """Though a process that it started lives on."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    left, child = done.stdout.split()
    (Path(left) / "1").mkdir()
    others = [
        scratch / "charonia-scratch-notes",
        scratch / "charonia-demo-model",
        scratch / "charonia-scratch-abcdefgh",
    ]
    for other in others[:2]:
        other.mkdir()
    others[2].symlink_to(others[0])
    try:
        assert remove_abandoned_scratch() == 1
    finally:
        subprocess.run(["kill", child], check=True)
    assert sorted(scratch.iterdir()) == sorted(others)
