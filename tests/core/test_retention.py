"""What requests say of retention, in both ways that clients have for it."""

from typing import Any

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.retention import SESSION_PRIORITY, Retention, RetentionRange, parse_retention


def test_directives_are_those_proposed_to_vllm() -> None:
    directives = [{"start": 0, "end": 16384, "priority": 90, "duration": 30.5}, {"start": 16384, "end": None}]
    assert parse_retention(directives, "run-7", None) == Retention(
        "run-7", (RetentionRange(0, 16384, 90, 30.5), RetentionRange(16384, None, 35, None))
    )


def test_a_scope_alone_asks_to_keep_all() -> None:
    assert parse_retention(None, "run-7", None) == Retention("run-7", (RetentionRange(priority=SESSION_PRIORITY),))
    assert parse_retention("", "", "") is parse_retention(None, None, None) is None


@pytest.mark.parametrize("as_text", [False, True])
def test_tensorrt_llms_config_has_milliseconds_and_a_priority_of_what_is_generated(as_text: bool) -> None:
    config: Any = {
        "token_range_retention_configs": [{"token_start": 0, "token_end": 100, "priority": 80, "duration_ms": 2500}],
        "decode_retention_priority": 10,
        "decode_duration_ms": None,
    }
    if as_text:
        config = str(config).replace("'", '"').replace("None", "null")
    wish = parse_retention(None, None, config)
    assert wish == Retention("", (RetentionRange(0, 100, 80, 2.5),), RetentionRange(priority=10))
    assert wish is not None
    assert [wish.at(position, 150) for position in (0, 99, 100, 150)] == [
        *[wish.ranges[0]] * 2,
        None,
        wish.generated,
    ]


@pytest.mark.parametrize(
    ("directives", "scope", "config", "says"),
    [
        ([{"start": -1}], "a", None, r"retention_directives.*start"),
        ([{"priority": 101}], "a", None, r"retention_directives.*priority"),
        ([{"begin": 1}], "a", None, r"retention_directives.*begin"),
        ([{"start": 9, "end": 8}], "a", None, r"retention_directives: a range ends at 8, before it starts, at 9"),
        ([{}] * 65, "a", None, r"retention_directives.*64"),
        ("[", "a", None, r"retention_directives is not JSON"),
        (None, "a" * 257, None, r"retention_scope must be a string of at most 256"),
        (None, "a\n", None, r"retention_scope must be"),
        (None, 7, None, r"retention_scope must be"),
        ([{}], "a", {"decode_retention_priority": 1}, r"not both"),
        (None, "", {"decode_retention_priority": "high"}, r"kv_cache_retention_config.*decode_retention_priority"),
    ],
)
def test_what_is_malformed_is_refused_by_name(directives: Any, scope: Any, config: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        parse_retention(directives, scope, config)
