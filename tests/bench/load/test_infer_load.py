"""Loads of v2's infer requests, put to the identity model of a real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from charonia.bench.load.driver import OK, LoopMode, RequestOptions
from charonia.bench.load.infer_load import Door, InferLoad, http_request, run_load
from charonia.bench.load.infer_sender import InferPayload, encode_infer_payload
from charonia.bench.load.plan import Prompts
from charonia.bench.load.planned_requests import uniform_jobs
from charonia.bench.load.worker import LoadRun, LoadTarget, RequestProgress, run_here
from charonia.bench.server_process import ServerAddress, own_server
from charonia.core.errors import Unavailable
from charonia.core.tensor import Tensor

IDENTITY = """\
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: 16 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 }
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerAddress]:
    repository: Path = tmp_path_factory.mktemp("models")
    (repository / "identity" / "1").mkdir(parents=True)
    (repository / "identity" / "config.pbtxt").write_text(IDENTITY)
    with own_server("--model-repository", str(repository)) as place:
        yield place


@pytest.mark.parametrize("door", ["binary", "json", "grpc"])
def test_a_generator_keeps_its_connections_busy(place: ServerAddress, door: Door) -> None:
    port = place.grpc_port if door == "grpc" else place.http_port
    report = run_load(InferLoad(door=door, port=port, connections=4, seconds=1.0, warm_up=0.1))
    assert report.answers > 10
    assert report.errors == 0
    assert report.rate == pytest.approx(report.answers, rel=0.01)
    assert 0 < report.p50 <= report.p99 < 1000
    assert report.cpu > 0


def load_here(place: ServerAddress, payload: InferPayload) -> LoadRun:
    target = LoadTarget(
        host=place.host, port=place.http_port, door="completions", manner=RequestOptions("identity"), payload=payload
    )
    jobs, pace = uniform_jobs([0.0] * 40, 1, 1), LoopMode(concurrency=4)
    return LoadRun(target=target, jobs=jobs, prompts=Prompts(), pace=pace)


def test_a_load_of_infer_requests_runs_in_this_thread(place: ServerAddress) -> None:
    tensor = Tensor.from_values("INPUT0", "FP32", [[1.0] * 16])
    seen: list[RequestProgress] = []
    outcome = run_here(load_here(place, encode_infer_payload([tensor])), seen.append)
    assert [record.status for record in outcome.records] == [OK] * 40
    assert all(record.sent < record.times[0] <= record.ended for record in outcome.records)
    assert seen[-1].done == 40


def test_the_message_of_a_first_request_that_is_refused_is_told(place: ServerAddress) -> None:
    with pytest.raises(Unavailable, match=r"the first request failed: HTTP [45]"):
        run_here(load_here(place, InferPayload(b"no request", 10)))


def test_a_server_that_does_not_answer_is_told(place: ServerAddress) -> None:
    with pytest.raises(Unavailable, match="no grpc request of 1 connections was answered"):
        run_load(InferLoad(door="grpc", port=place.http_port, connections=1, seconds=0.2, warm_up=0.0))


def test_a_binary_request_announces_its_header() -> None:
    head, _, body = http_request(InferLoad(door="binary", port=1, connections=1, shape=(2, 3))).partition(b"\r\n\r\n")
    headers = dict(line.split(b": ") for line in head.split(b"\r\n")[1:])
    assert int(headers[b"content-length"]) == len(body)
    assert len(body) - int(headers[b"inference-header-content-length"]) == 24
