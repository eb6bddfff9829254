"""The load generator against a real server that counts instead of computing."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from charonia.bench import serve
from charonia.bench.command import report_console
from charonia.bench.gpu_served import StepRates, StreamLoads, served_figures
from charonia.bench.load.driver import CHATS, EndpointName, LoopMode, RequestOptions
from charonia.bench.load.fake_model import write_repository
from charonia.bench.load.figures import compute_figures
from charonia.bench.load.plan import Form, Prompts
from charonia.bench.load.planned_requests import uniform_jobs
from charonia.bench.load.worker import LoadRun, LoadTarget, RequestProgress, run
from charonia.bench.serve import app
from charonia.bench.server_process import (
    ServerAddress,
    exit_on_signals,
    first_model,
    is_loopback,
    own_server,
    parse_server_url,
)
from charonia.core.errors import InvalidArgument, Unavailable

from ..odd_server import NO_SERVERS_OF_OURS, answering


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("fake") / "models", {"max_queued_requests": 4})


@pytest.fixture(scope="module")
def place(repository: Path) -> Iterator[ServerAddress]:
    with own_server("--model-repository", str(repository)) as place:
        yield place


def load(place: ServerAddress, door: EndpointName, **fields: Any) -> LoadRun:
    form: Form = "text" if door in CHATS else "ids"
    port = place.grpc_port if door == "grpc" else place.http_port
    target = LoadTarget(host=place.host, port=port, door=door, manner=RequestOptions(first_model(place)))
    asked = {"jobs": uniform_jobs([0.0] * 12, 8, 10), "prompts": Prompts(form=form), "pace": LoopMode(concurrency=3)}
    return LoadRun(target=target, **(asked | fields))


def test_a_table_in_a_file_is_wide_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with io.StringIO() as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert report_console().width == 160


@pytest.mark.parametrize("door", ["completions", "chat", "generate", "messages", "responses", "grpc"])
def test_a_closed_loop_hears_every_token(place: ServerAddress, door: EndpointName) -> None:
    (outcome,) = run(load(place, door))
    seen = compute_figures(outcome.records)
    assert seen.statuses == {"ok": 12}
    assert seen.output_tokens == 12 * 10
    assert sorted(record.index for record in outcome.records) == list(range(12))
    assert all(record.due <= record.sent <= record.times[0] <= record.ended for record in outcome.records)
    if door not in CHATS:
        assert seen.prompt_tokens == 12 * 8


def test_an_open_loop_in_two_processes_sends_each_when_due(place: ServerAddress) -> None:
    jobs = uniform_jobs([0.01 * number for number in range(10)], 4, 3)
    seen: list[RequestProgress] = []
    outcomes = run(load(place, "completions", jobs=jobs, pace=LoopMode()), 2, seen.append)
    records = [record for outcome in outcomes for record in outcome.records]
    assert len(outcomes) == 2
    assert {record.index: record.due for record in records} == {job.index: job.due for job in jobs}
    assert all(record.sent >= record.due for record in records)
    assert compute_figures(records).output_tokens == 10 * 3
    assert seen[-1] == RequestProgress(sent=10, done=10, failed=0, tokens=30)


def test_a_closed_loop_ends_with_its_duration(place: ServerAddress) -> None:
    (outcome,) = run(load(place, "generate", pace=LoopMode(concurrency=2, duration=1e-9)))
    assert outcome.records == []


def test_refusals_are_counted_by_status(place: ServerAddress) -> None:
    jobs = uniform_jobs([0.0], 8, 10_000)
    (outcome,) = run(load(place, "completions", jobs=jobs, warm_up=0))
    assert compute_figures(outcome.records).statuses == {"HTTP 400": 1}


def test_a_load_that_cannot_begin_says_so(place: ServerAddress) -> None:
    jobs = uniform_jobs([0.0], 8, 10_000)
    with pytest.raises(Unavailable, match="the first request failed: HTTP 400"):
        run(load(place, "completions", jobs=jobs))


def test_shares_are_all_jobs_and_all_slots(place: ServerAddress) -> None:
    shares = load(place, "completions").shares(8)
    assert [share.pace.concurrency for share in shares] == [1, 1, 1]
    assert sorted(job.index for share in shares for job in share.jobs) == list(range(12))


def command(*arguments: object) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "charonia.bench.serve", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_the_command_starts_a_server_and_writes_json(repository: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    ran = command("--model-repository", repository, "--concurrency", 2, "--requests", 4, "--new", 5, "--json", path)
    assert ran.returncode == 0, ran.stderr
    assert "between tokens" in ran.stdout
    result = json.loads(path.read_text())
    assert result["figures"]["statuses"] == {"ok": 4}
    assert result["figures"]["output_tokens"] == 20
    assert [request["tokens"] for request in result["requests"]] == [5, 5, 5, 5]
    assert all(1 <= len(request["times"]) <= 5 for request in result["requests"]), "unread tokens merge"
    assert result["asked"]["concurrency"] == 2
    assert result["cpu"]["frontend"] >= 0


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for arguments, names in [
        ((), "give one of a server's URL"),
        (("http://192.0.2.1:8000",), "--allow-remote"),
        (("http://127.0.0.1:1",), "nothing listens on 127.0.0.1:1"),
        (("--model-repository", tmp_path / "none"), "the server ended"),
    ]:
        with pytest.raises(SystemExit) as end:
            app([*map(str, arguments), "--concurrency", "1", "--requests", "1"])
        said = str(end.value) + capfd.readouterr().err
        assert names in said
        assert "Traceback" not in said


def test_closed_grpc_doors_are_named() -> None:
    with pytest.raises(Unavailable, match=r"the gRPC door is closed: nothing listens on 127\.0\.0\.1:1 "):
        serve.build_load(ServerAddress("127.0.0.1", 1, 1), serve.ServerFlags(door="grpc"), serve.LoadFlags())


def test_only_this_machine_unless_allowed() -> None:
    assert parse_server_url("http://localhost:9000", 8001, False) == ServerAddress("localhost", 9000, 8001)
    assert parse_server_url("[::1]:9000", 8001, False) == ServerAddress("::1", 9000, 8001)
    assert parse_server_url("127.0.0.1", 8001, False) == ServerAddress("127.0.0.1", 8000, 8001)
    assert parse_server_url("http://192.0.2.1", 8001, True).host == "192.0.2.1"
    for url in (
        "http://192.0.2.1:8000",
        "http://0.0.0.0",
        "http://localhost.example.com",
        "https://localhost",
        "http://",
        "http://localhost:many",
        "http://localhost:99999",
        "http://localhost:0",
        "http://localhost/v2",
        "http://[::1",
    ):
        with pytest.raises(InvalidArgument):
            parse_server_url(url, 8001, False)
    assert not is_loopback("example.com")


@pytest.mark.parametrize("raw", NO_SERVERS_OF_OURS)
def test_what_is_no_server_of_ours_lists_no_models(raw: bytes) -> None:
    with answering(raw) as url, pytest.raises(Unavailable, match="does not list its models: "):
        first_model(parse_server_url(url, 8001, False))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part in it is Linux's")
def test_what_was_started_ends_with_whoever_started_it(tmp_path: Path) -> None:
    """However that ends: here it is killed."""
    code = (
        "import os, signal, sys, time\n"
        "from charonia.bench.server_process import run_process\n"
        "sleeper = 'import time; print(1, flush=True); time.sleep(60)'\n"
        "with run_process([sys.executable, '-c', sleeper]) as (pid, alive):\n"
        "    while not alive.output.read_text(): time.sleep(0.01)\n"
        "    print(pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    stat, deadline = Path("/proc") / killed.stdout.strip() / "stat", time.monotonic() + 30
    while stat.exists() and " Z " not in stat.read_text():
        assert time.monotonic() < deadline, "it was left behind"
        time.sleep(0.01)


def test_signals_end_a_block_in_order_unless_they_are_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)
    try:
        with exit_on_signals():
            signal.raise_signal(signal.SIGHUP)  # as under nohup
            with pytest.raises(SystemExit, match="143"):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is before[1]
    finally:
        signal.signal(signal.SIGHUP, before[0])


def test_the_pace_is_one_and_has_an_end() -> None:
    for work in (
        serve.LoadFlags(requests=1),
        serve.LoadFlags(rate=1, concurrency=1, requests=1),
        serve.LoadFlags(rate=1),
        serve.LoadFlags(concurrency=1),
    ):
        with pytest.raises(InvalidArgument, match="give"):
            serve.plan_requests(work)


def test_arrivals_end_with_the_duration_and_follow_the_seed() -> None:
    jobs = serve.plan_requests(serve.LoadFlags(rate=50, duration=4))
    assert len(jobs) == pytest.approx(200, rel=0.5)
    assert jobs[-1].due < 4
    assert jobs == serve.plan_requests(serve.LoadFlags(rate=50, duration=4))
    assert jobs != serve.plan_requests(serve.LoadFlags(rate=50, duration=4, seed=1))


def test_a_served_model_stands_beside_what_its_steps_give(place: ServerAddress) -> None:
    load = StreamLoads({1: 2, 3: 6}, 8, 10, 256)
    rates = StepRates(1000.0, {1: 0.01, 3: 0.02})
    assert rates.tokens_per_second(load, 3) == pytest.approx(60 / (0.048 + 2 * 10 * 0.02))
    one, three = served_figures("fake", place, load, rates, 1)
    assert (one.name, three.name) == (
        "fake served, 1 x 8 + 10, 1 frontend",
        "fake served, 3 x 8 + 10, 1 frontend",
    )
    assert three.value > 0
    assert three.share == pytest.approx(three.value / rates.tokens_per_second(load, 3))
    assert "ITL p50, p99, max " in three.more
