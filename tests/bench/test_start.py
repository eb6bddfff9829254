"""Starts and placements: a real server that counts, its phases, and priorities of a real process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from charonia.bench.load.fake_model import write_repository
from charonia.bench.placement import yield_to_engine
from charonia.bench.start import ModuleImport, imports, start, write_copies


@pytest.mark.proof
def test_a_start_is_timed_until_ready(tmp_path: Path) -> None:
    checkpoint = next(write_repository(tmp_path / "models", {}).glob("*/1"))
    one = start(str(write_copies(tmp_path / "copies", checkpoint, 2)), "--backend-config=charonia,executor=fake")
    assert 0 < one.listening <= one.seconds
    assert 0 < one.engine < 60
    assert 0 < one.frontend < 60
    assert "warm-up" in one.said
    assert "ready after" in one.said


def test_costly_imports_are_listed_in_order() -> None:
    said = """noise
import time:      1200 |      21000 |     json.decoder
import time:       300 |        300 |   tiny
import time:      2000 |    1500000 | torch
"""
    assert imports(said) == [ModuleImport(21.0, 2, "json.decoder"), ModuleImport(1500.0, 0, "torch")]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed by Linux alone")
def test_a_frontend_yields_to_its_engine() -> None:
    waits = "import threading; threading.Thread(target=input, daemon=True).start(); print(flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", waits], stdin=pipe, stdout=pipe) as frontend:
        assert frontend.stdout is not None
        frontend.stdout.readline()
        before = os.getpriority(os.PRIO_PROCESS, frontend.pid)
        yield_to_engine(frontend.pid, min(before + 3, 19))
        threads = [int(task.name) for task in Path(f"/proc/{frontend.pid}/task").iterdir()]
        found = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
        frontend.kill()
    assert len(threads) == 2
    assert found == {min(before + 3, 19)}
