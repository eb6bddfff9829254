"""`charonia explain` of saved scrapes; of servers see tests/e2e."""

import json
from pathlib import Path

import pytest

from charonia.cli.app import app

RECORDED = Path(__file__).parents[1] / "telemetry" / "recorded"


def test_saved_scrapes_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = (str(RECORDED / f"rows_taken.{when}.txt") for when in ("before", "after"))
    assert app(["explain", before, after]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("rows 1, ")
    assert said[0].endswith(" s between the scrapes:")
    assert said[1].startswith("  1. queue: requests wait until a running one ends, ")
    assert said[2] == "     turn: --max-num-seqs up, or more --data-parallel-size"
    assert app(["explain", after, "--json"]) == 0
    [report] = json.loads(capsys.readouterr().out)
    assert (report["model"], report["version"], report["since_start"]) == ("rows", "1", True)
    assert report["bottlenecks"][0]["cause"] == "queue"
    assert report["bottlenecks"][0]["evidence"]["waiting"] > 0


def test_calibrates_file_tells_reading_from_arithmetic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scrapes = [str(RECORDED / f"computation.{when}.txt") for when in ("before", "after")]
    file, measured = tmp_path / "machine.json", json.loads((RECORDED / "machine.json").read_text())
    for machine, cause in (
        ({"weights": 0.019, "token": 1e-4}, "memory_bandwidth"),
        ({"products": [[1, 0.01], [4, 0.036]], "heads": [[0, 0.0], [1, 1e-4]]}, "arithmetic"),
        ({"weights": 0.002, "token": 1e-4}, "computation"),
    ):
        file.write_text(json.dumps({**measured, "machine": machine}))
        assert app(["explain", *scrapes, "--machine", str(file), "--json"]) == 0
        [report] = json.loads(capsys.readouterr().out)
        assert report["bottlenecks"][0]["cause"] == cause
        assert "of another model" not in report["bottlenecks"][0]["turn"]
    file.write_text(json.dumps({**measured, "machine": {"weights": 0.19}}))
    assert app(["explain", *scrapes, "--machine", str(file), "--json"]) == 0
    [report] = json.loads(capsys.readouterr().out)
    assert report["bottlenecks"][0]["cause"] == "computation"
    assert "the file of another model or machine, where such a step takes 19" in report["bottlenecks"][0]["turn"]


def test_scrapes_of_two_servers_and_a_server_without_models_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, started, uptime in (("a", 1000, 50), ("b", 900, 200)):
        (tmp_path / name).write_text(f"charonia_start_time_seconds {started}\ncharonia_uptime_seconds {uptime}\n")
    assert app(["explain", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "the second scrape is of another server" in capsys.readouterr().err
    assert app(["explain", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out == "the server has no models\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "nothing to explain: name saved scrapes, or a server by --url"),
        (["{after}", "--url", "http://x"], "nothing to explain"),
        (["{after}", "--header", "a: b"], "--header and --seconds are for a server: name it by --url"),
        (["{after}", "--model", "no"], "there is no model 'no' to explain, only rows"),
        (["{after}", "--seconds", "3"], "--header and --seconds are for a server"),
        (["{tmp}/no.txt"], "cannot read {tmp}/no.txt: No such file"),
        (["{tmp}"], "cannot read {tmp}: Is a directory"),
        (["{tmp}/bytes.txt"], "bytes.txt: this is no text of metrics"),
        (["{tmp}/other.txt"], "other.txt: charonia_uptime_seconds is missing"),
        (["{after}", "--machine", "{tmp}/no.json"], "no.json: No such file"),
        (["{after}", "--machine", "{tmp}/other.txt"], "other.txt is no file of charonia calibrate: "),
        (
            ["{after}", "--machine", "{tmp}/other.json"],
            "other.json has the format 'x'",
        ),
        (["{classic}", "--machine", "{tmp}/other.json"], "--machine is of one language model, and there are none"),
        (
            ["{classic}", "--machine", "{tmp}/other.json", "--model", "shaped"],
            "--machine is of a language model, and 'shaped' is none",
        ),
        (["--url", "x:1"], "--url must be http://HOST:PORT, got 'x:1'"),
        (["--url", "http://127.0.0.1:9", "--seconds", "0"], "http://127.0.0.1:9/metrics: "),
        (["http://127.0.0.1:9", "--seconds", "0"], "http://127.0.0.1:9/metrics: "),
        (["http://127.0.0.1:9", "--url", "http://127.0.0.1:8"], "nothing to explain"),
        (["--url", "http://127.0.0.1:9", "--header", "x"], "--header must be NAME: VALUE, got 'x'"),
        (["--url", "http://127.0.0.1:many"], "--url must be http://HOST:PORT, got 'http://127.0.0.1:many'"),
        (["--url", "http://[::1"], "--url must be http://HOST:PORT"),
    ],
)
def test_what_cannot_be_explained_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    (tmp_path / "other.txt").write_text("up 1\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    measured = json.loads((RECORDED / "machine.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps({**measured, "format": "x"}))
    places = {"after": RECORDED / "rows_taken.after.txt", "classic": RECORDED / "shapes.after.txt", "tmp": tmp_path}
    assert app(["explain", *(argument.format(**places) for argument in arguments)]) == 1
    assert error.format(**places) in capsys.readouterr().err
