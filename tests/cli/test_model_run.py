"""`charonia run-model`: inputs as the command line has them, answers as lines of JSON."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.cli.model_run import ModelRequest, print_responses
from charonia.cli.options import ConfigOptions
from charonia.core.errors import InvalidArgument

TYPES = ("INT32", "FP32", "FP16", "BF16", "BOOL", "STRING")
ECHO = "\n".join(
    [
        'backend: "identity" max_batch_size: 4',
        *(f'input {{ name: "IN_{each}" data_type: TYPE_{each} dims: -1 optional: true }}' for each in TYPES),
        *(f'output {{ name: "OUT_{each}" data_type: TYPE_{each} dims: -1 }}' for each in TYPES),
    ]
)
COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        print("counting")
        for request in requests:
            [n] = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if n < 0:
                raise ValueError("it cannot count so far")
            sender = request.get_response_sender()
            for number in range(n):
                asked = pb_utils.InferenceRequest(model_name="echo", requested_output_names=["OUT_INT32"],
                    inputs=[pb_utils.Tensor("IN_INT32", np.array([[number]], np.int32))])
                outputs = asked.exec().output_tensors()
                sender.send(pb_utils.InferenceResponse(outputs, parameters={"seen": request.parameters()}))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNT_CONFIG = """
backend: "python" model_transaction_policy { decoupled: true }
input { name: "IN" data_type: TYPE_INT32 dims: 1 } output { name: "OUT_INT32" data_type: TYPE_INT32 dims: [ -1, -1 ] }
"""
TWICE = """
platform: "ensemble" max_batch_size: 4
input { name: "A" data_type: TYPE_INT32 dims: -1 } output { name: "B" data_type: TYPE_INT32 dims: -1 }
ensemble_scheduling { step { model_name: "echo" model_version: -1
  input_map { key: "IN_INT32" value: "A" } output_map { key: "OUT_INT32" value: "B" } } }
"""
GLUE = """
backend: "pipeline" parameters { key: "models" value { string_value: "echo" } }
input { name: "A" data_type: TYPE_INT32 dims: -1 } output { name: "B" data_type: TYPE_INT32 dims: [ -1, -1 ] }
"""
GLUE_CODE = """
async def run(request, lookup):
    answer = await lookup("echo").infer({"IN_INT32": request["A"]})
    return {"B": answer["OUT_INT32"]}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, config in (("echo", ECHO), ("count", COUNT_CONFIG), ("twice", TWICE), ("glue", GLUE)):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    (root / "count" / "1" / "model.py").write_text(COUNT)
    (root / "glue" / "1" / "pipeline.py").write_text(GLUE_CODE)
    return root


@pytest.fixture
def asked(models: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Ask a model; returns the lines that it answers with."""

    def ask(model: str, *inputs: str, parameters: tuple[str, ...] = (), loads: tuple[str, ...] = ()) -> list[Any]:
        print_responses(models / model, ModelRequest(inputs, parameters, loads), ConfigOptions())
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return ask


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("INT32=[[1, 2], [3, 4]]", [[1, 2], [3, 4]]),
        ("INT32=[1, 2]", [[1, 2]]),
        ("INT32=7", [[7]]),
        ("FP32=[[0.5], [1e3]]", [[0.5], [1000.0]]),
        ("FP16=[1.5]", [[1.5]]),
        ("BOOL=true", [[True]]),
        ("STRING=two words", [["two words"]]),
        ('STRING=["a", "\u00e4"]', [["a", "\u00e4"]]),
        ("INT32=[[]]", [[]]),
    ],
)
def test_inputs_are_json_or_text(asked: Any, given: str, shown: Any) -> None:
    assert asked("echo", f"IN_{given}") == [{"outputs": {f"OUT_{given.partition('=')[0]}": shown}}]


def test_inputs_are_files(asked: Any, tmp_path: Path) -> None:
    arrays = {"INT32": np.arange(4, dtype=np.int32).reshape(2, 2), "STRING": np.array([["a", "b"]] * 2)}
    arrays["BF16"] = np.array([[0x3FC0], [0x4000]], np.uint16)
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    [line] = asked("echo", *(f"IN_{name}=@{tmp_path / name}.npy" for name in arrays))
    assert line["outputs"] == {
        "OUT_INT32": [[0, 1], [2, 3]],
        "OUT_STRING": [["a", "b"], ["a", "b"]],
        "OUT_BF16": [[1.5], [2.0]],
    }


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("IN_INT32", "--input must be NAME=VALUE, got 'IN_INT32'"),
        ("X=1", "model 'echo' has no input 'X'; it has IN_INT32, IN_FP32"),
        ("IN_INT32=[1", "input 'IN_INT32' is no JSON"),
        ("IN_INT32=[1.5]", "Unable to parse 'IN_INT32': attempt to access JSON non-signed-integer as signed-integer"),
        ("IN_INT32=[[1, 2], [3]]", "input 'IN_INT32' has rows of different lengths"),
        ("IN_INT32=@none.npy", "input 'IN_INT32': 'none.npy' cannot be read"),
        ("IN_BF16=1", "give its bits as @file.npy of uint16"),
        ("IN_INT32=[[[1]]]", "unexpected shape for input 'IN_INT32'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(asked: Any, given: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        asked("echo", given)
    assert text in str(caught.value)


def test_a_model_that_asks_another_streams(asked: Any) -> None:
    answers = asked("count", "IN=3", parameters=("a=1", "b=text"), loads=("echo",))
    assert [line["outputs"]["OUT_INT32"] for line in answers] == [[[0]], [[1]], [[2]]]
    assert json.loads(answers[0]["parameters"]["seen"]) == {"a": 1, "b": "text"}


def test_the_steps_of_an_ensemble_are_found_beside_it(asked: Any) -> None:
    sequence = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
    assert asked("twice", "A=[[5]]") == [{"outputs": {"B": [[5]]}, "parameters": sequence}]


def test_a_pipeline_runs_and_its_models_are_found_beside_it(asked: Any) -> None:
    assert asked("glue", "A=[5, 6]") == [{"outputs": {"B": [[5, 6]]}}]


def test_what_is_no_model_is_told(asked: Any) -> None:
    with pytest.raises(InvalidArgument, match="there is no directory"):
        asked("none")


def test_the_command_ends_with_the_failure_of_the_model(models: Path) -> None:
    command = [sys.executable, "-m", "charonia", "run-model", str(models / "count"), "--input", "IN=-1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "count_0: counting\ncount_0: Traceback (most recent call last):\n" in done.stderr
    failure = (
        "Failed to process the request(s) for model instance 'count_0', message: ValueError: it cannot count so far"
    )
    assert f"charonia: {failure}\n\nAt:\n" in done.stderr
