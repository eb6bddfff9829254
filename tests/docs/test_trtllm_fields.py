"""The table of fields of Triton's TensorRT-LLM repositories in the docs is the one that the code has."""

from collections.abc import Callable
from typing import Any

from charonia.engine.trtllm_layouts.token_fields import FIELDS


def test_every_field_stands_there(page: Any, codes: Callable[[str], list[str]]) -> None:
    rows = page("tensorrt-llm.md").rows("inputs")
    told = {name: cells[1].split()[0].strip(";:") for cells in rows for name in codes(cells[0])}
    assert told == {name: field.use.value for name, field in FIELDS.items()}
