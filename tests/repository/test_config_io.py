"""Configs as they are written, and in the one form that they have inside; errors name file, line and field."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from charonia.core.errors import InvalidArgument
from charonia.repository.config_io import (
    complete_fields,
    find_config,
    line_of,
    parse_config_file,
    parse_config_override,
    parse_config_text,
)

TEXT = """
name: "m" max_batch_size: 4  # a comment
input [ { name: 'A' data_type: TYPE_FP32 dims: [ 2, -1 ] }, { name: "B" data_type: TYPE_STRING dims: 1 dims: 2 } ]
dynamic_batching {
  max_queue_delay_microseconds: 9007199254740993
  priority_queue_policy { key: 2 value { max_queue_size: 3 } }
}
parameters { key: "k" value { string_value: "v" } }
"""
YAML = """
name: m
max_batch_size: 4
input:
  - {name: A, data_type: TYPE_FP32, dims: [2, -1]}
  - {name: B, data_type: TYPE_STRING, dims: [1, 2]}
dynamic_batching:
  max_queue_delay_microseconds: 9007199254740993
  priority_queue_policy: {2: {max_queue_size: 3}}
parameters: {k: {string_value: v}}
"""


def test_one_config_in_three_forms(tmp_path: Path) -> None:
    import yaml

    (tmp_path / "config.pbtxt").write_text(TEXT)
    (tmp_path / "config.yaml").write_text(YAML)
    (tmp_path / "config.json").write_text(json.dumps(yaml.safe_load(YAML)))
    configs = [parse_config_file(tmp_path / f"config.{suffix}") for suffix in ("pbtxt", "yaml", "json")]
    assert configs[0] == configs[1] == configs[2]
    assert parse_config_override(json.dumps(configs[0])) == configs[0]


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("config.pbtxt", 'name: "m"\nbogus: 1', "config.pbtxt:2:1 : "),
        ("config.pbtxt", "input {", "config.pbtxt:1:"),
        ("config.yaml", "name: m\nbogus: 1", 'config.yaml:2: bogus: Message type "inference.ModelConfig" has no field'),
        ("config.yaml", "name: m\ninput:\n- dims: [a]", "config.yaml:3: input.dims: invalid literal"),
        (
            "config.yaml",
            "input:\n- name: A\n  data_type: TYPE_FP31",
            "config.yaml:3: input.data_type: Invalid enum value",
        ),
        ("config.yaml", "name: [m", "config.yaml:1:"),
        ("config.yaml", "- name", "a config is a mapping of fields to values, not list"),
        ("config.yml", "name: 3", "config.yml:1: name: expected string"),
        ("config.json", '{"name": "m",\n}', "config.json:2:1: "),
        ("config.json", '{\n"dynamic_batching": 3}', "config.json:2: dynamic_batching: "),
        ("config.json", '{"version_policy": {"latest": {}, "all": {}}}', "config.json:1: version_policy: "),
        ("config.yaml", "name: 2026-13-41", "failed to read YAML from "),
        ("config.yaml", "max_batch_size: " + "9" * 5000, "failed to read YAML from "),
        ("config.yaml", "[" * 5000, "failed to read YAML from "),
        ("config.json", '{"max_batch_size": ' + "9" * 5000, "failed to read JSON from "),
        ("config.json", "[" * 100_000, "failed to read JSON from "),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, file: str, text: str, says: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        parse_config_file(tmp_path / file)
    assert says in caught.value.message
    assert "\n" not in caught.value.message


def test_finding_the_one_config(tmp_path: Path) -> None:
    assert find_config(tmp_path) is None
    (tmp_path / "config.yaml").write_text("")
    assert find_config(tmp_path, "custom") == tmp_path / "config.yaml"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "custom.pbtxt").write_text("")
    assert find_config(tmp_path, "custom") == tmp_path / "configs" / "custom.pbtxt"
    (tmp_path / "config.json").write_text("")
    with pytest.raises(InvalidArgument, match="a model has one config"):
        find_config(tmp_path)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Path.mkdir, r"failed to read text proto from .*/config\.pbtxt: Is a directory"),
        (lambda path: path.symlink_to("nowhere"), r"failed to read text proto from .*/config\.pbtxt: No such file"),
        (os.mkfifo, r"config\.pbtxt is a named pipe"),
    ],
    ids=["directory", "link", "pipe"],
)
def test_a_config_that_is_no_file_is_no_missing_one(tmp_path: Path, make: Callable[[Path], Any], says: str) -> None:
    make(tmp_path / "config.pbtxt")
    file = find_config(tmp_path)
    assert file is not None
    with pytest.raises(InvalidArgument, match=says):
        parse_config_file(file)
    (tmp_path / "config.yaml").write_text("")
    assert find_config(tmp_path) == tmp_path / "config.yaml"


def test_an_empty_config_is_none_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("# nothing yet\n")
    assert parse_config_file(tmp_path / "config.yaml") == complete_fields({})


def test_what_is_shown() -> None:
    before, _, after = TEXT.partition("dynamic_batching")
    _, _, after = after.partition("\n}\n")
    shown = parse_config_text(before + "sequence_batching { direct { minimum_slot_utilization: 0.1 } }" + after)
    order = [field.name for field in model_config_pb2.ModelConfig.DESCRIPTOR.fields]
    assert [name for name in order if name in shown] == list(shown)
    assert shown["output"] == []
    assert shown["platform"] == ""
    assert "optimization" not in shown
    assert shown["input"][1]["dims"] == [1, 2]
    assert "reshape" not in shown["input"][0]
    assert shown["parameters"] == {"k": {"string_value": "v"}}
    assert shown["sequence_batching"]["direct"]["minimum_slot_utilization"] == 0.1


FIELDS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "name": st.text(),
        "max_batch_size": st.integers(-(2**31), 2**31 - 1),
        "input": st.lists(
            st.fixed_dictionaries(
                {"name": st.text(), "dims": st.lists(st.integers(-(2**63), 2**63 - 1))},
                optional={"reshape": st.fixed_dictionaries({"shape": st.lists(st.integers(1, 9))})},
            ),
            max_size=3,
        ),
        "metric_tags": st.dictionaries(st.text(), st.text(), max_size=3),
        "sequence_batching": st.just({"direct": {"minimum_slot_utilization": 0.7}}),
    },
)


@given(FIELDS)
def test_plain_json_is_what_was_written(fields: dict[str, Any]) -> None:
    config = complete_fields(fields)
    plain = json.loads(json.dumps(config))
    assert complete_fields(plain) == config
    # What the gRPC endpoint and clients do with it.
    written = json_format.ParseDict(fields, model_config_pb2.ModelConfig())
    assert json_format.ParseDict(plain, model_config_pb2.ModelConfig()) == written


def test_the_line_of_a_path() -> None:
    text = "input {\n name: A\n dims: 1 }\ninput {\n name: B\n dims: 2 }"
    assert [line_of(text, path) for path in ("", "no", "input", "input.B", "input.B.dims", "input.B.no")] == [
        0,
        0,
        1,
        5,
        6,
        5,
    ]
