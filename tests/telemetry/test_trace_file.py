"""Traces in files: what is in them, when they are whole, and when a new one begins."""

import json
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.request import InferResponse
from charonia.core.request_context import ExecutionTimes, RequestContext
from charonia.core.tensor import Tensor
from charonia.telemetry.request_trace import TraceFileWriter, check_trace_file, request_trace, trace_tensors
from charonia.telemetry.trace_settings import SpanSettings, TraceControl, TraceSettings, parse_trace_config


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def tracing(path: Path, **settings: Any) -> tuple[TraceControl, TraceFileWriter]:
    traces = TraceControl(
        TraceSettings(**{"trace_level": ("TIMESTAMPS",), "trace_rate": 1, "trace_file": str(path), **settings})
    )
    return traces, TraceFileWriter(traces)


def ended(model: str = "m", request_id: str = "", found: bool = True) -> RequestContext:
    context = RequestContext("infer")
    context.id, context.model, context.version, context.model_found = request_id, model, "3", found
    context.finish()
    context.close()
    return context


def written(path: Path) -> list[dict[str, Any]]:
    objects: list[dict[str, Any]] = json.loads(path.read_text())
    return objects


def ids(path: Path) -> list[int]:
    return [each["id"] for each in written(path) if "timestamps" in each]


def test_a_trace_says_what_was_asked_and_when(path: Path) -> None:
    _, file = tracing(path)
    context = ended("m", "r1")
    file(context)
    file(ended(found=False))
    file.close()
    asked, times = json.loads(path.read_text())
    assert asked == {"id": 1, "model_name": "m", "model_version": 3, "request_id": "r1"}
    assert times["id"] == 1
    stamps = {timestamp["name"]: timestamp["ns"] for timestamp in times["timestamps"]}
    arrived, answered, ended_ = (int(1e9 * at) for at in (context.arrived_at, context.answered_at, context.ended_at))
    assert stamps == {
        "HTTP_RECV_START": arrived,
        "REQUEST_START": arrived,
        "REQUEST_END": answered,
        "INFER_RESPONSE_COMPLETE": answered,
        "HTTP_SEND_START": answered,
        "HTTP_SEND_END": ended_,
    }
    assert arrived <= answered <= ended_


def test_what_was_refused_has_no_answer(path: Path) -> None:
    _, file = tracing(path)
    context = RequestContext("ModelInfer")
    context.model, context.model_found = "m", True
    context.fail(InvalidArgument("no"))
    context.close()
    file(context)
    file.close()
    [_, times] = json.loads(path.read_text())
    names = ["GRPC_WAITREAD_START", "REQUEST_START", "REQUEST_END", "GRPC_SEND_END"]
    assert [timestamp["name"] for timestamp in times["timestamps"]] == names


def test_a_trace_of_a_classic_model_says_what_was_done_when(path: Path) -> None:
    _, file = tracing(path)
    context = ended()
    context.execution = ExecutionTimes(queued=100, begun=250, spent=(10, 20, 30))
    file(context)
    file.close()
    [_, times] = json.loads(path.read_text())
    assert [(timestamp["name"], timestamp["ns"]) for timestamp in times["timestamps"][1:8]] == [
        ("HTTP_RECV_END", 100),
        ("REQUEST_START", 100),
        ("QUEUE_START", 100),
        ("COMPUTE_START", 250),
        ("COMPUTE_INPUT_END", 260),
        ("COMPUTE_OUTPUT_START", 280),
        ("COMPUTE_END", 310),
    ]


async def answered(responses: list[InferResponse], ended: list[bool]) -> AsyncGenerator[InferResponse, None]:
    try:
        for response in responses:
            yield response
    finally:
        ended.append(True)


