"""Each kernel compiles for a GPU, without one."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_one_form_of_each_kernel_compiles(root: Path, tmp_path: Path) -> None:
    """And is remembered, whatever a run that was stopped has left behind it."""
    memory = tmp_path / "kernels.jsonl"
    command = (sys.executable, "-m", "tests.proofs.gpu_kernels", "--each-once", "--archs", "90", "--remember", memory)
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = subprocess.run(command, capture_output=True, text=True, timeout=240, env=settings, cwd=root)
    assert told.returncode == 0, told.stdout + told.stderr
    with memory.open("a") as file:
        file.write('\n["half a li')
    told = subprocess.run((*command, "--minutes", "0"), capture_output=True, text=True, env=settings, cwd=root)
    compiled = len(memory.read_text().splitlines()) - 2
    assert told.stdout == f"{compiled} of {compiled} compiled, {compiled} of them before\n"
