"""`charonia calibrate` and `charonia simulate` as a user runs them: a real checkpoint, a real server, one file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from charonia.cli.app import app
from charonia.extras.optimizer.machine_file import read_machine_file


def charonia(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "charonia", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def machine(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the demo model on this machine."""
    checkpoint, output = root / "examples/model_repository/demo/1", tmp_path_factory.mktemp("capacity") / "machine.json"
    flags = [
        "--budget",
        "1s",
        "--threads",
        "1",
        "--max-num-seqs",
        "4",
        "--max-model-len",
        "200",
        "--kv-cache-blocks",
        "200",
    ]
    done = charonia("calibrate", str(checkpoint), "--output", str(output), *flags)
    assert done.returncode == 0, done.stderr
    assert f"written to {output}" in done.stdout
    return output


def test_a_machine_is_measured_with_its_server(machine: Path) -> None:
    found: dict[str, Any] = json.loads(machine.read_text())
    origin, times = found["origin"], found["machine"]
    assert origin["how"] == "the engine measured in process, and a server over HTTP"
    assert (origin["checkpoint"], origin["threads"], origin["model"]["hidden_size"]) == ("demo/1", 1, 384)
    assert origin["precision"]["quantization"] == "none"
    assert origin["steps"] > 24
    assert found["engine"]["blocks"] == 200
    assert times["products"][0][1] > 0
    assert times["arrival"] + times["arrival_token"] >= 0  # beside other tests nothing can be told apart


def test_a_load_is_simulated_with_what_was_measured(machine: Path) -> None:
    load = ["--rate", "50", "--requests", "100", "--prompt", "10-100", "--new", "8"]
    done = charonia("simulate", "--machine", str(machine), *load, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fleets"][0]["all"]["output_tokens"] == 800
    assert found["fleets"][0]["all"]["ttft"]["count"] == 100
    assert found["engine"]["scheduler"]["max_num_seqs"] == 4
    assert found["speed"] > 0


def test_a_server_is_measured_as_its_client_sees_it(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "machine.json"
    flags = ["--model", "slow", "--budget", "0.1s", "--max-num-seqs", "1", "--max-model-len", "60"]
    assert app(["calibrate", "--url", server.url, *flags, "--output", str(output)], result_action="return_value") == 0
    assert f"written to {output}" in capsys.readouterr().out
    found = read_machine_file(output)
    assert (found.origin.how, found.origin.checkpoint) == ("a server measured over HTTP", "slow")
    assert found.engine.scheduler.max_num_seqs == 1
    assert found.machine.products[0][1] >= 0.05
    flags[1] = "none"
    assert app(["calibrate", "--url", server.url, *flags, "--output", str(output)], result_action="return_value") == 1
    assert "HTTP 404" in capsys.readouterr().err