async def test_tensors_are_written_as_they_passed(path: Path) -> None:
    traces, file = tracing(path, trace_level=("TENSORS",), trace_rate=2)
    lent = np.array([[0.1, 1e-30, np.nan]], np.float32)
    inputs = [Tensor.from_values("IN", "FP32", lent), Tensor.from_values("TEXT", "BYTES", [b"a,b", b"\xff\xc3\xa9"])]
    made = [
        Tensor.from_values("OUT", "BOOL", [True, False]),
        Tensor.from_values("HALF", "BF16", np.array(0x3F80, np.uint16)),
    ]
    for model in ("not picked", "m"):
        context, ended = RequestContext("infer"), list[bool]()
        context.model, context.version, context.model_found = model, "3", True
        context.execution = ExecutionTimes(1, 2, (3, 4, 5))
        ask = partial(answered, [InferResponse((each,)) for each in made], ended)
        trace = request_trace(context, traces)
        answers = ask() if trace is None else trace_tensors(trace, inputs, ask)
        lent[:] = 7  # a client may, as soon as it is answered
        assert [response.outputs[0] async for response in answers] == made
        lent[:] = [0.1, 1e-30, np.nan]
        context.close()
        file(context)
        assert ended == [True]
    file.close()
    first, *said = written(path)
    assert first == {"id": 1, "model_name": "m", "model_version": 3}
    given = [
        {"name": "IN", "data": "0.1,1e-30,nan", "shape": "1,3", "dtype": "FP32"},
        {"name": "TEXT", "data": '"a,b","\\xffé"', "shape": "2", "dtype": "BYTES"},
    ]
    outputs = [
        {"name": "OUT", "data": "1,0", "shape": "2", "dtype": "BOOL"},
        {"name": "HALF", "data": "1", "shape": "", "dtype": "BF16"},
    ]
    activities = (("QUEUE_INPUT", given), ("BACKEND_INPUT", given), ("BACKEND_OUTPUT", outputs))
    expected = [(f"TENSOR_{name}", tensor) for name, tensors in activities for tensor in tensors]
    assert [(each["activity"], each["tensor"]) for each in said] == expected


async def test_a_tensor_without_end_is_cut(path: Path) -> None:
    traces, file = tracing(path, trace_level=("TENSORS",), trace_count=1)
    large = [
        Tensor.from_values("N", "INT32", np.arange(1 << 20)),
        *[Tensor.from_values("S", "BYTES", [b"x" * 100] * 10000)] * 5,
    ]
    context = RequestContext("infer")
    context.model_found = True
    responses = [InferResponse((Tensor.from_values("OUT", "INT8", [number % 100]),)) for number in range(3000)]
    trace = request_trace(context, traces)
    assert trace is not None
    answers = trace_tensors(trace, large, partial(answered, responses, []))
    assert len([response async for response in answers]) == 3000
    context.close()
    file(context)
    said = [each for each in written(path.with_name("trace.json.0")) if "tensor" in each]
    assert said[0]["tensor"]["data"].endswith("16382,16383,...")
    assert 200_000 < len(said[1]["tensor"]["data"]) < 300_000
    assert (said[5]["activity"], said[5]["tensor"]["data"]) == ("TENSOR_QUEUE_INPUT", "...")
    assert [each["activity"] for each in said[6:]] == ["TENSOR_BACKEND_OUTPUT"] * 1024


def test_the_file_is_whole_when_those_picked_last_end_first(path: Path) -> None:
    traces, file = tracing(path, trace_count=2)
    first, last = ended(request_id="first"), ended(request_id="last")
    for context in (first, last):
        request_trace(context, traces)
    for context in (last, first):
        file(context)
    asked = [each.get("request_id") for each in written(path.with_name("trace.json.0"))]
    assert asked == ["last", None, "first", None]


def test_the_file_is_whole_when_a_count_is_out_a_setting_changed_or_at_the_end(path: Path) -> None:
    traces, file = tracing(path)
    file(ended())
    for number, count in enumerate((2, 1)):
        traces.update({"trace_count": [str(count)]})
        for _ in range(3):
            file(ended())
        assert len(ids(path.with_name(f"trace.json.{number}"))) == count
    traces.update({"trace_count": ["-1"]})
    file(ended())
    traces.update({"trace_level": ["OFF"]})
    assert ids(path) == [1, 5]
    traces.update({"trace_level": ["TIMESTAMPS"]})
    file(ended())
    file.close()
    file.close()
    assert ids(path) == [1, 5, 6]
    assert len(list(path.parent.iterdir())) == 3


def test_a_file_for_every_so_many_traces(path: Path) -> None:
    _, file = tracing(path, log_frequency=2)
    for _ in range(5):
        file(ended())
    file.close()
    assert [ids(path.with_name(f"trace.json.{number}")) for number in range(3)] == [[1, 2], [3, 4], [5]]
    assert len(list(path.parent.iterdir())) == 3


def test_a_file_that_cannot_be_written_is_told_and_hurts_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "no" / "such"
    _, file = tracing(path)
    for _ in range(3):
        file(ended())
    file.close()
    begun, over = sorted(capfd.readouterr().err.splitlines(), reverse=True)
    assert begun == f"charonia: cannot write traces to {path}: No such file or directory"
    assert over == f"charonia: 3 traces are lost: {path} could not be written"


