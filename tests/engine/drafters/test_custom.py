"""A drafter from a file: the one of the docs, and what is said of files that are none."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest

from charonia.core.errors import InvalidArgument
from charonia.engine.core.drafters import build_drafter
from charonia.engine.drafters import custom
from charonia.engine.drafters.custom import CustomDrafter
from charonia.engine.options import EngineOptions, declare_drafters, engine_config, read_speculation_config
from charonia.scheduler.drafts.speculation import DraftRequest


@pytest.fixture
def documented(root: Path, tmp_path: Path) -> Path:
    (code,) = re.findall(r"```python\n(class Drafter.*?)```", (root / "docs/speculation.md").read_text(), re.DOTALL)
    path = tmp_path / "drafter.py"
    path.write_text(code)
    return path


def test_the_drafter_of_the_docs_drafts(documented: Path) -> None:
    config = read_speculation_config(f'{{"method": "custom", "path": "{documented}", "longest": 2}}')
    drafter = build_drafter(config, 100)
    assert drafter.propose([DraftRequest(np.array([1, 2, 3, 4], np.int32), [1], 4, {})]) == [[2, 3]]


def test_a_file_that_the_command_line_does_not_name_is_refused(documented: Path) -> None:
    written = f'{{"method": "custom", "path": "{documented}"}}'
    with pytest.raises(InvalidArgument, match=rf"command line names it: --drafter {documented}"):
        engine_config("x", EngineOptions(speculative_config=written))
    declare_drafters([], written)
    found = engine_config("x", EngineOptions(speculative_config=written)).speculation
    assert found is not None
    assert found.path == str(documented)
    with pytest.raises(InvalidArgument, match=r"there is no file none\.py that drafts"):
        declare_drafters([Path("none.py")])


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("x = 1\nclass Drafter\n", "line 2: SyntaxError"),
        ("\nimport nothing_like_it\n", "line 2: ModuleNotFoundError"),
        ("class Drafter:\n    def __init__(self, n=0):\n        1 / 0\n", "line 3: ZeroDivisionError"),
        ("class Drafter:\n    propose = list\n    def __init__(self): pass\n", r"unexpected keyword argument 'n'"),
        ("class Other:\n    pass\n", r"has no class Drafter with a method propose"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_line(code: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(code)
    with pytest.raises(InvalidArgument, match=rf"^speculative_config: {path}.*{says}"):
        CustomDrafter(path, {"n": 1})


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="there is no file"):
        CustomDrafter(tmp_path / "none.py", {})


def test_drafts_that_are_no_integers_are_the_drafters_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class Drafter:\n    def propose(self, requests):\n        return [['a']]\n")
    with pytest.raises(TypeError):
        CustomDrafter(path, {}).propose([DraftRequest(np.array([1], np.int32), [], 4, {})])


@pytest.mark.parametrize("hangs", ["while True: pass", "time.sleep(60)"])
def test_a_call_that_hangs_is_interrupted(hangs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "LONGEST_CALL", 0.05)
    file = tmp_path / "mine.py"
    file.write_text(
        f"import time\nclass Drafter:\n    def propose(self, requests):\n        try:\n            {hangs}\n"
        "        except Exception:\n            pass\n    finished = propose\n"
    )
    drafter = CustomDrafter(file, {})
    for call in (drafter.propose, drafter.finished):
        with pytest.raises(TimeoutError, match=r"longer than 0\.05 s"):
            call([])  # type: ignore[operator]
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
