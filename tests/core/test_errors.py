"""Messages about values of the wrong kind, and about unknown names."""

from typing import Annotated, Any, Literal

import msgspec
import pytest

from charonia.core.errors import (
    LONGEST_REPORT,
    Internal,
    InvalidArgument,
    SentError,
    describe_validation_error,
    did_you_mean,
    error_from_code,
)


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    words: tuple[str, ...] = ()
    weights: dict[int, float] = {}


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    count: Annotated[int, msgspec.Meta(ge=1, le=9)] | None = None
    inner: list[Inner] = []
    either: str | list[str] | None = None
    kind: Literal["json", "yaml"] = "json"
    share: float = 1.0
    wanted: bool = False


@pytest.mark.parametrize(
    ("value", "path", "said"),
    [
        ({}, "name", "is missing"),
        ({"name": "a", "nmae": 1}, "nmae", "is unknown"),
        ({"name": None}, "name", "must be a string, got null"),
        ({"name": "a", "count": "b"}, "count", "must be an integer, got a string"),
        ({"name": "a", "count": 1e30}, "count", "must be an integer of at most 64 bits, got a number"),
        ({"name": "a", "count": 0}, "count", "must be an integer >= 1"),
        ({"name": "a", "count": 10}, "count", "must be an integer <= 9"),
        ({"name": "a", "inner": {}}, "inner", "must be a list, got an object"),
        ({"name": "a", "inner": [{"words": ["a", 1]}]}, "inner[0].words[1]", "must be a string, got an integer"),
        ({"name": "a", "inner": [{"weights": {"b": 1}}]}, "inner[0].weights", "must be an integer, got a string"),
        ({"name": "a", "inner": [{"weights": {1: "b"}}]}, "inner[0].weights[...]", "must be a number, got a string"),
        ({"name": "a", "inner": [{"x": 1}]}, "inner[0].x", "is unknown"),
        ({"name": "a", "either": 1}, "either", "must be a string or a list, got an integer"),
        ({"name": "a", "kind": "xml"}, "kind", "is wrong: Invalid enum value 'xml'"),
        ({"name": "a", "share": []}, "share", "must be a number, got a list"),
        ({"name": "a", "wanted": 3}, "wanted", "must be a boolean, got an integer"),
        ([], "", "must be an object, got a list"),
    ],
)
def test_what_is_wrong_and_where(value: Any, path: str, said: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refusal:
        msgspec.convert(value, Outer)
    found = describe_validation_error(refusal.value)
    assert (found.path, str(found)) == (path, said)


KNOWN = ("max_tokens", "temperature", "top_k", "top_p", "stop", "n")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_tokenss", "max_tokens"),
        ("MAX_TOKENS", "max_tokens"),
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("stream", ""),
        ("", ""),
        ("max_tokens" * 1_000_000, ""),
    ],
)
def test_a_similar_name_is_suggested(name: str, meant: str) -> None:
    assert did_you_mean(name, KNOWN) == (f"; did you mean '{meant}'?" if meant else "")


def test_a_message_is_cut_and_what_a_model_says_later() -> None:
    error = InvalidArgument("x" * 100_000, field="y" * 1000)
    assert len(error.message) <= 4096
    assert error.message.endswith("... (100000 characters)")
    assert str(error) == error.message
    assert len(error.field or "") <= 256
    assert InvalidArgument("x" * 4096).message == "x" * 4096
    assert len(error_from_code("INTERNAL", "x" * 100_000).message) == LONGEST_REPORT - 32 + len(
        "... (100000 characters)"
    )


def test_an_error_that_is_none_of_ours_crosses_as_an_internal_one() -> None:
    error = SentError.of(ValueError("disk")).error()
    assert type(error) is Internal
    assert (error.message, error.field) == ("ValueError: disk", None)


def test_a_long_report_is_not_cut_where_it_arrives() -> None:
    report = InvalidArgument("x" * 10_000, longest=LONGEST_REPORT)
    assert SentError.of(report).error().message == report.message