@pytest.mark.parametrize("frequency", [1, 0])
def test_a_disk_that_was_full_is_told_again_when_it_is_full_again(
    path: Path, capfd: pytest.CaptureFixture[str], frequency: int
) -> None:
    _, file = tracing(path, log_frequency=frequency)
    folder, away = path.parent, path.parent.with_name("away")
    for _ in range(2):
        file(ended())
        file.close()
        folder.rename(away)
        for _ in range(3):
            file(ended())
        away.rename(folder)
    file.close()
    said = capfd.readouterr().err
    assert (said.count("cannot write traces"), said.count("3 traces are lost")) == (2, 2)


def test_a_file_that_was_removed_is_told_and_a_change_of_settings_goes_through(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    traces, file = tracing(path)
    file(ended())
    file(ended())
    path.unlink()
    traces.update({"trace_level": ["OFF"]})
    file.close()
    said = capfd.readouterr().err
    assert f"cannot write traces to {path}: it was removed\n" in said
    assert "2 traces are lost" in said


def test_a_full_disk_is_told_when_the_file_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    _, file = tracing(Path("/dev/full"))
    file(ended())
    file.close()
    said = capfd.readouterr().err
    assert "cannot write traces to /dev/full: No space left on device\n" in said
    assert "1 traces are lost" in said


def test_traces_of_a_removed_file_are_lost_and_the_next_have_a_new_one(path: Path) -> None:
    _, file = tracing(path)
    for _ in range(2):
        file(ended())
        path.unlink(missing_ok=True)
    file(ended())
    file.close()
    assert ids(path) == [3]


def test_without_a_file_it_is_said_that_nothing_is_traced(caplog: pytest.LogCaptureFixture) -> None:
    TraceControl().update({"trace_level": ["TIMESTAMPS"]})
    assert "nothing is traced: trace file name is not given" in caplog.text


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ([], TraceSettings()),
        (
            ["mode=triton", "triton,file=/t", "triton,log-frequency=5", "level=TIMESTAMPS", "rate=10", "count=7"],
            TraceSettings(("TIMESTAMPS",), 10, 7, 5, "/t"),
        ),
        (["file=a=b"], TraceSettings(trace_file="a=b")),
        (["level=MAX", "level=TENSORS", "level=min"], TraceSettings(("TIMESTAMPS", "TENSORS"))),
        (["level=tensors", "level=off"], TraceSettings()),
        (["level=false", "level=true"], TraceSettings(("TIMESTAMPS",))),
        (["opentelemetry,bsp_schedule_delay=1"], TraceSettings()),
        (
            ["opentelemetry,url=http://c/t", "opentelemetry,resource=service.name=ferry", "mode=OpenTelemetry"],
            TraceSettings(spans=SpanSettings("http://c/t", (("service.name", "ferry"),))),
        ),
    ],
)
def test_what_the_server_starts_with(words: list[str], settings: TraceSettings) -> None:
    assert parse_trace_config(words) == settings


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("rate=often", "--trace-config rate=often: Unable to parse 'trace_rate', got: often"),
        ("level=loud", "--trace-config level=loud: Unable to parse 'trace_level', got: loud"),
        ("rate", "--trace-config rate: expected mode, or a setting of level, rate, count, log-frequency, file"),
        ("mode=none", "--trace-config mode=none: expected mode, or a setting of level, rate, count"),
        ("opentelemetry,url=x", "--trace-config opentelemetry,url=x: expected url=http://..., resource=<key>=<value>,"),
        ("opentelemetry,resource=x", "--trace-config opentelemetry,resource=x: expected"),
        ("opentelemetry,bsp_schedule_delay=0", "--trace-config opentelemetry,bsp_schedule_delay=0: expected"),
    ],
)
def test_what_it_cannot_start_with(word: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_trace_config([word])
    assert caught.value.message.startswith(text)


@pytest.mark.parametrize(("name", "wrong"), [("no/t", "there is no directory '{0}/no'"), ("", "it is a directory")])
def test_a_file_that_cannot_be_written_is_told_at_the_start(tmp_path: Path, name: str, wrong: str) -> None:
    file = str(tmp_path / name)
    with pytest.raises(InvalidArgument) as caught:
        check_trace_file(parse_trace_config([f"file={file}"]))
    assert caught.value.message == f"--trace-config file={file}: {wrong.format(tmp_path)}"


@pytest.mark.parametrize("words", [["file={0}/new"], ["file={0}/old"], ["file={0}", "log-frequency=2"], []])
def test_a_file_that_can_be_written_is_not_yet(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "old").write_text("what there was")
    check_trace_file(parse_trace_config([word.format(tmp_path) for word in words]))
    assert [entry.name for entry in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "what there was"
