"""Repositories whose configs are there and whose models nobody loads."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from charonia.extras.optimizer.tuned_models import TunedModels, open_models

ONNX = 'backend: "onnxruntime"\nmax_batch_size: 8\ninput { name: "X" data_type: TYPE_FP32 dims: 4 }\n'
LLM = 'backend: "charonia"\nparameters { key: "max_num_seqs" value { string_value: "16" } }\n'
GRAPH = """
platform: "ensemble"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: 4 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 }
ensemble_scheduling { step [
  { model_name: "onnx" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "H" } },
  { model_name: "llm" model_version: -1 input_map { key: "X" value: "H" } output_map { key: "Y" value: "Y" } }
] }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, config in {"onnx": ONNX, "llm": LLM, "graph": GRAPH}.items():
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").write_text(config)
    return tmp_path / "models"


@pytest.fixture
def opened(repository: Path) -> Iterator[Callable[[str], TunedModels]]:
    """`opened(name)`: that model, as an analysis opens it."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(open_models(str(repository), name))
