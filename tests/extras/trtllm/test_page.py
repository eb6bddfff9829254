"""docs/tensorrt-llm.md says what there is: every option, and every field of Triton's TensorRT-LLM repositories."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from charonia.engine.options import parse_settings
from charonia.extras.trtllm.options import TrtllmOptions
from charonia.extras.trtllm.token_fields import FIELDS

from ...docs.flag_tables import is_right, written

PAGE = "tensorrt-llm.md"


def test_every_field_stands_there(page: Any, codes: Callable[[str], list[str]]) -> None:
    rows = page(PAGE).rows("inputs")
    told = {name: cells[1].split()[0].strip(";:") for cells in rows for name in codes(cells[0])}
    assert told == {name: field.use.value for name, field in FIELDS.items()}


def test_every_option_stands_there_with_its_default(page: Any) -> None:
    true = {field.name: field.default for field in fields(TrtllmOptions)}
    told = {cells[0].strip("`"): cells[1] for cells in page(PAGE).rows("parameter")}
    assert told.keys() == true.keys()
    assert [name for name, cell in told.items() if not is_right(cell, written(true[name]))] == []


def test_configurations_are_understood(page: Any) -> None:
    models = [fence.text for fence in page(PAGE).fences() if fence.text.startswith("name: ")]
    assert models
    for text in models:
        config = text_format.Parse(text, model_config_pb2.ModelConfig())
        assert config.backend == "tensorrtllm"
        parse_settings({name: value.string_value for name, value in config.parameters.items()}, TrtllmOptions)
