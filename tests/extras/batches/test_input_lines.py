"""Input files: which lines are requests, and what is said of those that are none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.extras.batches import input_lines
from charonia.extras.batches.input_lines import BatchLine, asks_for_stream, check_input, find_lines, read_line

PATH = "/v1/completions"


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., Any]:
    def run(content: bytes, most: int = 50) -> Any:
        (tmp_path / "input").write_bytes(content)
        return check_input(tmp_path / "input", PATH, most)

    return run


def test_lines_are_found_and_read_again(check: Any, line: Any, tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + line(0) + b"\r\n  \n" + line(1) + b"\n" + line(2).rstrip()
    found = check(content)
    assert found.errors == []
    assert found.model == "llm"
    assert find_lines(tmp_path / "input") == found.offsets
    read = [read_line(tmp_path / "input", found.offsets, index) for index in range(3)]
    assert [each.custom_id for each in read] == ["r0", "r1", "r2"]
    assert json.loads(bytes(read[2].body)) == {"model": "llm", "prompt": "p2"}


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        (b"{\n", "invalid_json_line", None),
        (b'{"custom_id": "\xff"}\n', "invalid_json_line", None),
        (
            b'{"custom_id": "\\ud800", "method": "POST", "url": "/v1/completions", "body": {}}\n',
            "invalid_json_line",
            None,
        ),
        (b"[" * 100_000 + b"\n", "invalid_request", None),
        (b"[]\n", "invalid_request", None),
        (b'{"method": "POST"}\n', "missing_required_parameter", "custom_id"),
        (b'{"custom_id": 7, "method": "POST", "url": "/v1/completions", "body": {}}\n', "invalid_request", "custom_id"),
    ],
)
def test_what_is_no_request_is_named_by_its_line(check: Any, line: Any, wrong: bytes, code: str, param: Any) -> None:
    found = check(line(0) + wrong + line(2))
    assert [(error.line, error.code, error.param) for error in found.errors] == [(2, code, param)]


@pytest.mark.parametrize(
    ("members", "code", "param"),
    [
        ({"custom_id": "r0"}, "duplicate_custom_id", "custom_id"),
        ({"custom_id": ""}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "x" * 513}, "invalid_custom_id", "custom_id"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/chat/completions"}, "mismatched_url", "url"),
        ({"body": {"model": "other"}}, "mismatched_model", "body.model"),
        ({"body": {"prompt": "x"}}, "missing_required_parameter", "body.model"),
        ({"body": {"model": 7}}, "invalid_request", "body.model"),
        ({"body": "x"}, "invalid_request", "body"),
    ],
)
def test_what_does_not_fit_the_batch_is_named(check: Any, line: Any, members: Any, code: str, param: str) -> None:
    found = check(line(0) + line(1, **members))
    assert [(error.line, error.code, error.param) for error in found.errors] == [(2, code, param)]


def test_a_file_may_have_as_many_lines_as_a_batch_and_no_more(check: Any, line: Any) -> None:
    lines = [line(number) for number in range(51)]
    assert check(b"".join(lines[:50])).errors == []
    [error] = check(b"".join(lines)).errors
    assert (error.code, error.line) == ("too_many_requests", 51)


def test_an_empty_file_and_endless_errors_are_told(check: Any) -> None:
    assert [error.code for error in check(b"\n \n").errors] == ["empty_file"]
    assert [(error.code, error.line) for error in check(b"\n" * 1000).errors] == [("too_many_requests", 500)]
    assert check(b"\n" * 498 + b"{}\n").errors[0].line == 499
    assert len(check(b"x\n" * 1000, most=5000).errors) == input_lines.MAX_LISTED_ERRORS


def test_a_line_that_is_too_long_is_passed_over(check: Any, line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_lines, "MAX_LINE_BYTES", 300)
    monkeypatch.setattr(input_lines, "_READ_BYTES", 64)
    for size in (299, 300, 301, 700, 5000):
        found = check(line(0) + line(1, body={"model": "llm", "prompt": "x" * size}) + line(2))
        assert [(error.line, error.code) for error in found.errors] == [(2, "line_too_long")]
        assert len(found.offsets) == 4


def test_streams_are_seen(line: Any) -> None:
    for value, streams in ((True, True), (False, False), (None, False)):
        parsed = input_lines.parse_line(line(0, body={"model": "llm", "stream": value}))
        assert isinstance(parsed, BatchLine)
        assert asks_for_stream(parsed) is streams


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=30).filter(lambda text: b"\n" not in text), max_size=20))
def test_any_bytes_are_checked_and_every_line_has_its_number(tmp_path_factory: Any, texts: list[bytes]) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(b"\n".join(texts))
    numbers = [number for number, _, text in input_lines.split_lines(path) if text]
    told = [number for number, text in enumerate(texts, 1) if text.strip() not in (b"", b"\xef\xbb\xbf")]
    assert numbers == told
    assert [error.line for error in check_input(path, PATH, 50).errors if error.line] == told
