"""Starts: a real server that counts, and its phases."""

from pathlib import Path

import pytest

from charonia.bench.load.fake_model import write_repository
from charonia.bench.server_start import ModuleImport, imports, start, write_copies


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
