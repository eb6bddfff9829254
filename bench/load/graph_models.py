"""Ensembles to measure: a language model whose tokens pass further steps, and a chain of identity models."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

LLM = "fake"
GRAPH = "graph"
"""The language model, then two steps in the server's process, for each of its responses."""
SCRIPTED = "scripted"
"""The same with a Python step in place of the second."""
IDENTITY = "identity"
CHAIN = "chain"
"""Three identity models."""

_TEXT_STEP = """
backend: "{backend}"
input {{ name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] }}
output {{ name: "SAME" data_type: TYPE_STRING dims: [ -1 ] }}
"""
_NUMBERS = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: 16 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 }
"""
_SCRIPT = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SAME", text)]) for text in texts]
"""
_GRAPH = """
platform: "ensemble"
model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }
"""
_CHAIN = """
platform: "ensemble"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: 16 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 }
"""


def write_graphs(directory: Path, llm: str = LLM, script: bool = False) -> None:
    """Add the ensembles and their steps to the repository `directory`, around its language model `llm`."""
    _write(directory, "first", _TEXT_STEP.format(backend="identity"))
    _write(directory, "second", _TEXT_STEP.format(backend="identity"))
    _write(directory, GRAPH, _GRAPH + _steps(_llm_step(llm), *_text_steps("first", "second")))
    if script:
        (_write(directory, "script", _TEXT_STEP.format(backend="python")) / "model.py").write_text(_SCRIPT)
        _write(directory, SCRIPTED, _GRAPH + _steps(_llm_step(llm), *_text_steps("first", "script")))


def write_chain(directory: Path) -> None:
    """Add `identity` and `chain` to the repository `directory`."""
    _write(directory, IDENTITY, _NUMBERS)
    tensors = ("INPUT0", "one", "two", "OUTPUT0")
    steps = [_step(IDENTITY, {"INPUT0": taken}, {"OUTPUT0": made}) for taken, made in pairwise(tensors)]
    _write(directory, CHAIN, _CHAIN + _steps(*steps))


def _write(directory: Path, name: str, config: str) -> Path:
    (directory / name / "1").mkdir(parents=True)
    (directory / name / "config.pbtxt").write_text(config)
    return directory / name / "1"


def _llm_step(llm: str) -> str:
    return _step(llm, {"text_input": "text_input", "stream": "stream"}, {"text_output": "text"})


def _text_steps(first: str, second: str) -> Sequence[str]:
    return _step(first, {"TEXT": "text"}, {"SAME": "same"}), _step(second, {"TEXT": "same"}, {"SAME": "text_output"})


def _step(model: str, taken: dict[str, str], made: dict[str, str]) -> str:
    maps = [("input_map", taken), ("output_map", made)]
    lines = [f'{kind} {{ key: "{key}" value: "{value}" }}' for kind, pairs in maps for key, value in pairs.items()]
    return f'step {{ model_name: "{model}" model_version: -1 {" ".join(lines)} }}'


def _steps(*steps: str) -> str:
    return "ensemble_scheduling {\n" + "\n".join(steps) + "\n}\n"
