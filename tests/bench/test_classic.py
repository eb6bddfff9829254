"""The bench of v2's infer: its generator against the bare servers, and figures out of turns made by hand."""

from collections.abc import Iterator

import pytest
from rich.console import Console

from charonia.bench import classic_models
from charonia.bench.classic import InferComparison, InferRun, InferTrial
from charonia.bench.classic_models import BatchingComparison, BatchingRun
from charonia.bench.load.bare_server import bare_server
from charonia.bench.load.driver import OK, LoopMode, RequestOptions
from charonia.bench.load.infer_generators import Generator, find_generator, run_load
from charonia.bench.load.infer_load import Door, InferLoad, http_request
from charonia.bench.load.infer_sender import InferPayload, encode_infer_payload
from charonia.bench.load.plan import Prompts
from charonia.bench.load.worker import LoadRun, LoadTarget, RequestProgress, run_here
from charonia.bench.server_process import ServerAddress
from charonia.core.errors import Unavailable
from charonia.core.tensor import Tensor
from charonia.planning.requests import uniform_jobs


@pytest.fixture(scope="module")
def bare() -> Iterator[ServerAddress]:
    with bare_server("bare_infer") as place:
        yield place


def of(bare: ServerAddress, door: Door, seconds: float = 0.3) -> InferLoad:
    port = bare.grpc_port if door == "grpc" else bare.http_port
    return InferLoad(door=door, port=port, connections=4, seconds=seconds, warm_up=0.1)


@pytest.mark.parametrize("door", ["binary", "json", "grpc"])
def test_a_generator_keeps_its_connections_busy(bare: ServerAddress, door: Door) -> None:
    report = run_load(of(bare, door), "own")
    assert report.answers > 10
    assert report.errors == 0
    assert report.rate == pytest.approx(report.answers / 0.3, rel=0.01)
    assert 0 < report.p50 <= report.p99 < 300
    assert report.cpu > 0


@pytest.mark.parametrize("door", ["binary", "grpc"])
def test_tools_do_what_our_generator_does(bare: ServerAddress, door: Door) -> None:
    by = find_generator(door, "auto")
    if by == "own":
        pytest.skip(f"what drives {door} is not installed")
    report = run_load(of(bare, door, 1), by)
    assert report.answers > 10
    assert report.errors == 0
    assert report.rate == pytest.approx(report.answers, rel=0.2)
    assert 0 < report.p50 <= report.p99
    assert report.cpu > 0


def load_here(bare: ServerAddress, payload: InferPayload) -> LoadRun:
    target = LoadTarget(
        host=bare.host, port=bare.http_port, door="completions", manner=RequestOptions("identity"), payload=payload
    )
    jobs, pace = uniform_jobs([0.0] * 40, 1, 1), LoopMode(concurrency=4)
    return LoadRun(target=target, jobs=jobs, prompts=Prompts(), pace=pace)


def test_a_load_of_infer_requests_runs_in_this_thread(bare: ServerAddress) -> None:
    tensor = Tensor.from_values("INPUT0", "FP32", [[1.0] * 16])
    seen: list[RequestProgress] = []
    outcome = run_here(load_here(bare, encode_infer_payload([tensor])), seen.append)
    assert [record.status for record in outcome.records] == [OK] * 40
    assert all(record.sent < record.times[0] <= record.ended for record in outcome.records)
    assert seen[-1].done == 40


def test_the_message_of_a_first_request_that_is_refused_is_told(bare: ServerAddress) -> None:
    with pytest.raises(Unavailable, match=r"the first request failed: HTTP [45]"):
        run_here(load_here(bare, InferPayload(b"no request", 10)))


def test_a_server_that_does_not_answer_is_told(bare: ServerAddress) -> None:
    with pytest.raises(Unavailable, match="no grpc request of 1 connections was answered"):
        run_load(InferLoad(door="grpc", port=bare.http_port, connections=1, seconds=0.2, warm_up=0.0), "own")


@pytest.mark.parametrize(
    ("door", "generator", "there", "by"),
    [
        ("binary", "auto", True, "wrk"),
        ("json", "wrk", True, "wrk"),
        ("grpc", "auto", True, "h2load"),
        ("grpc", "auto", False, "own"),
        ("binary", "own", True, "own"),
    ],
)
def test_tools_drive_where_they_are_installed(
    monkeypatch: pytest.MonkeyPatch, door: Door, generator: Generator, there: bool, by: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: f"/usr/bin/{tool}" if there else None)
    assert find_generator(door, generator) == by


def test_a_tool_that_is_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: None)
    with pytest.raises(Unavailable, match="h2load is not installed"):
        find_generator("grpc", "wrk")


def test_a_binary_request_announces_its_header() -> None:
    head, _, body = http_request(InferLoad(door="binary", port=1, connections=1, shape=(2, 3))).partition(b"\r\n\r\n")
    headers = dict(line.split(b": ") for line in head.split(b"\r\n")[1:])
    assert int(headers[b"content-length"]) == len(body)
    assert len(body) - int(headers[b"inference-header-content-length"]) == 24


def test_turns_are_told_by_their_medians() -> None:
    def leg(name: str, rate: float) -> InferRun:
        return InferRun(
            name=name,
            door="json",
            driver="own",
            connections=8,
            per_second=rate,
            per_cpu_second=2 * rate,
            p50_ms=1.0,
            p99_ms=2.0,
            generator_cores=0.5,
            errors=0,
        )

    turns = [leg(name, rate) for rate in (1.0, 5.0, 2.0) for name in ("charonia", "bare")]
    comparison = InferComparison(InferTrial(), [*turns, leg("charonia", 2.0)])
    assert comparison.median("bare", "json", 8, lambda leg: leg.per_second) == 2.0
    assert comparison.median("charonia", "json", 8, lambda leg: leg.per_cpu_second) == 4.0


def test_models_are_told_beside_what_they_are_measured_against(capsys: pytest.CaptureFixture[str]) -> None:
    turns = {
        "identity": [BatchingRun(100.0)],
        "small": [BatchingRun(60.0)],
        "large": [BatchingRun(16.0, 0.2), BatchingRun(16.0, 0.2)],
        "large_unbatched": [BatchingRun(2.0)],
        "onnxruntime": [BatchingRun(20.0)],
    }
    classic_models.show(Console(width=100), BatchingComparison(classic_models.BatchingTrial(), turns))
    said = capsys.readouterr().out
    for words in ("60%", "80%", "100%", "10%", "8.0 times as fast"):
        assert words in said
