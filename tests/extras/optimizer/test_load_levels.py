"""Levels of load, requests to classic models, and figures out of records made by hand."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.bench.load.driver import LoadRecord
from charonia.bench.load.worker import WorkerOutcome
from charonia.bench.server_process import ServerAddress
from charonia.core.errors import InvalidArgument
from charonia.extras.optimizer.load_levels import (
    LoadLevel,
    LoadSubject,
    infer_payload,
    level_figures,
    plan_levels,
    plan_load,
)
from charonia.extras.optimizer.options import LevelOptions, SearchOptions

PLACE = ServerAddress("127.0.0.1", 1, 2)
INPUTS = [
    {"name": "X", "data_type": "TYPE_FP32", "dims": [2, -1]},
    {"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]},
    {"name": "MASK", "data_type": "TYPE_INT64", "dims": [3], "optional": True},
]
CONFIG = {"name": "m", "max_batch_size": 8, "input": INPUTS}


def test_levels_go_from_light_to_heavy() -> None:
    assert [str(level) for level in plan_levels(LevelOptions(concurrency=(32, 4)))] == [
        "concurrency 4",
        "concurrency 32",
    ]
    assert [level.rate for level in plan_levels(LevelOptions(rate=(9.0, 2.5)))] == [2.5, 9.0]
    assert [level.concurrency for level in plan_levels(LevelOptions())] == [16]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LevelOptions(concurrency=(4,), rate=(2.0,)), "give one of --concurrency, --rate and --trace"),
        (LevelOptions(concurrency=(4, 0)), "concurrency must be above 0"),
        (LevelOptions(new=0), "new must be above 0"),
        (LevelOptions(rate=(float("nan"),)), "rate must be above 0"),
        (LevelOptions(timeout=float("inf")), "timeout must be above 0"),
        (LevelOptions(seed=-1), "seed must be at least 0"),
        (LevelOptions(speedup=2.0), "--speedup is of --trace"),
        (LevelOptions(trace=Path("/none.csv")), "cannot read /none.csv"),
    ],
)
def test_wrong_levels_are_refused(options: LevelOptions, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        plan_levels(options)


def test_a_request_has_every_input_that_must_be_there() -> None:
    payload = infer_payload(CONFIG, LevelOptions(batch=2, shape=("X:2,5",)))
    header, raw = json.loads(payload.body[: payload.header_length]), payload.body[payload.header_length :]
    assert [(each["name"], each["datatype"], each["shape"]) for each in header["inputs"]] == [
        ("X", "FP32", [2, 2, 5]),
        ("TEXT", "BYTES", [2, 1]),
    ]
    numbers, texts = (each["parameters"]["binary_data_size"] for each in header["inputs"])
    assert (numbers, numbers + texts) == (80, len(raw))
    data = np.frombuffer(raw[:numbers], np.float32)
    assert np.unique(data).size > 1
    assert ((data >= 0) & (data < 1)).all()
    assert struct.unpack_from("<I", raw, numbers) == (texts // 2 - 4,)


def test_an_optional_input_is_sent_where_its_shape_is_given_or_nothing_else_is_there() -> None:
    def sent(config: dict[str, object], *shape: str) -> list[str]:
        payload = infer_payload(config, LevelOptions(shape=shape))
        return [each["name"] for each in json.loads(payload.body[: payload.header_length])["inputs"]]

    assert sent(CONFIG, "X:2,5", "MASK:3") == ["X", "TEXT", "MASK"]
    either = [{**each, "optional": True} for each in reversed(INPUTS)]
    assert sent({**CONFIG, "input": either}) == ["MASK"]
    assert sent({**CONFIG, "input": either}, "TEXT:1") == ["TEXT"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LevelOptions(), r"input 'X' has dims \[2, -1\]: say its shape with --shape X:"),
        (LevelOptions(shape=("X:3,5",)), "say its shape with --shape X"),
        (LevelOptions(shape=("X:2",)), "say its shape with --shape X"),
        (LevelOptions(shape=("X",)), "'X' is not of the form NAME:8,128"),
        (LevelOptions(shape=("X:2,0",)), "is not of the form"),
        (LevelOptions(shape=("Z:2",)), "model 'm' has no input 'Z', only X, TEXT, MASK"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(options: LevelOptions, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        infer_payload(CONFIG, options)


def test_a_batch_needs_a_model_that_takes_some() -> None:
    with pytest.raises(InvalidArgument, match="takes no batches"):
        infer_payload({**CONFIG, "max_batch_size": 0, "input": []}, LevelOptions(batch=2))


def test_a_trace_is_played_as_far_as_there_is_time(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n5,30,4\n6,20,5\n9,7,1\n")
    options = LevelOptions(trace=trace, speedup=2.0)
    [level] = plan_levels(options)
    text, classic = LoadSubject(model="m", door="completions"), LoadSubject(model="m")
    jobs = plan_load(text, PLACE, level, options, 1.0, None).jobs
    assert [(job.due, job.prompt, job.new) for job in jobs] == [(0.0, 30, 4), (0.5, 20, 5)]
    jobs = plan_load(classic, PLACE, level, options, 3.0, {**CONFIG, "input": []}).jobs
    assert [(job.due, job.new) for job in jobs] == [(0.0, 1), (0.5, 1), (2.0, 1)]


def record(sent: float, ended: float, status: str = "ok", tokens: int = 0) -> LoadRecord:
    times = [sent + 0.1, ended]
    return LoadRecord(
        index=0,
        due=sent,
        sent=sent,
        ended=ended,
        status=status,
        times=times,
        tokens=tokens,
        prompt_tokens=1,
        frames=2,
        size=9,
    )


def figures(level: LoadLevel, records: list[LoadRecord], door: Any = None, batch: int = 1) -> Any:
    subject, outcome = LoadSubject(model="m", door=door), WorkerOutcome(records, 0.5, 2.0)
    return level_figures(level, subject, LevelOptions(batch=batch), outcome, 2.0, 1e6)


def test_a_closed_loop_is_as_fast_as_its_requests_are_short() -> None:
    """Two at a time, each for half a second: four a second, though the last has hardly begun when the time is over."""
    records = [record(at / 2, at / 2 + 0.5) for at in range(4) for _ in range(2)] + [record(1.99, 2.49)]
    found = figures(LoadLevel(concurrency=2), records, batch=3)
    assert found.throughput == pytest.approx(12.0)
    assert (found.requests, found.failed, found.memory, found.generator) == (9, 0.0, 1e6, 0.25)
    assert found.e2e.p50 == pytest.approx(0.5)
    assert found.ttft is None


def test_an_open_loop_that_cannot_keep_up_is_as_fast_as_it_ends() -> None:
    records = [record(0.0, 4.0, tokens=10), record(1.0, 5.0, tokens=10)]
    found = figures(LoadLevel(rate=1.0), records, door="completions")
    assert found.throughput == pytest.approx(4.0)
    assert found.ttft.p50 == pytest.approx(0.1)
    assert figures(LoadLevel(rate=1.0), [record(0.0, 0.5, tokens=6)], door="completions").throughput == 3.0


def test_what_fails_is_no_throughput() -> None:
    found = figures(LoadLevel(concurrency=1), [record(0.0, 0.5), record(0.5, 0.51, "HTTP 503")])
    assert found.failed == 0.5
    assert found.throughput == pytest.approx(1.0)
    assert figures(LoadLevel(concurrency=1), [record(0.0, 0.1, "timeout")]).throughput == 0.0


def test_a_full_measurement_is_a_fortieth_of_the_budget() -> None:
    assert SearchOptions(budget="2h").full_seconds() == 10
    assert SearchOptions(budget="2m").full_seconds() == 3
    assert SearchOptions(budget="5s").full_seconds() == 0.4
    assert SearchOptions(budget="5s", seconds=3.0).full_seconds() == 3
    with pytest.raises(InvalidArgument, match="seconds must be above 0"):
        SearchOptions(seconds=0.0).full_seconds()
