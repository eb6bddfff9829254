"""Model repositories to put under load: Python models, and ensembles of native, Python and language models.

`double` answers each request once; `stream` sends responses from threads and coroutines, and now and then one that does
not look whether its client has left. `talk` asks a language model between an identity model and a Python model that
marks each piece of text; `nested` passes what `talk` says on, and so does the code of `coded`.
"""

from collections.abc import Mapping
from pathlib import Path

DOUBLE, STREAM, MARK, TALK, NESTED, CODED = "double", "stream", "mark", "talk", "nested", "coded"

_DOUBLE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x, text = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("X", "TEXT"))
        turned = np.array([item[::-1] for item in text.ravel()], object).reshape(text.shape)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", 2 * x), pb_utils.Tensor("TURNED", turned)])
"""
_STREAM = """
import asyncio
import threading
import time
from itertools import count

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.turns = count()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def execute(self, requests):
        for request in requests:
            number = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
            sender, turn = request.get_response_sender(), next(self.turns)
            if turn % 2:
                asyncio.run_coroutine_threadsafe(self.send_in_loop(sender, number), self.loop)
            else:
                threading.Thread(target=self.send, args=(sender, number, turn % 16 == 0), daemon=True).start()

    def send(self, sender, number, deaf):
        for index in range(number):
            sender.send(response(index))
            if not deaf:
                time.sleep(0.002)
                if sender.is_cancelled():
                    break
        sender.send(flags=FINAL)

    async def send_in_loop(self, sender, number):
        for index in range(number):
            sender.send(response(index))
            await asyncio.sleep(0.002)
            if sender.is_cancelled():
                break
        sender.send(flags=FINAL)


def response(index):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([index], np.int32))])
"""
_MARK = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.mark(request) for request in requests]

    def mark(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
        marked = np.array([b"<" + item + b">" for item in text.ravel()], object).reshape(text.shape)
        return pb_utils.InferenceResponse([pb_utils.Tensor("MARKED", marked)])
"""
SOURCES = {DOUBLE: _DOUBLE, STREAM: _STREAM, MARK: _MARK}

_TEXT = "TYPE_STRING dims: [ 1 ]"
_QUESTION = (
    f'input [ {{ name: "text_input" data_type: {_TEXT} }}, {{ name: "stream" data_type: TYPE_BOOL dims: [ 1 ] }} ]'
)
_ANSWER = 'output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]'
CONFIGS = {
    DOUBLE: """
backend: "python"
max_batch_size: 16
dynamic_batching { }
instance_group { count: 2 kind: KIND_CPU }
input [ { name: "X" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "TURNED" data_type: TYPE_STRING dims: [ 1 ] } ]
""",
    STREAM: """
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "N" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
""",
    MARK: """
backend: "python"
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "MARKED" data_type: TYPE_STRING dims: [ -1 ] } ]
""",
    "clean": f"""
backend: "identity"
input [ {{ name: "IN" data_type: {_TEXT} }} ]
output [ {{ name: "OUT" data_type: {_TEXT} }} ]
""",
    "pass": """
backend: "identity"
input [ { name: "IN" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ -1 ] } ]
""",
}


_CODE = f"""
from charonia.ensembles import Lookup, NamedTensors


async def run(request: NamedTensors, lookup: Lookup):
    asked = {{"text_input": request.text("text_input"), "stream": True}}
    async for chunk in lookup("{TALK}").stream(asked):
        if "text_output" in chunk:
            yield {{"text_output": chunk["text_output"]}}
"""


def _ensemble(*steps: str) -> str:
    head = f'platform: "ensemble"\nmodel_transaction_policy {{ decoupled: true }}\n{_QUESTION}\n{_ANSWER}\n'
    return f"{head}ensemble_scheduling {{ step [ {', '.join(steps)} ] }}\n"


def _step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    maps = [("input_map", inputs), ("output_map", outputs)]
    wires = " ".join(
        f'{field} {{ key: "{key}" value: "{value}" }}' for field, wired in maps for key, value in wired.items()
    )
    return f'{{ model_name: "{model}" model_version: -1 {wires} }}'


def write_model(directory: Path, name: str) -> None:
    """Write one of the models into the repository `directory`."""
    (directory / name / "1").mkdir(parents=True)
    (directory / name / "config.pbtxt").write_text(CONFIGS[name])
    if name in SOURCES:
        (directory / name / "1" / "model.py").write_text(SOURCES[name])


def write_ensembles(directory: Path, language_model: str) -> None:
    """Write `talk`, `nested` and `coded`, and the steps of theirs that are not the language model."""
    for name in (MARK, "clean", "pass"):
        write_model(directory, name)
    question = {"text_input": "text_input", "stream": "stream"}
    talk = _ensemble(
        _step("clean", {"IN": "text_input"}, {"OUT": "cleaned"}),
        _step(language_model, {**question, "text_input": "cleaned"}, {"text_output": "text"}),
        _step(MARK, {"TEXT": "text"}, {"MARKED": "text_output"}),
    )
    nested = _ensemble(
        _step(TALK, question, {"text_output": "marked"}), _step("pass", {"IN": "marked"}, {"OUT": "text_output"})
    )
    decoupled = "model_transaction_policy { decoupled: true }"
    models = f'parameters {{ key: "models" value {{ string_value: "{TALK}" }} }}'
    coded = f'backend: "pipeline"\n{decoupled}\n{_QUESTION}\n{_ANSWER}\n{models}\n'
    for name, config in ((TALK, talk), (NESTED, nested), (CODED, coded)):
        (directory / name / "1").mkdir(parents=True)
        (directory / name / "config.pbtxt").write_text(config)
    (directory / CODED / "1" / "pipeline.py").write_text(_CODE)
