"""`charonia analyze` as a user runs it: real servers, real load. What is best here is so by far."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from charonia.cli.app import app

from .models import write_config
from .serving import Server

SLOW = """
backend: "identity"
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }
parameters { key: "execute_delay_ms" value { string_value: "60" } }
"""


@pytest.fixture
def analyze(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """`analyze(*arguments)`: the status, and what it printed."""

    def run(*arguments: str) -> tuple[int, str]:
        status = app(["analyze", *arguments, "--report", str(tmp_path / "report.html")])
        heard = capsys.readouterr()
        return status, heard.out + heard.err

    return run


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_config(tmp_path / "models", "slow", SLOW)
    return tmp_path / "models"


def trials(tmp_path: Path) -> list[Any]:
    return [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()[1:]]


def test_the_best_configuration_is_found_and_not_measured_again(
    analyze: Callable[..., tuple[int, str]], models: Path, tmp_path: Path
) -> None:
    command = [str(models), "--sweep", "parameters.execute_delay_ms=60,5", "--concurrency", "2"]
    command += ["--budget", "10m", "--seconds", "0.2", "--constraint", "e2e_p99=5s,memory=4GiB"]
    status, said = analyze(*command)
    assert status == 0, said
    assert "best: parameters.execute_delay_ms=5: throughput " in said
    assert 'string_value: "5"' in said.partition("slow/config.pbtxt:")[2]
    assert "times as good as parameters.execute_delay_ms=60, which holds now" in said
    measured = trials(tmp_path)
    assert {each["settings"]["parameters.execute_delay_ms"] for each in measured} == {5, 60}
    assert all(each["trial"]["levels"][0]["failed"] == 0 for each in measured)
    assert all(each["trial"]["levels"][0]["memory"] > 2**24 for each in measured)
    assert "<svg" in (tmp_path / "report.html").read_text()
    status, again = analyze(*command)
    assert status == 0
    assert f"{len(measured)} results are there already" in again
    assert trials(tmp_path) == measured
    assert again.partition("best: ")[2] == said.partition("best: ")[2]


def test_a_model_that_loads_in_no_configuration_is_told(analyze: Callable[..., tuple[int, str]], models: Path) -> None:
    (models / "slow" / "config.pbtxt").write_text(SLOW.replace('"60"', '"never"'))
    status, said = analyze(
        str(models), "--sweep", "instances=1,2", "--seconds", "0.2", "--objective", "e2e_p99", "--concurrency", "1"
    )
    assert status == 1
    assert "no configuration could be measured" in said
    assert "execute_delay_ms" in said


def test_a_server_in_use_is_only_measured(analyze: Callable[..., tuple[int, str]], server: Server) -> None:
    index = f"{server.url}/v2/repository/index"
    before = httpx.post(index).json()
    status, said = analyze(
        "--url", server.url, "--model", "fake", "--concurrency", "1", "2", "--seconds", "0.2", "--new", "4",
        "--constraint", "ttft_p99=30s",
    )  # fmt: skip
    assert status == 0, said
    assert "concurrency 1: throughput " in said
    assert "concurrency 2: throughput " in said
    assert "itl_p99" in said
    assert httpx.post(index).json() == before
    assert analyze("--url", server.url, "--model", "fake", "--sweep", "max_num_seqs=1,2")[1].startswith(
        "charonia: --url measures a server that is in use"
    )
    assert "unknown model" in analyze("--url", server.url, "--model", "nobody")[1]
