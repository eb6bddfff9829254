"""What a language model needs of the host's memory before it loads, and what it is granted."""

import json
from pathlib import Path
from typing import Any

import pytest

from charonia.core.errors import InvalidArgument
from charonia.engine.build import host_memory_needed, language_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    for number, size in ((1, 600), (2, 400)):
        (tmp_path / f"model-{number}.safetensors").write_bytes(bytes(size))
    (tmp_path / "tokenizer.json").write_bytes(bytes(50))
    return tmp_path


@pytest.mark.parametrize(
    ("parameters", "gpu", "needed"),
    [
        ({}, False, 1000),
        ({"dtype": "float32"}, False, 2000),
        ({"quantization": "int8"}, False, 500),
        ({"kv_cache_bytes": "70"}, False, 1070),
        ({"kv_cache_bytes": "70", "data_parallel_size": "2"}, False, 2140),
        ({}, True, 0),
        ({"device": "cpu"}, True, 1000),
        ({"device": "cuda"}, False, 0),
        ({"executor": "fake"}, False, 0),
        ({"distributed_executor_backend": "ray", "kv_cache_bytes": "70"}, False, 0),
    ],
)
def test_weights_are_needed_as_they_will_be(
    checkpoint: Path, parameters: dict[str, str], gpu: bool, needed: int
) -> None:
    assert host_memory_needed(str(checkpoint), parameters, gpu) == needed
    assert host_memory_needed("/nowhere", {**parameters, "model": str(checkpoint)}, gpu) == needed


def test_what_is_to_be_downloaded_yet_is_not_known() -> None:
    assert host_memory_needed("someone/something", {}, False) == 0


def test_wrong_parameters_are_refused_by_name(checkpoint: Path) -> None:
    with pytest.raises(InvalidArgument, match="unknown parameter 'bogus'"):
        host_memory_needed(str(checkpoint), {"bogus": "1"}, False)


def test_a_core_is_told_what_it_may_take(checkpoint: Path) -> None:
    model: Any = language_model("m", "1", str(checkpoint), {}, lambda *phase: None, memory=123)
    assert [each._core._config.host_memory for each in model.client.replicas] == [123]
    free: Any = language_model("m", "1", str(checkpoint), {}, lambda *phase: None)
    assert [each._core._config.host_memory for each in free.client.replicas] == [None]
