"""Settings of logs and traces: what they take, and which requests a trace is kept of."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.errors import LONGEST_MESSAGE, CharoniaError, InvalidArgument, Unsupported, shorten
from charonia.telemetry.logging_setup import LogControl, LogSettings, parse_log_format
from charonia.telemetry.trace_settings import TraceControl, TraceSettings, TraceSettingsChange

FILE = TraceSettings(trace_file="t.json")
ON: TraceSettingsChange = {"trace_level": ["TIMESTAMPS"], "trace_rate": ["1"]}


def test_log_settings_are_made_true() -> None:
    made: list[LogSettings] = []
    logs = LogControl(LogSettings(log_verbose_level=1), made.append)
    assert logs.settings == LogSettings("", True, True, True, 1, "default")
    quiet = LogSettings(log_info=False, log_format=parse_log_format("ISO8601"))
    assert logs.update(quiet) == logs.settings == quiet
    with pytest.raises(Unsupported, match="log file location can not be updated through network protocol"):
        logs.update(LogSettings(log_file="x"))
    assert (logs.settings, made) == (quiet, [quiet])
    with pytest.raises(InvalidArgument, match="invalid argument for log_format, got: loud"):
        parse_log_format("loud")


def test_trace_settings_as_texts() -> None:
    traces = TraceControl()
    assert {name: list(values) for name, values in traces.settings().as_v2_texts().items()} == {
        "trace_level": ["OFF"],
        "trace_rate": ["1000"],
        "trace_count": ["-1"],
        "log_frequency": ["0"],
        "trace_file": [""],
        "trace_mode": ["triton"],
    }


@pytest.mark.parametrize(
    ("name", "values", "error", "text"),
    [
        ("trace_file", ["x"], Unsupported, "trace file location can not be updated through network protocol"),
        ("trace_level", ["loud"], InvalidArgument, "Unable to parse 'trace_level', got: loud"),
        ("trace_level", ["OFF", "TIMESTAMPS"], InvalidArgument, "Expect only one trace level 'OFF' is specified"),
        ("trace_level", ["false", "on"], InvalidArgument, "Expect only one trace level 'OFF' is specified"),
        ("trace_level", ["TENSORS", "loud"], InvalidArgument, "Unable to parse 'trace_level', got: loud"),
        ("trace_rate", ["often"], InvalidArgument, "Unable to parse 'trace_rate', got: often"),
        ("trace_rate", [""], InvalidArgument, "Unable to parse 'trace_rate', got: "),
        (
            "trace_rate",
            ["0"],
            InvalidArgument,
            "Unable to parse 'trace_rate', value is out of range [ 1, 4294967295 ], got: 0",
        ),
        (
            "trace_count",
            ["-2"],
            InvalidArgument,
            "Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: -2",
        ),
        (
            "log_frequency",
            ["9" * 5000],
            InvalidArgument,
            f"Unable to parse 'log_frequency', value is out of range [ 0, 4294967295 ], got: {'9' * 5000}",
        ),
        ("trace_count", ["1", "2"], InvalidArgument, "expect only 1 value for 'trace_count'"),
        ("trace_mode", ["triton"], InvalidArgument, "unknown trace setting 'trace_mode'"),
    ],
)
def test_wrong_trace_settings(name: str, values: list[str], error: type[CharoniaError], text: str) -> None:
    traces = TraceControl(FILE)
    with pytest.raises(error) as caught:
        traces.update({"trace_count": ["5"], name: values})
    assert caught.value.message == shorten(text, LONGEST_MESSAGE)
    assert traces.settings() == FILE, "nothing of a wrong change is kept"


@pytest.mark.parametrize(
    ("values", "levels"),
    [
        *[([name], ("TIMESTAMPS",)) for name in ("TIMESTAMPS", "MIN", "MAX", "true", "on", "Timestamps")],
        *[([name], ("OFF",)) for name in ("OFF", "off", "false")],
        (["TENSORS", "MAX", "MIN"], ("TIMESTAMPS", "TENSORS")),
        (["tensors"], ("TENSORS",)),
    ],
)
def test_levels_by_all_their_names(values: list[str], levels: tuple[str, ...]) -> None:
    assert TraceControl(FILE).update({"trace_level": values}).trace_level == levels


def test_a_models_own_settings_stand_over_those_of_all() -> None:
    traces, heard = TraceControl(FILE), []
    traces.on_change = lambda: heard.append(1)
    traces.update({"trace_rate": ["7"], "trace_count": ["3"]})
    assert traces.update({"trace_rate": ["2"]}, "m").trace_rate == 2
    assert traces.settings("m").trace_count == 3
    assert traces.settings("other").trace_rate == 7
    traces.update({"trace_count": ["9"]})
    assert (traces.settings("m").trace_count, traces.settings("m").trace_rate) == (9, 2)
    assert traces.update({"trace_rate": None}, "m") == traces.settings()
    assert traces.update({"trace_rate": [], "trace_count": None}) == FILE
    assert len(heard) == 5


def test_a_count_runs_out() -> None:
    traces = TraceControl(FILE)
    traces.update({**ON, "trace_count": ["2"]})
    assert [traces.sample_request("m") is not None for _ in range(4)] == [True, True, False, False]
    assert traces.settings().as_v2_texts()["trace_count"] == ("0",)
    traces.update({"trace_count": ["1"]})
    assert [traces.sample_request("m") is not None for _ in range(2)] == [True, False]


def test_nothing_is_traced_without_a_file_or_a_level() -> None:
    for traces, change in ((TraceControl(), ON), (TraceControl(FILE), {"trace_rate": ["1"]})):
        traces.update(change)
        assert traces.sample_request("m") is None


def at(rate: int) -> Callable[[TraceSettings | None], bool]:
    return lambda picked: picked is not None and picked.trace_rate == rate


@given(st.lists(st.sampled_from(["a", "own"]), max_size=60), st.integers(1, 5), st.integers(1, 5), st.integers(-1, 6))
def test_each_scope_picks_one_in_its_rate_until_its_count(models: list[str], rate: int, own: int, count: int) -> None:
    traces = TraceControl(FILE)
    traces.update({**ON, "trace_rate": [str(rate)], "trace_count": [str(count)]})
    traces.update({"trace_rate": [str(own)]}, "own")
    picked = [model for model in models if traces.sample_request(model) is not None]
    for model, each in (("a", rate), ("own", own)):
        most = models.count(model) // each
        assert picked.count(model) == (most if count < 0 else min(most, count))
