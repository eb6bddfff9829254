"""Makes models for `charonia import` out of those that no backend reads: pickled forests that the user trusts, and
TensorFlow's SavedModels. Each is made in a process of its own.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ..core.errors import InvalidArgument, Unsupported
from .import_plan import MODEL_FILES, SAVED_MODEL, ImportPlan, file_plan, forest_plan, guess_model_name

_UNSUPPORTED_OPERATORS = re.compile(r"Unsupported ops: Counter\(\{(.*)\}\)")
"""What tf2onnx says where it goes on and writes a model that nothing runs."""


def unpickle_forest(source: Path, directory: Path) -> ImportPlan:
    """A forest whose pickle is trusted: run in a process of its own, into a checkpoint in `directory`."""
    made = directory / f"{source.stem}.tl"
    module = f"{__package__.partition('.')[0]}.classic_backends.pickled_forests"
    command = [sys.executable, "-m", module, str(source), str(made)]
    run = _run(command)
    if run.returncode or not made.is_file():
        raise InvalidArgument(f"'{source}' cannot be made a checkpoint: {_reason(run)}")
    classes = run.stdout.strip().endswith("classes")
    plan = forest_plan(made, "treelite_checkpoint", classes)
    return replace(plan, name=guess_model_name(source), kind=f"a forest, unpickled from {source}")


def is_saved_model(path: Path) -> bool:
    return (path / "saved_model.pb").is_file()


def convert_saved_model(source: Path, directory: Path) -> ImportPlan:
    """An ONNX model in `directory`, made of a SavedModel by tf2onnx in a process of its own. Raises `CharoniaError`,
    which tells how to serve the SavedModel itself."""
    if find_spec("tf2onnx") is None or find_spec("tensorflow") is None:
        needed = "to make an ONNX model of it takes pip install '.[tensorflow]'"
        raise Unsupported(f"'{source}' is a SavedModel of TensorFlow: {needed}")
    made = directory / MODEL_FILES[".onnx"]
    command = [sys.executable, "-m", "tf2onnx.convert", "--saved-model", str(source), "--output", str(made)]
    quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    run = _run(command, quiet)
    refused = _UNSUPPORTED_OPERATORS.search(run.stderr)
    if run.returncode or refused or not made.is_file():
        operators = ", ".join(re.findall(r"'(.*?)'", refused[1])) if refused else ""
        reason = f"tf2onnx does not know the operators {operators}" if refused else _reason(run)
        itself = f"as NAME/1/model{SAVED_MODEL} in a repository TensorFlow runs it"
        raise InvalidArgument(f"'{source}' cannot be made an ONNX model: {reason}; {itself}")
    plan = file_plan(made)
    return replace(plan, name=guess_model_name(source), kind=f"an ONNX model, made of the SavedModel {source}")


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)


def _reason(run: subprocess.CompletedProcess[str]) -> str:
    """The last line that a process which failed wrote, or its status."""
    return next(reversed(run.stderr.strip().splitlines()), f"its process ended with {run.returncode}")
