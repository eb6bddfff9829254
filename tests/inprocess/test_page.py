"""What docs/in-process.md shows runs as it stands."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "in-process.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def run(block: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    exec(compile(block, str(PAGE), "exec"), {"__name__": "__main__"})


def test_a_language_model(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(BLOCKS[0], root, monkeypatch)
    said = capsys.readouterr().out
    assert "def fibonacci(n):" in said
    assert said.count("return ") >= 2


@pytest.mark.proof
@pytest.mark.parametrize("block", BLOCKS[1:])
def test_models_of_tensors(
    block: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(block, root, monkeypatch)
    assert capsys.readouterr().out.startswith("(")
