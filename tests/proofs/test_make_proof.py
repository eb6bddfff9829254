"""`make proof`, which runs all proofs but those that are named here."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ALONE = {
    "gpu_kernels": "compiles for hours",
    "house": "counts, and proves nothing",
    "picture_peers": "compares with vLLM, which another environment has",
    "scheduler_latency": "prints figures, and judges none",
    "simulation": "takes an hour",
}
"""Those that `make proof` leaves out, and why."""


def test_every_proof_is_run_by_make(root: Path) -> None:
    commands = {path.stem for path in (root / "tests" / "proofs").glob("*.py") if "\napp = App(" in path.read_text()}
    [listed] = re.findall(r"^PROOFS := (.*)", (root / "Makefile").read_text(), re.MULTILINE)
    assert set(listed.split()) == commands - ALONE.keys()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_a_proof_that_fails_keeps_no_other_from_running(root: Path, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "ran $*"\ncase "$*" in *pytest* | *wrong) exit 1; esac\n')
    python.chmod(0o755)
    for stamp in ("torch", "run", "dev"):
        (tmp_path / f"{stamp}.stamp").touch()
    command = ("make", "--no-print-directory", "proof", f"VENV={tmp_path}")
    runs = [
        subprocess.run([*command, f"PROOFS={proofs}"], cwd=root, capture_output=True, text=True, timeout=60)
        for proofs in ("right wrong last", "right")
    ]
    assert [run.returncode for run in runs] == [2, 2]
    assert "ran -m tests.proofs.last\nfailed: pytest -m proof wrong\n" in runs[0].stdout
    assert runs[1].stdout.endswith("failed: pytest -m proof\n")
    python.write_text("#!/bin/sh\n")
    run = subprocess.run([*command, "PROOFS=right"], cwd=root, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout.splitlines()[-1]) == (0, "every proof held")
