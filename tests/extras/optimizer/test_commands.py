"""`charonia analyze`: what it is asked for; what it finds is tested in e2e."""

from pathlib import Path

import pytest

from charonia.cli.app import app

MODELS = str(Path(__file__).parents[3] / "examples/model_repository")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "nothing to analyze"),
        ((MODELS, "--url", "http://127.0.0.1:1"), "two things to analyze"),
        ((MODELS, "--api-key", "k"), "--api-key and --allow-remote are for a server"),
        ((MODELS, "--model", "demo", "--budget", "1s", "--seconds", "9"), "the budget of 1 s is too small"),
        ((MODELS, "--model", "demo", "--rate", "0.01"), "no request of 0.01 requests/s is due within the 2.5 s"),
        ((MODELS, "--model", "demo", "--report", "."), "cannot write the report to .: it is a directory"),
        ((MODELS, "--model", "demo", "--report", "x.jsonl"), "x.jsonl would be its results"),
        ((MODELS, "--model", "demo", "--server-args", "--threads '1"), "--server-args: No closing quotation"),
        (("--url", "http://127.0.0.1:1"), "--url needs the name of the model"),
        (("--url", "http://127.0.0.1:1", "--model", "m"), "http://127.0.0.1:1 does not answer: ConnectionRefused"),
        (("--url", "http://127.0.0.1:1", "--model", "m", "--server-args", "--threads 1"), "--server-args is for"),
        (("--url", "http://127.0.0.1:1", "--model", "m", "--search", "exhaustive"), "--search is for others"),
    ],
)
def test_what_cannot_be_analyzed_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app(["analyze", *arguments], result_action="return_value") == 1
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1
    assert not list(tmp_path.iterdir())
