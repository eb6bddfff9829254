"""`charonia graph` over repositories; over servers see tests/e2e."""

from pathlib import Path

import pytest

from charonia.cli.app import app

IDENTITY = """backend: "identity"
input [ { name: "A" data_type: TYPE_INT32 dims: 1 } ]
output [ { name: "B" data_type: TYPE_INT32 dims: 1 } ]
parameters { key: "copy:A" value { string_value: "B" } }
"""
GLUE = IDENTITY.replace("identity", "pipeline") + 'parameters { key: "models" value { string_value: "echo" } }'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, config in (("echo", IDENTITY), ("glue", GLUE), ("broken", "nonsense")):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
    (tmp_path / "glue" / "1" / "pipeline.py").write_text("async def run(request, lookup): yield")
    return tmp_path


def test_a_repository_is_drawn(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["graph", str(repository)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("flowchart LR\n")
    assert [line.strip() for line in said.out.splitlines() if "-.->" in line] == ["n0 -.-> n1"]
    assert said.err.startswith("broken: WRONG: ")
    assert app(["graph", str(repository), "--model", "echo", "--format", "svg"]) == 0
    drawn = capsys.readouterr().out
    assert drawn.startswith("<svg")
    assert "glue" not in drawn


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "nothing to draw: name a model repository, or a server by --url"),
        (["{}", "--url", "http://x"], "nothing to draw"),
        (["{}", "--statistics"], "--header and --statistics are for a server: name it by --url"),
        (["{}", "--model", "no"], "there is no model 'no' to draw, only echo, glue"),
        (["--url", "x:1"], "--url must be http://HOST:PORT, got 'x:1'"),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9/v2/repository/index: "),
        (["--url", "http://127.0.0.1:9", "--header", "x"], "--header must be NAME: VALUE, got 'x'"),
        (["{}/no"], "is not a directory"),
    ],
)
def test_what_cannot_be_drawn_is_told(
    repository: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    assert app(["graph", *(argument.format(repository) for argument in arguments)]) == 1
    assert error in capsys.readouterr().err
