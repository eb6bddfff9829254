"""Configs as the repository hands them to runtimes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from charonia.core.model import ModelConfig
from charonia.core.tensor import TensorSpec


@pytest.fixture(scope="session")
def onnx_models(sibling: Callable[[str], ModuleType]) -> ModuleType:
    return sibling("onnx_models.py")


def spec(tensor: Mapping[str, Any]) -> TensorSpec:
    datatype = tensor["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
    return TensorSpec(tensor["name"], datatype, tuple(tensor["dims"]), tensor.get("optional", False))


@pytest.fixture
def described() -> Callable[..., ModelConfig]:
    """The `ModelConfig` of a raw config."""

    def describe(raw: Mapping[str, Any]) -> ModelConfig:
        return ModelConfig(
            name=raw.get("name", "model"),
            version="1",
            backend=raw.get("backend", ""),
            max_batch_size=raw.get("max_batch_size", 0),
            inputs=tuple(map(spec, raw.get("input", ()))),
            outputs=tuple(map(spec, raw.get("output", ()))),
            raw=raw,
        )

    return describe


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """The directory of a model's version."""
    directory = tmp_path / "model" / "1"
    directory.mkdir(parents=True)
    return directory
