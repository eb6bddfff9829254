"""What programs pay is counted: calls, and the program's part of a generation."""

from pathlib import Path
from types import ModuleType

import pytest

from charonia.bench import in_process
from charonia.bench.in_process import call_costs, main


def test_calls_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "_CALLS", 3)
    assert min(call_costs(2)) > 0


@pytest.mark.proof
def test_the_table(
    making: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    copied_children: None,
) -> None:
    monkeypatch.setattr(in_process, "_CALLS", 3)
    main(checkpoint=making.write_checkpoint(tmp_path / "tiny"), rounds=1, sequences=2, prompt=4, new=4, repeats=1)
    assert "the program beside it" in capsys.readouterr().out
