"""Each kernel compiles for a GPU, without one."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_one_form_of_each_kernel_compiles(root: Path) -> None:
    command = (sys.executable, "-m", "tests.proofs.gpu_kernels", "--each-once", "--archs", "90")
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = subprocess.run(command, capture_output=True, text=True, timeout=240, env=settings, cwd=root)
    assert told.returncode == 0, told.stdout + told.stderr
